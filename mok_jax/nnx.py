"""The Mixture-of-Experts layer for Flax NNX: router, losses, sharding and :func:`mok_jax.moe`, on global arrays.

:class:`MoE` takes and returns arrays of the whole batch, as the rest of an NNX model does, under ``jit`` or not. The
``shard_map`` that the expert step needs is inside. For a layer written by hand around per-rank arrays, use
:func:`mok_jax.moe` and :mod:`mok_jax.routing`.
"""

import functools
import math
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from flax import nnx
from flax.core import spmd
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

import mok_jax
from mok_jax import routing, sharding
from mok_jax.activation import Activation, swiglu
from mok_jax.api import Implementation
from mok_jax.config import MoKConfig
from mok_jax.reference import accumulator_dtype


@flax.struct.dataclass
class MoEOutput:
    """What :class:`MoE` returns.

    Attributes:
      output: ``[..., H]`` in the layer's ``dtype``, else the input's; masked tokens are 0.
      aux_loss: f32 scalar; load-balancing loss times ``aux_loss_coeff``, to be added to the loss.
      z_loss: f32 scalar; router z-loss times ``z_loss_coeff``, to be added to the loss.
      expert_load: int32 ``[E]``; tokens that went to each expert, over the whole batch.
      expert_bias_update: f32 ``[E]``; what to add to the layer's ``expert_bias`` after the step, see
        :func:`mok_jax.routing.expert_bias_update`. ``None`` where the layer has no bias.
    """

    output: jax.Array
    aux_loss: jax.Array
    z_loss: jax.Array
    expert_load: jax.Array
    expert_bias_update: jax.Array | None = None


class ExpertBias(nnx.Variable):
    """The type of :class:`MoE`'s ``expert_bias``, for filters: state that balancing moves, not the optimizer."""


class Gate(nnx.Module):
    """Holds the matrix of a router, ``kernel [H, E]``, or of the shared experts' gate, ``kernel [H, 1]``."""

    def __init__(self, hidden_size: int, num_outputs: int, *, param_dtype: DTypeLike, metadata: dict, rngs: nnx.Rngs):
        value = nnx.initializers.lecun_normal()(rngs.params(), (hidden_size, num_outputs), param_dtype)
        # Not "exp" on the second axis: every rank routes its own tokens over all experts.
        self.kernel = nnx.Param(value, out_sharding=("embed", None), **metadata)


class _SharedWeights(NamedTuple):
    """Arrays of the shared experts, side by side in one matrix of width ``S = num_shared_experts * their width``."""

    wi_0: jax.Array
    wi_1: jax.Array
    wo: jax.Array
    gate: jax.Array | None


class _Weights(NamedTuple):
    """All arrays of a layer."""

    gate: jax.Array
    wi_0: jax.Array
    wi_1: jax.Array
    wo: jax.Array
    expert_bias: jax.Array | None
    shared: _SharedWeights | None


