"""A layer's parameters as a flat dictionary, and in the two kinds of layers that hold them."""

from collections.abc import Mapping
from typing import Any

import jax
from flax import linen as nn
from flax import nnx

import mok_jax.linen
import mok_jax.nnx
from mok_jax.interop.layouts import PARAMETER_AXES
from mok_jax.interop.weights import arrays_of
from mok_jax.layer import GATE_BIAS, GATES, Settings


def assign(layer: mok_jax.nnx.MoE, parameters: Mapping[str, jax.Array]) -> None:
    """Puts parameters into an NNX layer, in place of those that it was made with.

    To not make any first, make the layer by ``nnx.eval_shape``.

    Args:
      layer: any, with the same settings as the parameters' but for a ``param_dtype`` or an initialiser.
      parameters: as :func:`mok_jax.interop.load_layer` gives them.

    Raises:
      ValueError: a parameter is missing, is not the layer's, or has another shape.
    """
    check_parameters(layer.settings, parameters)
    nnx.update(layer, _tree(parameters))


def linen_variables(parameters: Mapping[str, jax.Array]) -> dict[str, Any]:
    """The variables of ``mok_jax.linen.MoE``, for ``layer.apply``: ``params`` and perhaps ``moe_state``, without boxes.

    Args:
      parameters: as :func:`mok_jax.interop.load_layer` gives them.
    """
    tree = _tree(parameters)
    state = {"expert_bias": tree.pop("expert_bias")} if "expert_bias" in tree else None
    return {"params": tree} | ({mok_jax.linen.STATE: state} if state else {})


def parameters_of(source: mok_jax.nnx.MoE | Mapping[str, Any]) -> dict[str, jax.Array]:
    """Those of an NNX layer, or in the variables of a Linen layer, as :func:`mok_jax.interop.save_layer` takes them."""
    if isinstance(source, mok_jax.nnx.MoE):
        flat = {"/".join(map(str, path)): value[...] for path, value in nnx.to_flat_state(nnx.state(source))}
    else:
        tree = nn.unbox({**source["params"], **source.get(mok_jax.linen.STATE, {})})
        flat = {"/".join(path): value for path, value in nnx.traversals.flatten_mapping(tree).items()}
    return {"gate_bias" if name == "gate/bias" else name.removesuffix("/kernel"): flat[name] for name in flat}


def _tree(parameters: Mapping[str, jax.Array]) -> dict[str, Any]:
    """As both kinds of layers nest them: a gate has a ``kernel`` and perhaps a ``bias``."""
    tree: dict[str, Any] = {name: {"kernel": value} if name in GATES else value for name, value in parameters.items()}
    if GATE_BIAS in tree:
        tree["gate"]["bias"] = tree.pop(GATE_BIAS)
    return tree


def check_parameters(settings: Settings, parameters: Mapping[str, jax.Array], any_padding: bool = False) -> None:
    """Raises ValueError unless all of the layer's parameters are there, and no others, in their shapes."""
    shapes = {name: parameter.shape for name, parameter in arrays_of(settings).items()}
    for name in [*shapes, *parameters]:
        if name not in parameters:
            raise ValueError(f"parameters has no {name}, which the layer has.")
        if name not in shapes:
            raise ValueError(f"parameters has {name}, which the layer does not have; it has {', '.join(shapes)}.")
        shape, wanted = parameters[name].shape, shapes[name]
        if any_padding and PARAMETER_AXES[name].startswith("e") and shape[:1] >= (settings.num_experts,):
            wanted = (*shape[:1], *wanted[1:])
        if shape != wanted:
            raise ValueError(f"{name} has shape {shape}; it must have shape {wanted}.")
