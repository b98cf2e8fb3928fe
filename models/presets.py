"""Published layers as blocks of the small model: ``--preset qwen3-30b-a3b --scale tiny``."""

from typing import Any

from mok_jax import zoo

PRESETS = tuple(zoo.LAYERS)
SCALES = ("tiny", "full")
_TINY = {"hidden_size": 64, "intermediate_size": 32}
_TINY_EXPERTS, _TINY_CHOICES = 16, 4
# What says how large a layer is; all else are its rules.
_SIZES = ("hidden_size", "intermediate_size", "num_experts", "num_experts_per_tok")


def sizes(preset: str, scale: str) -> dict[str, int]:
    """A layer's sizes as options of the model: those that were published, or ones for a laptop.

    Example:
      >>> sizes("qwen3-30b-a3b", "full")
      {'hidden_size': 2048, 'intermediate_size': 768, 'num_experts': 128, 'num_experts_per_tok': 8}
      >>> sizes("qwen3-30b-a3b", "tiny")["num_experts"]
      16
    """
    published = zoo.LAYERS[preset].arguments()
    if scale == "full":
        return {name: published[name] for name in _SIZES}
    return _TINY | {
        "num_experts": min(published["num_experts"], _TINY_EXPERTS),
        "num_experts_per_tok": min(published["num_experts_per_tok"], _TINY_CHOICES),
    }


def rules(preset: str, intermediate_size: int) -> dict[str, Any]:
    """What :class:`mok_jax.nnx.MoE` is told of a layer besides its sizes; shared experts are as much wider than the
    others as the published ones are.

    Example:
      >>> rules("deepseek-v3", 32)["num_groups"], rules("qwen2-57b-a14b", 32)["shared_intermediate_size"]
      (8, 256)
    """
    published = zoo.LAYERS[preset].arguments()
    own = {name: value for name, value in published.items() if name not in _SIZES}
    if "shared_intermediate_size" in own:
        ratio = own["shared_intermediate_size"] / published["intermediate_size"]
        own["shared_intermediate_size"] = max(1, round(ratio * intermediate_size))
    return own
