"""The Mixture-of-Experts layer for Flax NNX, on global arrays.

:class:`MoE` takes and returns arrays of the whole batch, as the rest of an NNX model does, under ``jit`` or not. It
holds parameters; what it computes is in :mod:`mok_jax.layer`. For a layer written by hand around per-rank arrays, use
:func:`mok_jax.moe` and :mod:`mok_jax.routing`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike

from mok_jax import sharding
from mok_jax.activation import Activation
from mok_jax.api import Implementation
from mok_jax.config import MoKConfig
from mok_jax.layer import GATES, MoEOutput, Settings, Weights, forward

__all__ = ["ExpertBias", "Gate", "MoE", "MoEOutput"]


class ExpertBias(nnx.Variable):
    """The type of :class:`MoE`'s ``expert_bias``, for filters: state that balancing moves, not the optimizer."""


class Gate(nnx.Module):
    """Holds the matrix of a router, ``kernel [H, E]``, or of the shared experts' gate, ``kernel [H, 1]``."""

    def __init__(self, kernel: nnx.Param):
        self.kernel = kernel


class MoE(nnx.Module):
    """A Mixture-of-Experts feed-forward layer.

    Arguments, parameters and what is refused: :class:`mok_jax.layer.Settings`, which is ``layer.settings``. Parameters
    are ``nnx.Param`` with the logical axes ``exp``, ``embed``, ``mlp``. With a mesh they are created sharded by
    :func:`mok_jax.sharding.logical_axis_rules`, where the caller's rules (``flax.core.spmd.logical_axis_rules``) do not
    say otherwise.

    Eagerly, each weight is made whole on one device before it is split: make large models under ``nnx.jit``. An
    ``nnx.Optimizer`` is made under the same rules as the layer.

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
        expert_bias: bool | None = None,
        expert_bias_update_rate: float = 0.001,
        aux_loss_coeff: float = 0.0,
        seq_aux: bool = False,
        z_loss_coeff: float = 0.0,
        num_shared_experts: int = 0,
        shared_intermediate_size: int | None = None,
        shared_expert_gate: bool = False,
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
            expert_bias=expert_bias,
            expert_bias_update_rate=expert_bias_update_rate,
            aux_loss_coeff=aux_loss_coeff,
            seq_aux=seq_aux,
            z_loss_coeff=z_loss_coeff,
            num_shared_experts=num_shared_experts,
            shared_intermediate_size=shared_intermediate_size,
            shared_expert_gate=shared_expert_gate,
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
        # Without a mesh, axis names stay on the parameter for whoever shards it later.
        metadata: dict[str, Any] = {"eager_sharding": False}
        if mesh is not None:
            metadata = {"mesh": mesh, "sharding_rules": self.settings.axis_rules()}
        for name, (shape, axes, init) in self.settings.parameters().items():
            param = nnx.Param(init(rngs.params(), shape, param_dtype), out_sharding=axes, **metadata)
            setattr(self, name, Gate(param) if name in GATES else param)
        shape, axes, init = self.settings.expert_bias_parameter()
        bias = ExpertBias(init(None, shape, jnp.float32), out_sharding=axes, **metadata) if expert_bias else None
        self.expert_bias = bias

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
        arrays = {name: getattr(self, name) for name in self.settings.parameters()}
        arrays |= {name: arrays[name].kernel for name in GATES if name in arrays}
        if self.expert_bias is not None:
            arrays["expert_bias"] = self.expert_bias
        weights = Weights(**{name: variable[...] for name, variable in arrays.items()})
        return forward(self.settings, weights, x, token_mask)
