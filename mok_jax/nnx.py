"""The Mixture-of-Experts layer for Flax NNX: router, losses, sharding and :func:`mok_jax.moe`, on global arrays.

:class:`MoE` takes and returns arrays of the whole batch, as the rest of an NNX model does, under ``jit`` or not. The
``shard_map`` that the expert step needs is inside. For a layer written by hand around per-rank arrays, use
:func:`mok_jax.moe` and :mod:`mok_jax.routing`.
"""

import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from flax import nnx
from flax.core import spmd
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

import mok_jax
from mok_jax import routing, sharding
from mok_jax.api import Implementation
from mok_jax.config import MoKConfig


@flax.struct.dataclass
class MoEOutput:
    """What :class:`MoE` returns.

    Attributes:
      output: ``[..., H]`` in the layer's ``dtype``, else the input's; masked tokens are 0.
      aux_loss: f32 scalar; load-balancing loss times ``aux_loss_coeff``, to be added to the loss.
      z_loss: f32 scalar; router z-loss times ``z_loss_coeff``, to be added to the loss.
      expert_load: int32 ``[E]``; tokens that went to each expert, over the whole batch.
    """

    output: jax.Array
    aux_loss: jax.Array
    z_loss: jax.Array
    expert_load: jax.Array


class Gate(nnx.Module):
    """Holds the router's matrix, ``kernel [H, E]``."""

    def __init__(self, hidden_size: int, num_experts: int, *, param_dtype: DTypeLike, metadata: dict, rngs: nnx.Rngs):
        value = nnx.initializers.lecun_normal()(rngs.params(), (hidden_size, num_experts), param_dtype)
        # Not "exp" on the second axis: every rank routes its own tokens over all experts.
        self.kernel = nnx.Param(value, out_sharding=("embed", None), **metadata)


