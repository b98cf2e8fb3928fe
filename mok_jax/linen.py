"""The Mixture-of-Experts layer for Flax Linen, on global arrays: the same layer as :class:`mok_jax.nnx.MoE`.

Same arguments, same parameters and, given those, the same bits: what it computes is in :mod:`mok_jax.layer`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.core.spmd import shard_value
from jax.sharding import Mesh
from jax.typing import DTypeLike

from mok_jax import sharding
from mok_jax.activation import Activation
from mok_jax.api import Implementation
from mok_jax.config import MoKConfig
from mok_jax.layer import GATES, MoEOutput, Parameter, Settings, Weights, forward

__all__ = ["STATE", "Gate", "MoE", "MoEOutput"]

STATE = "moe_state"
"""The collection of ``expert_bias``."""


class Gate(nn.Module):
    """Holds the matrix of a router, ``kernel [H, E]``, or of the shared experts' gate, ``kernel [H, 1]``."""

    settings: Settings
    parameter: Parameter

    @nn.compact
    def __call__(self) -> jax.Array:
        return _param(self, "kernel", self.parameter, self.settings)


class MoE(nn.Module):
    """A Mixture-of-Experts feed-forward layer.

    Arguments, parameters and what is refused: :class:`mok_jax.layer.Settings`, which is ``layer.settings``. Parameters
    are boxed with the logical axes ``exp``, ``embed``, ``mlp``. With a mesh they are created sharded by
    :func:`mok_jax.sharding.logical_axis_rules`, where the caller's rules (``nn.logical_axis_rules``) do not say
    otherwise. Initialisation runs the reference implementation.

    ``expert_bias [E]``, if asked for, is the one variable of the collection ``moe_state``: it starts at 0, has no
    gradient, and a training step adds ``out.expert_bias_update`` to it.

    All of the output but ``output`` is also sown into ``intermediates``, for who cannot pass it through a model.

    Example:
      >>> layer = MoE(hidden_size=8, intermediate_size=16, num_experts=4, num_experts_per_tok=2)
      >>> x = jnp.ones((2, 3, 8))
      >>> variables = layer.init(jax.random.key(0), x)
      >>> out = layer.apply(variables, x)
      >>> out.output.shape, int(out.expert_load.sum())
      ((2, 3, 8), 12)
    """

    hidden_size: int
    intermediate_size: int
    num_experts: int
    num_experts_per_tok: int
    _: dataclasses.KW_ONLY
    score_function: str = "softmax"
    softmax_after_topk: bool = False
    num_groups: int = 1
    group_topk: int = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    expert_bias: bool | None = None
    expert_bias_update_rate: float = 0.001
    aux_loss_coeff: float = 0.0
    seq_aux: bool = False
    z_loss_coeff: float = 0.0
    num_shared_experts: int = 0
    shared_intermediate_size: int | None = None
    shared_expert_gate: bool = False
    use_bias: bool = False
    activation: Activation = "swiglu"
    activation_limit: float | None = None
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32
    kernel_init: Callable[..., jax.Array] | None = None
    mesh: Mesh | None = None
    expert_axis: str | tuple[str, ...] = sharding.EXPERT_AXIS
    config: MoKConfig | None = None
    implementation: Implementation | None = None

    def __post_init__(self) -> None:
        # Not only where the layer is first used: the arguments are refused where they were written.
        _ = self.settings
        super().__post_init__()

    @property
    def settings(self) -> Settings:
        """All arguments."""
        return Settings(**{field.name: getattr(self, field.name) for field in dataclasses.fields(Settings)})

    @nn.compact
    def __call__(self, x: jax.Array, token_mask: jax.Array | None = None) -> MoEOutput:
        """Routes every token to its experts and sums their outputs: :func:`mok_jax.layer.forward`.

        Args:
          x: ``[..., H]``, any number of leading dimensions and any sharding.
          token_mask: bool ``[...]``, ``True`` for real tokens; ``None`` when all are.

        Returns:
          A :class:`MoEOutput`.

        Raises:
          ValueError: as :func:`mok_jax.layer.forward`.
        """
        settings = self.settings
        arrays = {
            name: Gate(settings, parameter, name=name)() if name in GATES else _param(self, name, parameter, settings)
            for name, parameter in settings.parameters().items()
        }
        if settings.expert_bias:
            bias = settings.expert_bias_parameter()
            init = _sharded(bias, settings)
            arrays["expert_bias"] = self.variable(STATE, "expert_bias", init, None, bias.shape, jnp.float32).value
        if self.is_initializing():
            settings = dataclasses.replace(settings, implementation="reference")
        out = forward(settings, Weights(**arrays), x, token_mask)
        for name in ("aux_loss", "z_loss", "expert_load", "expert_bias_update"):
            self.sow("intermediates", name, getattr(out, name))
        return out


def _param(module: nn.Module, name: str, parameter: Parameter, settings: Settings):
    """The parameter, sharded where there is a mesh, and boxed with its logical axes."""
    along: dict[str, Any] = {}
    if settings.mesh is not None and settings.mesh.are_all_axes_auto:
        # Such a box constrains its value when it is opened. Of an explicit mesh, an array's type says as much.
        along = {"mesh": settings.mesh, "rules": settings.axis_rules()}
    init = nn.with_logical_partitioning(_sharded(parameter, settings), parameter.axes, **along)
    return module.param(name, init, parameter.shape, settings.param_dtype)


def _sharded(parameter: Parameter, settings: Settings):
    """The parameter's ``init``, with a result that lies along the mesh if there is one."""
    if settings.mesh is None:
        return parameter.init
    rules = settings.axis_rules()
    return lambda *arguments: shard_value(parameter.init(*arguments), parameter.axes, rules, settings.mesh)
