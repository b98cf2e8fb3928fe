"""From a published ``config.json`` to the arguments of the layer that it describes.

Field names are those of the models' own configurations, as transformers reads them. Where ``config.json`` asks for what
the layer does not compute, it is refused rather than passed over.
"""

import numbers
from collections.abc import Callable, Mapping
from typing import Any

from mok_jax import zoo


def arguments(config: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of ``mok_jax.nnx.MoE`` and ``mok_jax.linen.MoE`` for the sparse layers of a model.

    They are those of :meth:`mok_jax.zoo.Layer.arguments`. A model's dense layers are not told apart, nor those of
    DeepSeek-V4 that route by a table, which are made with ``expert_bias=False`` besides.

    Args:
      config: what ``config.json`` holds, of a model type in :data:`MODEL_TYPES`. Of a model that also sees or hears,
        its ``text_config`` counts.

    Returns:
      A new dictionary, with sizes as ``int``, factors as ``float``.

    Raises:
      ValueError: the model type is unknown, or a field is missing, contradicts another, or asks for what the layer
        cannot do.

    Example:
      >>> arguments({"model_type": "mixtral", "hidden_size": 64, "intermediate_size": 128, "hidden_act": "silu",
      ...            "num_local_experts": 8, "num_experts_per_tok": 2})["num_experts"]
      8
    """
    name, config = text_config(config)
    return zoo.Layer(**_FAMILIES[name](_Fields(name, config)), sources=()).arguments()


def text_config(config: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """The model type that says which fields and tensors there are, and the part of ``config.json`` with the fields."""
    name = config.get("model_type")
    if text_model_type(name) == name:
        return name, config
    inner = config.get("text_config")
    if not isinstance(inner, Mapping):
        raise ValueError(f"config.json has no 'text_config', which a model of type {name!r} must have.")
    return text_model_type(inner.get("model_type", name)), inner


def text_model_type(name: Any) -> str:
    """The model type of the language model in one of type ``name``, as far as that says it."""
    if name not in MODEL_TYPES:
        raise ValueError(f"model_type is {name!r}; it must be one of {', '.join(MODEL_TYPES)}.")
    return _WITH_TEXT_CONFIG.get(name, name)


class _Fields:
    """``config.json`` of one model type, with a refusal of each value that is not what it must be."""

    def __init__(self, model_type: str, config: Mapping[str, Any]):
        self._model_type, self._config = model_type, config

    def _value(self, name: str) -> Any:
        if name not in self._config:
            raise ValueError(f"config.json has no {name!r}, which a model of type {self._model_type!r} must have.")
        return self._config[name]

    def size(self, name: str, least: int = 1) -> int:
        value = self._value(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{name} is {value!r}; it must be a whole number of at least {least}.")
        return value

    def factor(self, name: str) -> float:
        value = self._value(name)
        if isinstance(value, bool) or not isinstance(value, numbers.Real) or not 0 < float(value) < float("inf"):
            raise ValueError(f"{name} is {value!r}; it must be a positive number.")
        return float(value)

    def choice(self, name: str, *legal: Any) -> Any:
        value = self._value(name)
        if not any(value is each or (value == each and type(value) is type(each)) for each in legal):
            raise ValueError(f"{name} is {value!r}; it must be {' or '.join(map(repr, legal))}.")
        return value

    def flag(self, name: str) -> bool:
        return self.choice(name, True, False)

    def only(self, name: str, *legal: Any) -> None:
        """For what has one meaning here, and need not be said."""
        if name in self._config:
            self.choice(name, *legal)

    def either(self, name: str, other: str) -> str:
        """Of two names of one thing the one that is there."""
        if name not in self._config and other in self._config:
            return other
        if other in self._config and self._config[other] != self._value(name):
            raise ValueError(f"{other} is {self._config[other]!r}, but {name} is {self._config[name]!r}; they are one.")
        return name

    def sizes(self, inner: str, experts: str, top_k: str = "num_experts_per_tok") -> dict[str, int]:
        """What every model has; its experts are gated by SiLU."""
        self.only("hidden_act", "silu")
        given = {"hidden_size": self.size("hidden_size"), "intermediate_size": self.size(inner)}
        given |= {"num_experts": self.size(experts), "num_experts_per_tok": self.size(top_k)}
        if given["num_experts_per_tok"] > given["num_experts"]:
            raise ValueError(
                f"{top_k} is {given['num_experts_per_tok']}; it must be at most {experts}, which is "
                f"{given['num_experts']}."
            )
        return given

    def groups(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """``n_group`` and ``topk_group``, which must leave a token enough experts."""
        groups, chosen = self.size("n_group"), self.size("topk_group")
        experts, top_k = sizes["num_experts"], sizes["num_experts_per_tok"]
        if experts % groups:
            raise ValueError(f"n_group is {groups}; it must divide n_routed_experts, which is {experts}.")
        if not top_k * groups <= chosen * experts <= groups * experts:
            least = -(-top_k * groups // experts)
            raise ValueError(
                f"topk_group is {chosen}; it must be from {least}, which have {top_k} experts for a token, to n_group, "
                f"which is {groups}."
            )
        return {"num_groups": groups, "group_topk": chosen}


def _softmax(fields: _Fields, inner: str, experts: str) -> dict[str, Any]:
    """A softmax over all experts, and no shared ones: what Qwen, Mixtral and OLMoE have in common."""
    sizes = fields.sizes(inner, experts)
    return {**sizes, "num_shared_experts": 0, "score_function": "softmax", "routed_scaling_factor": 1.0}


def _mixtral(fields: _Fields) -> dict[str, Any]:
    return _softmax(fields, "intermediate_size", "num_local_experts")


def _olmoe(fields: _Fields) -> dict[str, Any]:
    given = _softmax(fields, "intermediate_size", "num_experts")
    return given | {"norm_topk_prob": fields.flag("norm_topk_prob")}


def _qwen(fields: _Fields) -> dict[str, Any]:
    # The second is what newer transformers write.
    return _softmax(fields, "moe_intermediate_size", fields.either("num_experts", "num_local_experts"))


def _qwen3(fields: _Fields) -> dict[str, Any]:
    return _qwen(fields) | {"norm_topk_prob": fields.flag("norm_topk_prob")}


def _gated_shared_expert(fields: _Fields) -> dict[str, Any]:
    width = fields.size("shared_expert_intermediate_size")
    return {"num_shared_experts": 1, "shared_intermediate_size": width, "shared_gated": True}


def _qwen2(fields: _Fields) -> dict[str, Any]:
    return _qwen3(fields) | _gated_shared_expert(fields)


def _qwen3_5(fields: _Fields) -> dict[str, Any]:
    fields.only("norm_topk_prob", True)  # Its code always does.
    return _qwen(fields) | _gated_shared_expert(fields)


def _deepseek(fields: _Fields) -> dict[str, Any]:
    fields.only("moe_layer_freq", 1)
    return {
        **fields.sizes("moe_intermediate_size", "n_routed_experts"),
        "num_shared_experts": fields.size("n_shared_experts", least=0),
        "routed_scaling_factor": fields.factor("routed_scaling_factor"),
    }


def _deepseek_v2(fields: _Fields) -> dict[str, Any]:
    given = _deepseek(fields)
    fields.only("scoring_func", "softmax")
    # Its own code then leaves out the factor, and its port in transformers does not normalise.
    fields.choice("norm_topk_prob", False)
    if fields.choice("topk_method", "greedy", "group_limited_greedy") == "greedy":
        fields.only("n_group", 1, None)
        fields.only("topk_group", 1, None)
        groups = {"num_groups": 1, "group_topk": 1}
    else:
        groups = fields.groups(given)
    return {**given, **groups, "score_function": "softmax", "norm_topk_prob": False}


def _deepseek_v3(fields: _Fields) -> dict[str, Any]:
    given = _deepseek(fields)
    fields.only("scoring_func", "sigmoid")
    fields.only("topk_method", "noaux_tc")
    given |= fields.groups(given)
    norm = fields.flag("norm_topk_prob")
    return {**given, "score_function": "sigmoid", "selection_bias": True, "norm_topk_prob": norm}


def _deepseek_v4(fields: _Fields) -> dict[str, Any]:
    given = _deepseek(fields)
    fields.only("topk_method", "noaux_tc")
    limit = fields.factor("swiglu_limit")
    return {
        **given,
        "score_function": fields.choice("scoring_func", "sqrtsoftplus", "softmax", "sigmoid"),
        "selection_bias": True,
        "norm_topk_prob": fields.flag("norm_topk_prob"),
        "activation_limit": limit,
        "shared_activation_limit": limit if given["num_shared_experts"] else None,
    }


def _ernie(fields: _Fields) -> dict[str, Any]:
    fields.only("use_bias", False)
    fields.only("moe_norm_gate_logits", True)
    fields.only("moe_norm_min", 1e-12)
    fields.only("moe_use_aux_free", True)
    return {
        **fields.sizes("moe_intermediate_size", "moe_num_experts", "moe_k"),
        "num_shared_experts": fields.size("moe_num_shared_experts", least=0),
        "score_function": "softmax",
        "selection_bias": True,
        "routed_scaling_factor": 1.0,
    }


def _gpt_oss(fields: _Fields) -> dict[str, Any]:
    fields.either("num_experts_per_tok", "experts_per_token")
    fields.only("swiglu_alpha", 1.702)
    return _softmax(fields, "intermediate_size", "num_local_experts") | {
        "softmax_after_topk": True,
        "router_bias": True,
        "activation": "gpt_oss",
        "activation_limit": fields.factor("swiglu_limit"),
        "expert_biases": True,
    }


def _llama4(fields: _Fields) -> dict[str, Any]:
    return {
        **fields.sizes("intermediate_size", "num_local_experts"),
        "num_shared_experts": 1,
        "score_function": "sigmoid",
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "apply_router_weight_on_input": True,
    }


_FAMILIES: dict[str, Callable[[_Fields], dict[str, Any]]] = {
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
    "deepseek_v4": _deepseek_v4,
    "ernie4_5_moe": _ernie,
    "glm4_moe": _deepseek_v3,
    "glm_moe_dsa": _deepseek_v3,
    "gpt_oss": _gpt_oss,
    "kimi_k2": _deepseek_v3,
    "llama4_text": _llama4,
    "mixtral": _mixtral,
    "olmoe": _olmoe,
    "qwen2_moe": _qwen2,
    "qwen3_moe": _qwen3,
    "qwen3_5_moe_text": _qwen3_5,
}

# Models that see or hear, and the type of the part that is a language model.
_WITH_TEXT_CONFIG = {"kimi_k25": "kimi_k2", "llama4": "llama4_text", "qwen3_5_moe": "qwen3_5_moe_text"}

MODEL_TYPES = (*sorted({*_FAMILIES, *_WITH_TEXT_CONFIG}),)
"""What ``model_type`` may be."""