class MoE(nnx.Module):
    """A Mixture-of-Experts feed-forward layer.

    Parameters: ``gate/kernel [H, E]``, ``wi_0, wi_1 [E, H, I]``, ``wo [E, I, H]``, with the logical axes ``exp``,
    ``embed``, ``mlp``. With a mesh they are created sharded by :func:`mok_jax.sharding.logical_axis_rules`, where the
    caller's rules (``flax.core.spmd.logical_axis_rules``) do not say otherwise.

    Example:
      >>> layer = MoE(hidden_size=8, intermediate_size=16, num_experts=4, num_experts_per_tok=2, rngs=nnx.Rngs(0))
      >>> out = layer(jnp.ones((2, 3, 8)))
      >>> out.output.shape, int(out.expert_load.sum())
      ((2, 3, 8), 12)
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        num_experts_per_tok: int,
        *,
        score_function: str = "softmax",
        norm_topk_prob: bool = True,
        routed_scaling_factor: float = 1.0,
        aux_loss_coeff: float = 0.0,
        z_loss_coeff: float = 0.0,
        activation: str = "swiglu",
        activation_limit: float | None = None,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        mesh: Mesh | None = None,
        expert_axis: str | tuple[str, ...] = sharding.EXPERT_AXIS,
        config: MoKConfig | None = None,
        implementation: Implementation | None = None,
        rngs: nnx.Rngs,
    ):
        """Makes the layer and initialises its parameters (LeCun normal, each expert by itself).

        Args:
          hidden_size: ``H``.
          intermediate_size: ``I``, of one expert.
          num_experts: ``E``; a multiple of the expert axis' size.
          num_experts_per_tok: ``K``.
          score_function: ``"softmax"`` or ``"sigmoid"``.
          norm_topk_prob: scale a token's ``K`` weights to sum to 1.
          routed_scaling_factor: multiplies the weights after that.
          aux_loss_coeff: factor of the load-balancing loss.
          z_loss_coeff: factor of the router z-loss.
          activation: of the experts, see :func:`mok_jax.moe`.
          activation_limit: of the experts, see :func:`mok_jax.moe`.
          dtype: what the experts compute and return; ``None`` takes the input's.
          param_dtype: of all parameters.
          mesh: the devices to run on, all its axes; ``None`` for one device.
          expert_axis: the mesh axis, or axes, that the experts are split over; tokens are split over all axes.
          config: tuning of the kernels, see :class:`mok_jax.MoKConfig`.
          implementation: see :func:`mok_jax.moe`.
          rngs: the key for the parameters.

        Raises:
          ValueError: a number is below 1, ``E`` is no multiple of the expert axis' size, ``K > E``, ``score_function``
            is unknown, or the mesh has no such axis.
        """
        for name, value in (
            ("hidden_size", hidden_size),
            ("intermediate_size", intermediate_size),
            ("num_experts", num_experts),
        ):
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1; the nearest is 1.")
        routing.check_experts_per_token(num_experts_per_tok, num_experts)
        routing.check_score_function(score_function)
        if mesh is not None:
            _check_divisible(num_experts, sharding.axis_size(mesh, expert_axis))

        self.hidden_size = hidden_size
        self.num_experts = num_experts
        self.num_experts_per_tok = num_experts_per_tok
        self.score_function = score_function
        self.norm_topk_prob = norm_topk_prob
        self.routed_scaling_factor = routed_scaling_factor
        self.aux_loss_coeff = aux_loss_coeff
        self.z_loss_coeff = z_loss_coeff
        self.dtype = dtype
        self.mesh = mesh
        self.expert_axis = expert_axis
        self.activation = activation
        self.activation_limit = activation_limit
        self.config = MoKConfig() if config is None else config
        self.implementation = implementation

        metadata = _param_metadata(mesh, expert_axis)
        self.gate = Gate(hidden_size, num_experts, param_dtype=param_dtype, metadata=metadata, rngs=rngs)
        init = nnx.initializers.lecun_normal(in_axis=-2, out_axis=-1, batch_axis=(0,))
        up, down = (num_experts, hidden_size, intermediate_size), (num_experts, intermediate_size, hidden_size)
        up_axes, down_axes = ("exp", "embed", "mlp"), ("exp", "mlp", "embed")
        self.wi_0 = nnx.Param(init(rngs.params(), up, param_dtype), out_sharding=up_axes, **metadata)
        self.wi_1 = nnx.Param(init(rngs.params(), up, param_dtype), out_sharding=up_axes, **metadata)
        self.wo = nnx.Param(init(rngs.params(), down, param_dtype), out_sharding=down_axes, **metadata)

    def __call__(self, x: jax.Array, token_mask: jax.Array | None = None) -> MoEOutput:
        """Routes every token to its experts and sums their outputs.

        Args:
          x: ``[..., H]``, any number of leading dimensions and any sharding.
          token_mask: bool ``[...]``, ``True`` for real tokens. Padding is excluded from routing, losses and load,
            whatever is in its rows of ``x``; its output and its gradient are 0.

        Returns:
          A :class:`MoEOutput`.

        Raises:
          ValueError: ``x`` has another ``H`` than the layer, or ``token_mask`` another shape than the tokens, or the
            layer's mesh has explicit axes (those of a plain ``jax.make_mesh``) outside ``jax.set_mesh``.
        """
        if x.ndim < 1 or x.shape[-1] != self.hidden_size:
            raise ValueError(f"x has shape {x.shape}; expected [..., hidden_size={self.hidden_size}].")
        if token_mask is not None and token_mask.shape != x.shape[:-1]:
            raise ValueError(f"token_mask has shape {token_mask.shape}; expected {x.shape[:-1]}, one per token.")
        forward = self._forward
        if self.mesh is not None and _has_explicit_axes(self.mesh):
            # Flattened tokens have no sharding that an explicit mesh can write down; inside, XLA keeps track of it.
            like_x: Any = jax.typeof(x).sharding.spec
            whole: Any = P()
            specs = MoEOutput(output=like_x, aux_loss=whole, z_loss=whole, expert_load=whole)
            forward = jax.sharding.auto_axes(forward, axes=self.mesh.axis_names, out_sharding=specs)
        return forward(x, token_mask, self.gate.kernel[...], self.wi_0[...], self.wi_1[...], self.wo[...])

    def _forward(self, x, token_mask, gate, wi_0, wi_1, wo) -> MoEOutput:
        """The layer as a function of arrays."""
        mask = None if token_mask is None else token_mask.reshape(-1)
        # Zeroed before the router: NaN in padding would reach the gradient of its kernel as NaN * 0.
        tokens = routing.mask_rows(x.reshape(-1, self.hidden_size), mask)
        logits = _router_logits(tokens, gate)
        routed = routing.top_k_routing(
            logits,
            self.num_experts_per_tok,
            self.score_function,
            self.norm_topk_prob,
            self.routed_scaling_factor,
            mask,
        )
        tokens = tokens.astype(self.dtype or x.dtype)
        output = self._experts(tokens, routed.expert_ids, routed.expert_weights, wi_0, wi_1, wo)
        return MoEOutput(
            output=output.reshape(x.shape),
            aux_loss=self.aux_loss_coeff * routing.load_balance_loss(routed.probs, routed.expert_ids, mask),
            z_loss=self.z_loss_coeff * routing.z_loss(logits, mask),
            expert_load=routing.expert_load(routed.expert_ids, self.num_experts),
        )

    def _experts(self, tokens, expert_ids, expert_weights, wi_0, wi_1, wo) -> jax.Array:
        """The expert step: ``[N, H], [N, K], [N, K] -> [N, H]``, over the mesh if there is one."""
        moe = functools.partial(
            mok_jax.moe,
            activation=self.activation,
            activation_limit=self.activation_limit,
            config=self.config,
            implementation=self.implementation,
        )
        if self.mesh is None or self.mesh.size == 1:
            return moe(tokens, expert_ids, expert_weights, wi_0, wi_1, wo)
        by_token, by_expert = P(self.mesh.axis_names), P(self.expert_axis)
        step = jax.shard_map(
            functools.partial(moe, axis_name=self.expert_axis),
            mesh=_with_auto_axes(self.mesh),
            in_specs=(by_token,) * 3 + (by_expert,) * 3,
            out_specs=by_token,
        )
        padding = ((0, -tokens.shape[0] % self.mesh.size), (0, 0))
        output = step(
            jnp.pad(tokens, padding),
            jnp.pad(expert_ids, padding, constant_values=-1),
            jnp.pad(expert_weights, padding),
            wi_0,
            wi_1,
            wo,
        )
        return output[: tokens.shape[0]]


def _router_logits(tokens: jax.Array, gate: jax.Array) -> jax.Array:
    """``[N, H], [H, E] -> f32 [N, E]``, in f32 whatever the layer's dtype."""
    # HIGHEST: a GPU's default for f32 is TF32, whose error is enough to choose other experts.
    return jnp.dot(tokens.astype(jnp.float32), gate.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)


