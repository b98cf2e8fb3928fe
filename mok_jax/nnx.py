"""The Mixture-of-Experts layer for Flax NNX, on global arrays.

:class:`MoE` takes and returns arrays of the whole batch, as the rest of an NNX model does, under ``jit`` or not. It
holds parameters; what it computes is in :mod:`mok_jax.layer`. For a layer written by hand around per-rank arrays, use
:func:`mok_jax.moe` and :mod:`mok_jax.routing`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.core import spmd
from jax.sharding import Mesh
from jax.typing import DTypeLike

from mok_jax import sharding
from mok_jax.activation import Activation
from mok_jax.api import Implementation
from mok_jax.config import MoKConfig
from mok_jax.layer import GATE_BIAS, GATES, MoEOutput, Settings, Weights, forward, splitting

__all__ = ["ExpertBias", "Gate", "MoE", "MoEOutput"]


class ExpertBias(nnx.Variable):
    """The type of :class:`MoE`'s ``expert_bias``, for filters: state that balancing moves, not the optimizer.

    Casting a layer's whole state to bf16 casts the bias, too, which is good enough to infer with. The next update makes
    it f32 again: 0.001 is less than the spacing of bf16 from 0.25 up, and would be lost there.
    """

    def set_value(self, value, **index) -> None:
        """As ``nnx.Variable``, in f32 whatever the bias was cast to."""
        bias = self.get_raw_value()
        if isinstance(bias, jax.Array | np.ndarray):
            self.set_raw_value(jnp.asarray(bias, jnp.float32))
        super().set_value(value, **index)


class Gate(nnx.Module):
    """Holds a router's ``kernel [H, E]`` and perhaps ``bias [E]``, or the shared experts' gate, ``kernel [H, 1]``."""

    bias: nnx.Param

    def __init__(self, kernel: nnx.Param):
        self.kernel = kernel


class MoE(nnx.Module):
    """A Mixture-of-Experts feed-forward layer.

    Arguments, parameters and what is refused: :class:`mok_jax.layer.Settings`, which is ``layer.settings``.

    Parameters are ``nnx.Param`` with the logical axes ``exp``, ``embed``, ``mlp``. With a mesh they, and the state of
    an ``nnx.Optimizer`` made under the same rules, are created along it as those of :class:`mok_jax.linen.MoE` are. The
    caller's rules (``flax.core.spmd.logical_axis_rules``) are read as Linen reads them: of several for an axis, NNX by
    itself takes the last, free or not. Eagerly, each weight is made whole on one device before it is split: make large
    models under ``nnx.jit``.

    Parameters hold the layer's mesh. Load those of a layer on another mesh by value,
    ``nnx.update(layer, nnx.to_pure_dict(state))``: with variables, Flax would take their mesh, too.

    ``expert_bias [E]``, if asked for, is an :class:`ExpertBias` and no ``nnx.Param``: it starts at 0, has no gradient,
    and a training step ends with ``layer.expert_bias[...] += out.expert_bias_update``.

    Example:
      >>> layer = MoE(hidden_size=8, intermediate_size=16, num_experts=4, num_experts_per_tok=2, rngs=nnx.Rngs(0))
      >>> out = layer(jnp.ones((2, 3, 8)))
      >>> out.output.shape, int(out.expert_load.sum())
      ((2, 3, 8), 12)
    """

    gate: Gate
    wi_0: nnx.Param
    wi_1: nnx.Param
    wo: nnx.Param
    shared_wi_0: nnx.Param
    shared_wi_1: nnx.Param
    shared_wo: nnx.Param
    shared_gate: Gate
    wi_0_bias: nnx.Param
    wi_1_bias: nnx.Param
    wo_bias: nnx.Param

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        num_experts_per_tok: int,
        *,
        score_function: str = "softmax",
        softmax_after_topk: bool = False,
        num_groups: int = 1,
        group_topk: int = 1,
        norm_topk_prob: bool = True,
        routed_scaling_factor: float = 1.0,
        apply_router_weight_on_input: bool = False,
        router_bias: bool = False,
        expert_bias: bool | None = None,
        expert_bias_update_rate: float = 0.001,
        aux_loss_coeff: float = 0.0,
        seq_aux: bool = False,
        z_loss_coeff: float = 0.0,
        num_shared_experts: int = 0,
        shared_intermediate_size: int | None = None,
        shared_expert_gate: bool = False,
        shared_activation_limit: float | None = None,
        use_bias: bool = False,
        activation: Activation = "swiglu",
        activation_limit: float | None = None,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        kernel_init: Callable[..., jax.Array] | None = None,
        mesh: Mesh | None = None,
        expert_axis: str | tuple[str, ...] = sharding.EXPERT_AXIS,
        config: MoKConfig | None = None,
        implementation: Implementation | None = None,
        rngs: nnx.Rngs,
    ):
        """Makes the layer and initialises its parameters (``kernel_init``, each expert by itself; biases zero).

        Args:
          rngs: the key for the parameters; all other arguments are those of :class:`mok_jax.layer.Settings`.

        Raises:
          ValueError, TypeError: as :class:`mok_jax.layer.Settings`.
        """
        self.settings = Settings(
            hidden_size,
            intermediate_size,
            num_experts,
            num_experts_per_tok,
            score_function=score_function,
            softmax_after_topk=softmax_after_topk,
            num_groups=num_groups,
            group_topk=group_topk,
            norm_topk_prob=norm_topk_prob,
            routed_scaling_factor=routed_scaling_factor,
            apply_router_weight_on_input=apply_router_weight_on_input,
            router_bias=router_bias,
            expert_bias=expert_bias,
            expert_bias_update_rate=expert_bias_update_rate,
            aux_loss_coeff=aux_loss_coeff,
            seq_aux=seq_aux,
            z_loss_coeff=z_loss_coeff,
            num_shared_experts=num_shared_experts,
            shared_intermediate_size=shared_intermediate_size,
            shared_expert_gate=shared_expert_gate,
            shared_activation_limit=shared_activation_limit,
            use_bias=use_bias,
            activation=activation,
            activation_limit=activation_limit,
            dtype=dtype,
            param_dtype=param_dtype,
            kernel_init=kernel_init,
            mesh=mesh,
            expert_axis=expert_axis,
            config=config,
            implementation=implementation,
        )
        splitting.check_has_devices(mesh)
        for name, (shape, axes, init) in self.settings.parameters().items():
            param = nnx.Param(init(rngs.params(), shape, param_dtype), **_metadata(self.settings, axes))
            if name == GATE_BIAS:
                self.gate.bias = param
            else:
                setattr(self, name, Gate(param) if name in GATES else param)
        shape, axes, init = self.settings.expert_bias_parameter()
        bias = ExpertBias(init(None, shape, jnp.float32), **_metadata(self.settings, axes)) if expert_bias else None
        self.expert_bias = bias

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
        arrays = {name: getattr(self, name) for name in self.settings.parameters() if name != GATE_BIAS}
        arrays |= {name: arrays[name].kernel for name in GATES if name in arrays}
        if self.settings.router_bias:
            arrays[GATE_BIAS] = self.gate.bias
        if self.expert_bias is not None:
            arrays["expert_bias"] = self.expert_bias
        weights = Weights(**{name: variable[...] for name, variable in arrays.items()})
        return forward(self.settings, weights, x, token_mask, expert_ids)


def _metadata(settings: Settings, axes: tuple[str | None, ...]) -> dict[str, Any]:
    """What shards a parameter, and an optimizer's state of it, along ``settings.partition_spec(axes)``."""
    if settings.mesh is None:
        # Axis names stay on the parameter for whoever shards it later.
        return {"out_sharding": axes, "eager_sharding": False}
    spec = settings.partition_spec(axes)
    # NNX takes the last of the caller's rules for a name, and refuses another of ours. Where that is not what the name
    # stands for here, the mesh axis is in its place: as a tuple, which no rule is for.
    last = dict(spmd.get_logical_axis_rules() or ())
    rules = {name: axis for name, axis in zip(axes, spec, strict=True) if name and last.get(name, axis) == axis}
    mesh_axes = ((axis,) if isinstance(axis, str) else axis for axis in spec)
    names = tuple(name if name in rules else axis for name, axis in zip(axes, mesh_axes, strict=True))
    return {"out_sharding": names, "mesh": settings.mesh, "sharding_rules": tuple(rules.items())}