class MoE(nnx.Module):
    """A Mixture-of-Experts feed-forward layer.

    Parameters: ``gate/kernel [H, E]``, ``wi_0, wi_1 [E, H, I]``, ``wo [E, I, H]``, with the logical axes ``exp``,
    ``embed``, ``mlp``; with shared experts also ``shared_wi_0, shared_wi_1 [H, S]``, ``shared_wo [S, H]`` and perhaps
    ``shared_gate/kernel [H, 1]``. With a mesh they are created sharded by
    :func:`mok_jax.sharding.logical_axis_rules`, where the caller's rules (``flax.core.spmd.logical_axis_rules``) do not
    say otherwise.

    ``expert_bias [E]``, if asked for, is an :class:`ExpertBias` and no ``nnx.Param``: it starts at 0, has no gradient,
    and a training step ends with ``layer.expert_bias[...] += out.expert_bias_update``.

    Shared experts are a SwiGLU on every token, added to what its experts give, with a gate times
    ``sigmoid(x @ shared_gate)``. They are computed outside the ``shard_map``; ``activation`` and ``activation_limit``
    are not for them.

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
        activation: Activation = "swiglu",
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
          score_function: ``"softmax"``, ``"sigmoid"`` or ``"sqrtsoftplus"``, see
            :func:`mok_jax.routing.expert_scores`.
          softmax_after_topk: take the softmax over a token's chosen logits only (gpt-oss).
          num_groups: groups of experts, a divisor of ``E``, see :func:`mok_jax.routing.top_k_routing`.
          group_topk: groups that a token may choose from.
          norm_topk_prob: scale a token's ``K`` weights to sum to 1.
          routed_scaling_factor: multiplies the weights after that.
          expert_bias: whether to have a bias that steers the choice of experts but not their weights; ``None`` is no.
          expert_bias_update_rate: step of ``MoEOutput.expert_bias_update``.
          aux_loss_coeff: factor of the load-balancing loss.
          seq_aux: take that loss of each sequence, the last of the leading dimensions of ``x``, instead of the batch.
          z_loss_coeff: factor of the router z-loss.
          num_shared_experts: experts that every token goes to.
          shared_intermediate_size: width of one shared expert; ``None`` takes ``intermediate_size``.
          shared_expert_gate: multiply what shared experts give by a sigmoid gate (Qwen3.5).
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
          ValueError: a number is too small, ``E`` is no multiple of the expert axis' size, ``K > E``, groups do not
            divide ``E`` or hold too few experts, ``score_function`` is unknown, something is said of shared experts
            where there are none, or the mesh has no such axis.
          TypeError: ``expert_bias`` is no bool.
        """
        if shared_intermediate_size is None:
            shared_intermediate_size = intermediate_size
        elif num_shared_experts < 1:
            _refuse_without_shared_experts(f"shared_intermediate_size={shared_intermediate_size}", num_shared_experts)
        if shared_expert_gate and num_shared_experts < 1:
            _refuse_without_shared_experts("shared_expert_gate=True", num_shared_experts)
        for name, value, least in (
            ("hidden_size", hidden_size, 1),
            ("intermediate_size", intermediate_size, 1),
            ("num_experts", num_experts, 1),
            ("num_shared_experts", num_shared_experts, 0),
            ("shared_intermediate_size", shared_intermediate_size, 1),
        ):
            if value < least:
                raise ValueError(f"{name}={value} must be at least {least}; the nearest is {least}.")
        if expert_bias is not None and not isinstance(expert_bias, bool):
            raise TypeError(
                f"expert_bias is {expert_bias!r}; it must be True, False or None. "
                "For a value of your own, set layer.expert_bias[...] after expert_bias=True."
            )
        routing.check_experts_per_token(num_experts_per_tok, num_experts)
        routing.check_groups(num_groups, group_topk, num_experts, num_experts_per_tok)
        routing.check_score_function(score_function, softmax_after_topk)
        if mesh is not None:
            _check_divisible(num_experts, sharding.axis_size(mesh, expert_axis))

        self.hidden_size = hidden_size
        self.num_experts = num_experts
        self.num_experts_per_tok = num_experts_per_tok
        self.score_function = score_function
        self.softmax_after_topk = softmax_after_topk
        self.num_groups = num_groups
        self.group_topk = group_topk
        self.norm_topk_prob = norm_topk_prob
        self.routed_scaling_factor = routed_scaling_factor
        self.expert_bias_update_rate = expert_bias_update_rate
        self.aux_loss_coeff = aux_loss_coeff
        self.seq_aux = seq_aux
        self.z_loss_coeff = z_loss_coeff
        self.dtype = dtype
        self.mesh = mesh
        self.expert_axis = expert_axis
        self.activation = activation
        self.activation_limit = activation_limit
        self.config = MoKConfig() if config is None else config
        self.implementation = implementation

        metadata = _param_metadata(mesh, expert_axis)
        make_gate = functools.partial(Gate, param_dtype=param_dtype, metadata=metadata, rngs=rngs)
        self.gate = make_gate(hidden_size, num_experts)
        init = nnx.initializers.lecun_normal(in_axis=-2, out_axis=-1, batch_axis=(0,))
        up, down = (num_experts, hidden_size, intermediate_size), (num_experts, intermediate_size, hidden_size)
        up_axes, down_axes = ("exp", "embed", "mlp"), ("exp", "mlp", "embed")
        self.wi_0 = nnx.Param(init(rngs.params(), up, param_dtype), out_sharding=up_axes, **metadata)
        self.wi_1 = nnx.Param(init(rngs.params(), up, param_dtype), out_sharding=up_axes, **metadata)
        self.wo = nnx.Param(init(rngs.params(), down, param_dtype), out_sharding=down_axes, **metadata)

        # f32 whatever param_dtype: an update is far below the spacing of bf16 around 1. Whole on every rank.
        bias = jnp.zeros(num_experts, jnp.float32)
        self.expert_bias = ExpertBias(bias, out_sharding=(None,), **metadata) if expert_bias else None
        self.num_shared_experts = num_shared_experts
        if num_shared_experts:
            width = num_shared_experts * shared_intermediate_size
            self._make_shared_experts(width, param_dtype=param_dtype, metadata=metadata, rngs=rngs)
        self.shared_gate = make_gate(hidden_size, 1) if shared_expert_gate else None

    def _make_shared_experts(self, width: int, *, param_dtype: DTypeLike, metadata: dict, rngs: nnx.Rngs) -> None:
        init = nnx.initializers.lecun_normal()
        up, down = (self.hidden_size, width), (width, self.hidden_size)
        up_axes, down_axes = ("embed", "mlp"), ("mlp", "embed")
        self.shared_wi_0 = nnx.Param(init(rngs.params(), up, param_dtype), out_sharding=up_axes, **metadata)
        self.shared_wi_1 = nnx.Param(init(rngs.params(), up, param_dtype), out_sharding=up_axes, **metadata)
        self.shared_wo = nnx.Param(init(rngs.params(), down, param_dtype), out_sharding=down_axes, **metadata)

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
            specs = MoEOutput(
                output=like_x,
                aux_loss=whole,
                z_loss=whole,
                expert_load=whole,
                expert_bias_update=None if self.expert_bias is None else whole,
            )
            forward = jax.sharding.auto_axes(forward, axes=self.mesh.axis_names, out_sharding=specs)
        return forward(x, token_mask, self._weights())

    def _weights(self) -> _Weights:
        shared = None
        if self.num_shared_experts:
            gate = None if self.shared_gate is None else self.shared_gate.kernel[...]
            shared = _SharedWeights(self.shared_wi_0[...], self.shared_wi_1[...], self.shared_wo[...], gate)
        return _Weights(
            gate=self.gate.kernel[...],
            wi_0=self.wi_0[...],
            wi_1=self.wi_1[...],
            wo=self.wo[...],
            expert_bias=None if self.expert_bias is None else self.expert_bias[...],
            shared=shared,
        )

    def _forward(self, x, token_mask, weights: _Weights) -> MoEOutput:
        """The layer as a function of arrays."""
        mask = None if token_mask is None else token_mask.reshape(-1)
        # Zeroed before the router: NaN in padding would reach the gradient of its kernel as NaN * 0.
        tokens = routing.mask_rows(x.reshape(-1, self.hidden_size), mask)
        logits = _router_logits(tokens, weights.gate)
        routed = routing.top_k_routing(
            logits,
            self.num_experts_per_tok,
            self.score_function,
            self.norm_topk_prob,
            self.routed_scaling_factor,
            mask,
            softmax_after_topk=self.softmax_after_topk,
            expert_bias=weights.expert_bias,
            num_groups=self.num_groups,
            group_topk=self.group_topk,
        )
        tokens = tokens.astype(self.dtype or x.dtype)
        output = self._experts(tokens, routed.expert_ids, routed.expert_weights, weights.wi_0, weights.wi_1, weights.wo)
        if weights.shared is not None:
            output = (output + self._shared_experts(tokens, weights.shared)).astype(output.dtype)
        load = routing.expert_load(routed.expert_ids, self.num_experts)
        update = None
        if weights.expert_bias is not None:
            update = routing.expert_bias_update(load, self.expert_bias_update_rate)
        return MoEOutput(
            output=output.reshape(x.shape),
            aux_loss=self.aux_loss_coeff * self._load_balance_loss(routed, mask, x.shape[:-1]),
            z_loss=self.z_loss_coeff * routing.z_loss(logits, mask),
            expert_load=load,
            expert_bias_update=update,
        )

    def _load_balance_loss(self, routed: routing.Routing, mask, leading: tuple[int, ...]) -> jax.Array:
        """Of the batch, or by sequence: the last of the ``leading`` dimensions that the tokens had."""
        if not self.seq_aux:
            return routing.load_balance_loss(routed.probs, routed.expert_ids, mask)
        by_sequence = (math.prod(leading[:-1]), leading[-1] if leading else 1)
        return routing.sequence_load_balance_loss(
            routed.probs.reshape(*by_sequence, self.num_experts),
            routed.expert_ids.reshape(*by_sequence, self.num_experts_per_tok),
            None if mask is None else mask.reshape(by_sequence),
        )

    def _shared_experts(self, tokens, shared: _SharedWeights) -> jax.Array:
        """``(silu(x @ wi_0) * (x @ wi_1)) @ wo``, gated, over all axes of the mesh: ``[N, H]``, not yet rounded."""
        rows = tokens
        if self.mesh is not None and self.mesh.size > 1:
            # Said here: tokens that are replicated over an axis would be computed once for each rank of it.
            rows = jnp.pad(tokens, ((0, -tokens.shape[0] % self.mesh.size), (0, 0)))
            by_token = NamedSharding(_with_auto_axes(self.mesh), P(self.mesh.axis_names))
            rows = jax.lax.with_sharding_constraint(rows, by_token)
        wide = functools.partial(jnp.dot, preferred_element_type=accumulator_dtype(tokens.dtype))
        wi_0, wi_1, wo = (weight.astype(tokens.dtype) for weight in shared[:3])
        hidden = swiglu(wide(rows, wi_0), wide(rows, wi_1)).astype(tokens.dtype)
        output = wide(hidden, wo)
        if shared.gate is not None:
            output *= jax.nn.sigmoid(_router_logits(rows, shared.gate))
        return output[: tokens.shape[0]]

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


def _refuse_without_shared_experts(argument: str, num_shared_experts: int) -> None:
    raise ValueError(
        f"{argument} has no meaning with num_shared_experts={num_shared_experts}; "
        "the nearest with shared experts is num_shared_experts=1."
    )


def _check_divisible(num_experts: int, expert_parallelism: int) -> None:
    if num_experts % expert_parallelism:
        nearest = max(1, round(num_experts / expert_parallelism)) * expert_parallelism
        raise ValueError(
            f"num_experts={num_experts} must be a multiple of the expert axis' size ({expert_parallelism}); "
            f"the nearest is {nearest}."
        )