def _has_explicit_axes(mesh: Mesh) -> bool:
    """Whether shardings are part of the types where the caller is; raises ValueError where they would have to be."""
    if AxisType.Explicit not in mesh.axis_types:
        return False
    here = jax.sharding.get_abstract_mesh()
    if here.empty:
        raise ValueError(
            f"mesh has explicit axes {mesh.axis_names}: call the layer inside `with jax.set_mesh(mesh)`, "
            "or use a mesh with automatic axes, such as mok_jax.sharding.make_mesh makes."
        )
    return AxisType.Explicit in here.axis_types


def _with_auto_axes(mesh: Mesh) -> Mesh:
    if mesh.are_all_axes_auto:
        return mesh
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))


def _param_metadata(mesh: Mesh | None, expert_axis: str | tuple[str, ...]) -> dict:
    if mesh is None:
        # Axis names stay on the parameter for whoever shards it later; now there is nothing to shard it over.
        return {"eager_sharding": False}
    rules = dict(sharding.logical_axis_rules(mesh, expert_axis)) | dict(spmd.get_logical_axis_rules())
    return {"mesh": mesh, "sharding_rules": tuple(rules.items())}


def _check_divisible(num_experts: int, expert_parallelism: int) -> None:
    if num_experts % expert_parallelism:
        nearest = max(1, round(num_experts / expert_parallelism)) * expert_parallelism
        raise ValueError(
            f"num_experts={num_experts} must be a multiple of the expert axis' size ({expert_parallelism}); "
            f"the nearest is {nearest}."
        )
