"""Small checkpoints of published models, and their sparse layers in float64 NumPy by the names of the tensors.

Nothing here knows of ``mok_jax``: names and shapes of tensors are those that transformers' modelling code and the
published files have, and a token goes through them as it does there. Routers are those of ``published_layers``.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
import safetensors.numpy

from support import published_layers as published

HIDDEN, INNER, EXPERTS, TOP_K, SHARED = 64, 32, 6, 2, 24
LAYER = 3
BF16 = np.dtype(ml_dtypes.bfloat16)


def silu(x):
    return x * published.sigmoid(x)


def glu(x, gate, up, down, limit=np.inf):
    """Three ``torch.nn.Linear``: weights are ``[out, in]``."""
    return down @ (silu(np.minimum(gate @ x, limit)) * np.clip(up @ x, -limit, limit))


# Experts: from the tensors of a layer, an expert's id and a token [H] to what it gives [H].


def numbered(w, expert, x, limit=np.inf):
    return glu(x, *(w[f"experts.{expert}.{name}.weight"] for name in ("w1", "w3", "w2")), limit)


def projections(w, expert, x):
    return glu(x, *(w[f"experts.{expert}.{name}_proj.weight"] for name in ("gate", "up", "down")))


def fused_linear(w, expert, x):
    """Qwen3.5: ``F.linear(x, gate_up_proj[e]).chunk(2)``."""
    gate, up = np.split(w["experts.gate_up_proj"][expert] @ x, 2)
    return w["experts.down_proj"][expert] @ (silu(gate) * up)


def fused_bmm(w, expert, x):
    """Llama-4: ``torch.bmm(x, gate_up_proj).chunk(2)``."""
    gate, up = np.split(x @ w["experts.gate_up_proj"][expert], 2)
    return (up * silu(gate)) @ w["experts.down_proj"][expert]


def gpt_oss(w, expert, x):
    """Gate and up alternate, and both products have biases."""
    both = x @ w["experts.gate_up_proj"][expert] + w["experts.gate_up_proj_bias"][expert]
    gate, up = np.minimum(both[::2], 7), np.clip(both[1::2], -7, 7)
    inner = (up + 1) * gate * published.sigmoid(1.702 * gate)
    return inner @ w["experts.down_proj"][expert] + w["experts.down_proj_bias"][expert]


def e2m1(bits):
    """One sign, two bits of exponent with a bias of 1, one of mantissa."""
    sign, exponent, mantissa = bits >> 3, bits >> 1 & 3, bits & 1
    return (1 - 2.0 * sign) * np.where(exponent == 0, mantissa / 2, (1 + mantissa / 2) * 2.0 ** (exponent - 1))


def from_mxfp4(blocks, scales):
    """``[E, out, in / 32, 16]`` and ``[E, out, in / 32]`` to ``[E, in, out]``, the lower bits of a byte first."""
    values = np.empty((*scales.shape, 32))
    values[..., ::2], values[..., 1::2] = e2m1(blocks & 15), e2m1(blocks >> 4)
    values *= 2.0 ** (scales.astype(int)[..., None] - 127)
    return values.reshape(*scales.shape[:2], -1).swapaxes(1, 2)


def gpt_oss_mxfp4(w, expert, x):
    made = {f"experts.{name}": from_mxfp4(w[f"experts.{name}_blocks"], w[f"experts.{name}_scales"]) for name in FUSED}
    return gpt_oss({**w, **made}, expert, x)


FUSED = ("gate_up_proj", "down_proj")


@dataclasses.dataclass(frozen=True)
class Model:
    """A kind of checkpoint.

    Attributes:
      config: its ``config.json``, of small size.
      before: what stands before the names of a layer's tensors; ``{}`` is its number.
      shapes: of those tensors.
      route: from logits ``[E]`` and the selection bias to ids and weights.
      expert: one of the functions above.
      router: the name of its weight.
      selection_bias: the name of that tensor.
      shared: the names of the shared experts' three weights.
      weight_on_input: whether weights multiply what goes into the experts.
      limit: clamp of the shared experts.
    """

    config: Mapping
    before: str
    shapes: Mapping[str, tuple[int, ...]]
    route: Callable
    expert: Callable
    router: str = "gate"
    selection_bias: str | None = None
    shared: tuple[str, ...] = ()
    weight_on_input: bool = False
    limit: float = np.inf

    def tensors(self, seed=0):
        """By full name: bf16, selection biases f32, MXFP4 bytes."""
        rng = np.random.default_rng(seed)
        return {f"{self.before.format(LAYER)}{name}": _random(rng, name, shape) for name, shape in self.shapes.items()}

    def forward(self, tensors, x):
        """The layer's output ``[T, H]`` for tokens ``x [T, H]``."""
        start = self.before.format(LAYER)
        w = {name.removeprefix(start): value for name, value in tensors.items() if name.startswith(start)}
        w = {name: value if value.dtype == np.uint8 else value.astype(np.float64) for name, value in w.items()}
        return np.stack([self._token(w, row) for row in x.astype(np.float64)])

    def _token(self, w, x):
        logits = w[f"{self.router}.weight"] @ x + w.get("router.bias", 0)
        bias = w[self.selection_bias].squeeze() if self.selection_bias else 0
        y = np.zeros_like(x)
        for expert, weight in zip(*self.route(logits, bias), strict=True):
            taken, factor = (weight * x, 1) if self.weight_on_input else (x, weight)
            y += factor * self.expert(w, expert, taken)
        if self.shared:
            given = glu(x, *(w[name] for name in self.shared), self.limit)
            gate = w.get("shared_expert_gate.weight")
            y += given if gate is None else published.sigmoid(gate @ x) * given
        return y

    def write(self, folder, tensors=None, files=1):
        """Writes it, all layers being alike; in several files, in the order of names, with an index."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        tensors = self.tensors() if tensors is None else tensors
        if files == 1:
            safetensors.numpy.save_file(tensors, folder / "model.safetensors")
            return
        names = sorted(tensors)
        parts = {f"model-{i + 1:05d}-of-{files:05d}.safetensors": names[i::files] for i in range(files)}
        for file, those in parts.items():
            safetensors.numpy.save_file({name: tensors[name] for name in those}, folder / file)
        weight_map = {name: file for file, those in parts.items() for name in those}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def _random(rng, name, shape):
    if name.endswith("_blocks"):
        return rng.integers(0, 256, shape, dtype=np.uint8)
    if name.endswith("_scales"):
        return rng.integers(122, 127, shape, dtype=np.uint8)
    if "e_score_correction_bias" in name or name == "gate.bias":
        return rng.normal(scale=0.3, size=shape).astype(np.float32)
    return rng.normal(scale=1 if name.endswith("bias") else 0.3, size=shape).astype(BF16)


def _three(block, names, width):
    gate, up, down = names
    matrix = {gate: (width, HIDDEN), up: (width, HIDDEN), down: (HIDDEN, width)}
    return {f"{block}.{name}.weight": shape for name, shape in matrix.items()}


def _each(names):
    return {k: v for e in range(EXPERTS) for k, v in _three(f"experts.{e}", names, INNER).items()}


PROJECTIONS, NUMBERED = ("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")
GATE = {"gate.weight": (EXPERTS, HIDDEN)}
SPLIT = GATE | _each(PROJECTIONS)
CORRECTION = {"gate.e_score_correction_bias": (EXPERTS,)}
SHARED_EXPERT = tuple(f"shared_expert.{name}.weight" for name in PROJECTIONS)
SHARED_EXPERTS = tuple(f"shared_experts.{name}.weight" for name in PROJECTIONS)
QWEN_SHARED = _three("shared_expert", PROJECTIONS, SHARED) | {"shared_expert_gate.weight": (1, HIDDEN)}
FUSED_LINEAR = {"experts.gate_up_proj": (EXPERTS, 2 * INNER, HIDDEN), "experts.down_proj": (EXPERTS, HIDDEN, INNER)}
FUSED_BMM = {"experts.gate_up_proj": (EXPERTS, HIDDEN, 2 * INNER), "experts.down_proj": (EXPERTS, INNER, HIDDEN)}
ROUTER = {"router.weight": (EXPERTS, HIDDEN)}
GPT_OSS = ROUTER | {
    "router.bias": (EXPERTS,),
    "experts.gate_up_proj_bias": (EXPERTS, 2 * INNER),
    "experts.down_proj_bias": (EXPERTS, HIDDEN),
}
MXFP4 = {
    "experts.gate_up_proj_blocks": (EXPERTS, 2 * INNER, HIDDEN // 32, 16),
    "experts.gate_up_proj_scales": (EXPERTS, 2 * INNER, HIDDEN // 32),
    "experts.down_proj_blocks": (EXPERTS, HIDDEN, INNER // 32, 16),
    "experts.down_proj_scales": (EXPERTS, HIDDEN, INNER // 32),
}


def _config(model_type, inner, experts, **fields):
    sizes = {"hidden_size": HIDDEN, inner: INNER, experts: EXPERTS, "num_experts_per_tok": TOP_K}
    return {"model_type": model_type, "hidden_act": "silu", **sizes, **fields}


def _qwen(model_type, **fields):
    return _config(model_type, "moe_intermediate_size", "num_experts", **fields)


def _deepseek(model_type, **fields):
    return _config(model_type, "moe_intermediate_size", "n_routed_experts", **fields)


WIDTH = {"shared_expert_intermediate_size": SHARED}
GROUPS = {"n_group": 2, "topk_group": 1, "routed_scaling_factor": 2.5}
V3 = {"n_shared_experts": 1, "norm_topk_prob": True, "scoring_func": "sigmoid"} | GROUPS
V3_LAYER = {
    "before": "model.layers.{}.mlp.",
    "shapes": SPLIT | CORRECTION | _three("shared_experts", PROJECTIONS, INNER),
    "route": published.deepseek_v3(TOP_K, 2.5, 2, 1),
    "expert": projections,
    "selection_bias": "gate.e_score_correction_bias",
    "shared": SHARED_EXPERTS,
}
QWEN3_5 = {"model_type": "qwen3_5_moe", "text_config": _qwen("qwen3_5_moe_text", **WIDTH)}
GPT_OSS_CONFIG = _config("gpt_oss", "intermediate_size", "num_local_experts", swiglu_limit=7.0)
ERNIE = {"model_type": "ernie4_5_moe", "hidden_size": HIDDEN, "moe_intermediate_size": INNER, "moe_k": TOP_K}

MODELS = {
    "mixtral": Model(
        _config("mixtral", "intermediate_size", "num_local_experts"),
        "model.layers.{}.block_sparse_moe.",
        GATE | _each(NUMBERED),
        published.mixtral(TOP_K),
        numbered,
    ),
    "olmoe": Model(
        _config("olmoe", "intermediate_size", "num_experts", norm_topk_prob=False),
        "model.layers.{}.mlp.",
        SPLIT,
        published.olmoe(TOP_K),
        projections,
    ),
    "qwen2_moe": Model(
        _qwen("qwen2_moe", norm_topk_prob=False, **WIDTH),
        "model.layers.{}.mlp.",
        SPLIT | QWEN_SHARED,
        published.olmoe(TOP_K),
        projections,
        shared=SHARED_EXPERT,
    ),
    "qwen3_moe": Model(
        _qwen("qwen3_moe", norm_topk_prob=True), "model.layers.{}.mlp.", SPLIT, published.mixtral(TOP_K), projections
    ),
    "qwen3_5_moe": Model(
        QWEN3_5,
        "model.language_model.layers.{}.mlp.",
        GATE | FUSED_LINEAR | QWEN_SHARED,
        published.mixtral(TOP_K),
        fused_linear,
        shared=SHARED_EXPERT,
    ),
    "qwen3_5_moe, split": Model(
        QWEN3_5,
        "model.language_model.layers.{}.mlp.",
        SPLIT | QWEN_SHARED,
        published.mixtral(TOP_K),
        projections,
        shared=SHARED_EXPERT,
    ),
    "deepseek_v2": Model(
        _deepseek(
            "deepseek_v2", n_shared_experts=2, norm_topk_prob=False, topk_method="group_limited_greedy", **GROUPS
        ),
        "model.layers.{}.mlp.",
        SPLIT | _three("shared_experts", PROJECTIONS, 2 * INNER),
        published.deepseek_v2(TOP_K, 2.5, 2, 1),
        projections,
        shared=SHARED_EXPERTS,
    ),
    "deepseek_v3": Model(_deepseek("deepseek_v3", **V3), **V3_LAYER),
    "glm4_moe": Model(_deepseek("glm4_moe", **V3), **V3_LAYER),
    "kimi_k25": Model(
        {"model_type": "kimi_k25", "text_config": _deepseek("kimi_k2", **V3)},
        **V3_LAYER | {"before": "language_model.model.layers.{}.mlp."},
    ),
    "deepseek_v4": Model(
        _deepseek(
            "deepseek_v4",
            n_shared_experts=1,
            norm_topk_prob=True,
            scoring_func="sqrtsoftplus",
            routed_scaling_factor=1.5,
            swiglu_limit=1.0,  # that small weights are clamped
        ),
        "layers.{}.ffn.",
        GATE | {"gate.bias": (EXPERTS,)} | _each(NUMBERED) | _three("shared_experts", NUMBERED, INNER),
        published.deepseek_v4(TOP_K, 1.5),
        lambda w, expert, x: numbered(w, expert, x, limit=1.0),
        selection_bias="gate.bias",
        shared=tuple(f"shared_experts.{name}.weight" for name in NUMBERED),
        limit=1.0,
    ),
    "ernie4_5_moe": Model(
        ERNIE | {"moe_num_experts": EXPERTS, "moe_num_shared_experts": 2},
        "model.layers.{}.mlp.",
        SPLIT
        | {"moe_statics.e_score_correction_bias": (1, EXPERTS)}
        | _three("shared_experts", PROJECTIONS, 2 * INNER),
        published.ernie(TOP_K),
        projections,
        selection_bias="moe_statics.e_score_correction_bias",
        shared=SHARED_EXPERTS,
    ),
    "llama4": Model(
        {
            "model_type": "llama4",
            "text_config": _config("llama4_text", "intermediate_size", "num_local_experts"),
        },
        "language_model.model.layers.{}.feed_forward.",
        ROUTER | FUSED_BMM | _three("shared_expert", PROJECTIONS, INNER),
        published.llama4(TOP_K),
        fused_bmm,
        router="router",
        shared=SHARED_EXPERT,
        weight_on_input=True,
    ),
    "gpt_oss": Model(
        GPT_OSS_CONFIG,
        "model.layers.{}.mlp.",
        GPT_OSS | FUSED_BMM,
        published.gpt_oss(TOP_K),
        gpt_oss,
        router="router",
    ),
    "gpt_oss, MXFP4": Model(
        GPT_OSS_CONFIG,
        "model.layers.{}.mlp.",
        GPT_OSS | MXFP4,
        published.gpt_oss(TOP_K),
        gpt_oss_mxfp4,
        router="router",
    ),
}
