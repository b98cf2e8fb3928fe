"""The Mixture-of-Experts layer for Flax Linen, on global arrays: the same layer as :class:`mok_jax.nnx.MoE`.

Same arguments, same parameters and, given those, the same bits: what it computes is in :mod:`mok_jax.layer`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike

from mok_jax import sharding
from mok_jax.activation import Activation
from mok_jax.api import Implementation
from mok_jax.config import MoKConfig
from mok_jax.layer import GATE_BIAS, GATES, MoEOutput, Parameter, Settings, Weights, forward, splitting

__all__ = ["STATE", "Gate", "MoE", "MoEOutput"]

STATE = "moe_state"
"""The collection of ``expert_bias``."""


class Gate(nn.Module):
    """Holds a router's ``kernel [H, E]`` and perhaps ``bias [E]``, or the shared experts' gate, ``kernel [H, 1]``."""

    settings: Settings
    parameter: Parameter
    bias: Parameter | None = None

    @nn.compact
    def __call__(self) -> tuple[jax.Array, jax.Array | None]:
        kernel = _param(self, "kernel", self.parameter, self.settings)
        return kernel, None if self.bias is None else _param(self, "bias", self.bias, self.settings)


class MoE(nn.Module):
    """A Mixture-of-Experts feed-forward layer.

    Arguments, parameters and what is refused: :class:`mok_jax.layer.Settings`, which is ``layer.settings``.
    Initialisation runs the reference implementation.

    Parameters are boxed with the logical axes ``exp``, ``embed``, ``mlp``, as by ``nn.with_logical_partitioning``: what
    is made on one mesh can be used on any other, or none. With a mesh they are created along what
    ``nn.logical_to_mesh_axes`` says for the caller's rules (``nn.logical_axis_rules``), where these do not name an axis
    by :func:`mok_jax.sharding.logical_axis_rules`. A rule that takes the expert axis for ``embed`` or ``mlp`` leaves
    none for ``exp``, unless one for that stands before it: such weights are moved in every step.

    ``expert_bias [E]``, if asked for, is the one variable of the collection ``moe_state``: it starts at 0, has no
    gradient, and a training step adds ``out.expert_bias_update`` to it. The sum is f32 even if the state was cast to
    bf16, where the update would be lost: do not cast it back.

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
    apply_router_weight_on_input: bool = False
    router_bias: bool = False
    expert_bias: bool | None = None
    expert_bias_update_rate: float = 0.001
    aux_loss_coeff: float = 0.0
    seq_aux: bool = False
    z_loss_coeff: float = 0.0
    num_shared_experts: int = 0
    shared_intermediate_size: int | None = None
    shared_expert_gate: bool = False
    shared_activation_limit: float | None = None
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
    def __call__(
        self, x: jax.Array, token_mask: jax.Array | None = None, expert_ids: jax.Array | None = None
    ) -> MoEOutput:
        """Routes every token to its experts and sums their outputs: :func:`mok_jax.layer.forward`.

        Args:
          x: ``[..., H]``, any number of leading dimensions and any sharding.
          token_mask: bool ``[...]``, ``True`` for real tokens; ``None`` when all are.
          expert_ids: int32 ``[..., K]``, each token's experts, instead of the router's choice.

        Returns:
          A :class:`MoEOutput`.

        Raises:
          ValueError, TypeError: as :func:`mok_jax.layer.forward`.
        """
        settings = self.settings
        splitting.check_has_devices(settings.mesh)
        arrays: dict[str, Any] = {}
        parameters = settings.parameters()
        gate_bias = parameters.pop(GATE_BIAS, None)
        for name, parameter in parameters.items():
            if name == "gate":
                arrays[name], arrays[GATE_BIAS] = Gate(settings, parameter, gate_bias, name=name)()
            elif name in GATES:
                arrays[name], _ = Gate(settings, parameter, name=name)()
            else:
                arrays[name] = _param(self, name, parameter, settings)
        if settings.expert_bias:
            bias = settings.expert_bias_parameter()
            init = _sharded(bias, settings)
            arrays["expert_bias"] = self.variable(STATE, "expert_bias", init, None, bias.shape, jnp.float32).value
        if self.is_initializing():
            settings = dataclasses.replace(settings, implementation="reference")
        out = forward(settings, Weights(**arrays), x, token_mask, expert_ids)
        for name in ("aux_loss", "z_loss", "expert_load", "expert_bias_update"):
            self.sow("intermediates", name, getattr(out, name))
        return out


def _param(module: nn.Module, name: str, parameter: Parameter, settings: Settings):
    """The parameter, sharded where there is a mesh, and boxed with its logical axes alone: it can go to any mesh."""
    init = nn.with_logical_partitioning(_sharded(parameter, settings), parameter.axes)
    # Under a global mesh Flax opens a box along the caller's rules; without one for "exp" that would gather experts.
    with nn.logical_axis_rules(settings.axis_rules() if nn.get_logical_axis_rules() else ()):
        return module.param(name, init, parameter.shape, settings.param_dtype)


def _sharded(parameter: Parameter, settings: Settings):
    """The parameter's ``init``, with a result that lies along the mesh if there is one."""
    if settings.mesh is None:
        return parameter.init
    place = jax.lax.with_sharding_constraint if settings.mesh.are_all_axes_auto else jax.sharding.reshard
    along = NamedSharding(settings.mesh, settings.partition_spec(parameter.axes))
    return lambda *arguments: place(parameter.init(*arguments), along)
