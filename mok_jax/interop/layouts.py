"""Which tensors of a checkpoint a layer's parameters are, as tables: one for each way of naming and storing them.

Names are those of the files that were published, as transformers reads them: ``modeling_*.py`` of a model has its
modules, ``conversion_mapping.py`` what its files call otherwise. A table knows nothing of sizes.
"""

import dataclasses
from typing import Literal, NamedTuple

PARAMETER_AXES = {
    "gate": "io",
    "gate_bias": "o",
    "expert_bias": "o",
    "wi_0": "eio",
    "wi_1": "eio",
    "wo": "eio",
    "wi_0_bias": "eo",
    "wi_1_bias": "eo",
    "wo_bias": "eo",
    "shared_wi_0": "io",
    "shared_wi_1": "io",
    "shared_wo": "io",
    "shared_gate": "io",
}
"""Of each parameter its dimensions: ``e`` experts, ``i`` what goes in, ``o`` what comes out."""


class Tensor(NamedTuple):
    """Where a parameter is.

    Attributes:
      name: behind the layer's prefix; with ``{expert}`` where each expert has a tensor of its own.
      axes: dimensions as stored, with the letters of :data:`PARAMETER_AXES`; ``1`` is one more, of that size. Weights
        of a ``torch.nn.Linear`` are ``oi``.
      part: which columns are the parameter's where gate and up share a tensor, which is twice as wide along ``o``.
      mxfp4: whether ``name`` stands for ``name_blocks`` and ``name_scales``, see :mod:`mok_jax.interop.mxfp4`.
    """

    name: str
    axes: str
    part: Literal["first half", "second half", "even", "odd"] | None = None
    mxfp4: bool = False


@dataclasses.dataclass(frozen=True)
class Layout:
    """A way of storing a layer.

    Attributes:
      block: behind ``layers.N.``, before the names of ``tensors``.
      tensors: by the parameter's name. A layer need not have all of them.
      ignored: tensors beside them that are no parameters of the layer.
    """

    block: str
    tensors: dict[str, Tensor]
    ignored: tuple[str, ...] = ()


def _mlp(name: str, gate: str, up: str, down: str) -> dict[str, Tensor]:
    """The three matrices of each expert."""
    matrices = {"wi_0": gate, "wi_1": up, "wo": down}
    return {parameter: Tensor(f"{name}.{{expert}}.{matrix}.weight", "oi") for parameter, matrix in matrices.items()}


def _shared(name: str, gate: str, up: str, down: str) -> dict[str, Tensor]:
    """The three matrices of all shared experts together."""
    matrices = {"shared_wi_0": gate, "shared_wi_1": up, "shared_wo": down}
    return {parameter: Tensor(f"{name}.{matrix}.weight", "oi") for parameter, matrix in matrices.items()}


def _fused(axes: str, parts: tuple, mxfp4: bool = False) -> dict[str, Tensor]:
    """All experts in two tensors, gate and up in one of them."""
    gate, up = (Tensor("experts.gate_up_proj", axes, part, mxfp4) for part in parts)
    return {"wi_0": gate, "wi_1": up, "wo": Tensor("experts.down_proj", axes, mxfp4=mxfp4)}


_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_NUMBERED = ("w1", "w3", "w2")
_HALVES = ("first half", "second half")
_ALTERNATING = ("even", "odd")

_GATE = {"gate": Tensor("gate.weight", "oi")}
_EXPERTS = _GATE | _mlp("experts", *_PROJECTIONS)
_QWEN_SHARED = _shared("shared_expert", *_PROJECTIONS) | {"shared_gate": Tensor("shared_expert_gate.weight", "oi")}
_DEEPSEEK_SHARED = _shared("shared_experts", *_PROJECTIONS)
_CORRECTION = {"expert_bias": Tensor("gate.e_score_correction_bias", "o")}

MIXTRAL = Layout("block_sparse_moe.", _GATE | _mlp("experts", *_NUMBERED))
QWEN = Layout("mlp.", _EXPERTS | _QWEN_SHARED)
QWEN3_5 = Layout("mlp.", _GATE | _fused("eoi", _HALVES) | _QWEN_SHARED)
DEEPSEEK = Layout("mlp.", _EXPERTS | _DEEPSEEK_SHARED | _CORRECTION)
ERNIE = Layout(
    "mlp.",
    _EXPERTS | _DEEPSEEK_SHARED | {"expert_bias": Tensor("moe_statics.e_score_correction_bias", "1o")},
)
DEEPSEEK_V4 = Layout(
    "ffn.",
    _GATE
    | {"expert_bias": Tensor("gate.bias", "o")}
    | _mlp("experts", *_NUMBERED)
    | _shared("shared_experts", *_NUMBERED),
    ignored=("gate.tid2eid",),  # The table of a layer that routes by it: what calls the layer looks there.
)
LLAMA4 = Layout(
    "feed_forward.",
    {"gate": Tensor("router.weight", "oi")} | _fused("eio", _HALVES) | _shared("shared_expert", *_PROJECTIONS),
)
_GPT_OSS = {
    "gate": Tensor("router.weight", "oi"),
    "gate_bias": Tensor("router.bias", "o"),
    "wi_0_bias": Tensor("experts.gate_up_proj_bias", "eo", "even"),
    "wi_1_bias": Tensor("experts.gate_up_proj_bias", "eo", "odd"),
    "wo_bias": Tensor("experts.down_proj_bias", "eo"),
}
GPT_OSS = Layout("mlp.", _GPT_OSS | _fused("eio", _ALTERNATING))
GPT_OSS_MXFP4 = Layout("mlp.", _GPT_OSS | _fused("eoi", _ALTERNATING, mxfp4=True))

LAYOUTS: dict[str, tuple[Layout, ...]] = {
    "deepseek_v2": (DEEPSEEK,),
    "deepseek_v3": (DEEPSEEK,),
    "deepseek_v4": (DEEPSEEK_V4,),
    "ernie4_5_moe": (ERNIE,),
    "glm4_moe": (DEEPSEEK,),
    "glm_moe_dsa": (DEEPSEEK,),
    "gpt_oss": (GPT_OSS, GPT_OSS_MXFP4),
    "kimi_k2": (DEEPSEEK,),
    "llama4_text": (LLAMA4,),
    "mixtral": (MIXTRAL,),
    "olmoe": (QWEN,),
    "qwen2_moe": (QWEN,),
    "qwen3_moe": (QWEN,),
    "qwen3_5_moe_text": (QWEN3_5, QWEN),
}
"""By model type, those that its checkpoints come in; it is saved in the first."""

_PREFIXES = {
    "deepseek_v4": "",
    "kimi_k25": "language_model.model.",
    "llama4": "language_model.model.",
    "qwen3_5_moe": "model.language_model.",
}
PREFIXES = ("model.", *dict.fromkeys(_PREFIXES.values()))
"""What may stand before ``layers.N.``: of a language model alone, or inside one that sees or hears."""


def prefix_of(model_type: str) -> str:
    """What stands there in what was published of that model type, which may be that of a model that sees or hears."""
    return _PREFIXES.get(model_type, "model.")
