"""What a layer computes: :func:`forward`, from router to output, losses and load, on global arrays."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import mok_jax
from mok_jax import routing
from mok_jax.activation import activate
from mok_jax.config import MoKConfig
from mok_jax.layer import splitting
from mok_jax.layer.settings import Settings
from mok_jax.semantics import accumulator_dtype


@flax.struct.dataclass
class MoEOutput:
    """What a layer returns.

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


class Weights(NamedTuple):
    """All arrays of a layer, under the names of its parameters; ``None`` is what a layer does not have."""

    gate: jax.Array
    wi_0: jax.Array
    wi_1: jax.Array
    wo: jax.Array
    wi_0_bias: jax.Array | None = None
    wi_1_bias: jax.Array | None = None
    wo_bias: jax.Array | None = None
    shared_wi_0: jax.Array | None = None
    shared_wi_1: jax.Array | None = None
    shared_wo: jax.Array | None = None
    shared_gate: jax.Array | None = None
    gate_bias: jax.Array | None = None
    expert_bias: jax.Array | None = None


def forward(
    settings: Settings,
    weights: Weights,
    x: jax.Array,
    token_mask: jax.Array | None = None,
    expert_ids: jax.Array | None = None,
) -> MoEOutput:
    """Routes every token to its experts and sums their outputs.

    Operations carry the names ``router``, ``experts`` and ``shared_experts``, which profiles show.

    Tokens are split over all axes of the mesh, whatever axes they come replicated over. The output lies along the mesh
    as ``x`` does, where that is known: with explicit axes, and outside ``jit``. Under ``jit`` with automatic axes it
    stays split over all of them until XLA, or a ``with_sharding_constraint`` of the caller, says otherwise.

    Args:
      settings: of the layer.
      weights: its arrays, of the shapes of ``settings.parameters()``.
      x: ``[..., H]``, any number of leading dimensions and any sharding over the layer's mesh, or not yet on a device.
      token_mask: bool ``[...]``, ``True`` for real tokens. Padding is excluded from routing, losses and load,
        whatever is in its rows of ``x``; its output and its gradient are 0.
      expert_ids: int32 ``[..., K]``, each token's experts, where the router is not to choose them: hash routing is
        ``table[token]``. Their weights stay the router's; weights, losses and load are as if it had chosen so. An id of
        -1 is no expert and counts in nothing; any other outside ``[0, E)`` makes its token's output NaN.

    Returns:
      A :class:`MoEOutput`.

    Raises:
      ValueError: ``x`` has another ``H`` than the layer, a weight another shape, ``token_mask`` or ``expert_ids``
        another than the tokens, or the layer's mesh has explicit axes (those of a plain ``jax.make_mesh``) outside
        ``jax.set_mesh``.
      TypeError: ``expert_ids`` is not int32.

    Example:
      >>> settings = Settings(8, 16, num_experts=4, num_experts_per_tok=2)
      >>> weights = {name: jnp.ones(p.shape) for name, p in settings.parameters().items()}
      >>> forward(settings, Weights(**weights), jnp.ones((2, 3, 8))).output.shape
      (2, 3, 8)
    """
    if x.ndim < 1 or x.shape[-1] != settings.hidden_size:
        raise ValueError(f"x has shape {x.shape}; expected [..., hidden_size={settings.hidden_size}].")
    if token_mask is not None and token_mask.shape != x.shape[:-1]:
        raise ValueError(f"token_mask has shape {token_mask.shape}; expected {x.shape[:-1]}, one per token.")
    routing.check_expert_ids(expert_ids, x.shape[:-1], settings.num_experts_per_tok)
    _check_weights(settings, weights)
    splitting.check_types(array for array in (x, *weights) if isinstance(array, jax.Array))
    out = moe_layer(settings, weights, x, token_mask, expert_ids)
    if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) and isinstance(x.sharding, NamedSharding):
        out = dataclasses.replace(out, output=jax.device_put(out.output, x.sharding))
    return out


def _check_weights(settings: Settings, weights: Weights) -> None:
    """Here, while shapes are those of whole arrays, and not of a device's share."""
    for name, (shape, _, _) in settings.parameters().items():
        there = getattr(weights, name).shape
        if there != shape:
            padding = settings.padded_experts - settings.num_experts
            hint = (
                f" of {settings.num_experts} experts and {padding} of zeros"
                if padding and shape[1:] == there[1:]
                else ""
            )
            raise ValueError(f"{name} has shape {there}; expected {shape}{hint}.")


@functools.partial(jax.jit, static_argnums=0, inline=True)
def moe_layer(settings: Settings, weights: Weights, x: jax.Array, token_mask, expert_ids) -> MoEOutput:
    """One program where the layer is called eagerly, compiled once; part of the caller's where it is traced."""
    compute = functools.partial(_forward, settings)
    explicit = splitting.explicit_axes(settings.mesh)
    if explicit:
        # Flattened tokens have no sharding that an explicit mesh can write down; inside, XLA keeps track of it.
        like_x: Any = jax.typeof(x).sharding.spec
        whole: Any = P()
        specs = MoEOutput(
            output=like_x,
            aux_loss=whole,
            z_loss=whole,
            expert_load=whole,
            expert_bias_update=None if weights.expert_bias is None else whole,
        )
        compute = jax.sharding.auto_axes(compute, axes=explicit, out_sharding=specs)
    return compute(weights, x, token_mask, expert_ids)


def _forward(
    settings: Settings, weights: Weights, x: jax.Array, token_mask: jax.Array | None, expert_ids: jax.Array | None
) -> MoEOutput:
    mask = None if token_mask is None else token_mask.reshape(-1)
    # Zeroed before the router: NaN in padding would reach the gradient of its kernel as NaN * 0.
    tokens = routing.mask_rows(x.reshape(-1, settings.hidden_size), mask)
    with jax.named_scope("router"):
        logits = _router_logits(tokens, weights.gate, weights.gate_bias)
        given_ids = None if expert_ids is None else expert_ids.reshape(-1, settings.num_experts_per_tok)
        routed = _route(settings, logits, mask, given_ids, weights.expert_bias)
    tokens = tokens.astype(settings.dtype or x.dtype)
    wide = accumulator_dtype(tokens.dtype)
    with jax.named_scope("experts"):
        output = _experts(settings, weights, tokens, routed)
        if weights.wo_bias is not None:
            output = output.astype(wide) + _last_bias(settings, weights.wo_bias, routed).astype(wide)
    if weights.shared_wo is not None:
        with jax.named_scope("shared_experts"):
            output = output.astype(wide) + _shared_experts(settings, weights, tokens).astype(wide)
    load = routing.expert_load(routed.expert_ids, settings.num_experts)
    update = None
    if weights.expert_bias is not None:
        update = routing.expert_bias_update(load, settings.expert_bias_update_rate)
    return MoEOutput(
        output=routing.mask_rows(output, mask).astype(tokens.dtype).reshape(x.shape),
        aux_loss=_scaled(settings.aux_loss_coeff, lambda: _load_balance_loss(settings, routed, mask, x.shape[:-1])),
        z_loss=_scaled(settings.z_loss_coeff, lambda: routing.z_loss(logits, mask)),
        expert_load=load,
        expert_bias_update=update,
    )


def _route(settings: Settings, logits: jax.Array, mask, expert_ids, expert_bias) -> routing.Routing:
    """Each token's experts, chosen by the device that has the token."""

    def choose(logits, mask, expert_ids, expert_bias):
        return routing.top_k_routing(
            logits,
            settings.num_experts_per_tok,
            settings.score_function,
            settings.norm_topk_prob,
            settings.routed_scaling_factor,
            mask,
            softmax_after_topk=settings.softmax_after_topk,
            expert_bias=expert_bias,
            num_groups=settings.num_groups,
            group_topk=settings.group_topk,
            expert_ids=expert_ids,
        )

    # Said here: of a top_k over the batch, XLA's partitioner gathers everybody's scores on every device.
    return splitting.map_shares(settings.split(), choose, (logits, mask, expert_ids), (expert_bias,), P())


def _scaled(coefficient: float, loss: Callable[[], jax.Array]) -> jax.Array:
    """Without a coefficient nothing: not even the NaN of a token that is left out elsewhere."""
    return coefficient * loss() if coefficient else jnp.zeros((), jnp.float32)


def _load_balance_loss(settings: Settings, routed: routing.Routing, mask, leading: tuple[int, ...]) -> jax.Array:
    """Of the batch, or by sequence: the last of the ``leading`` dimensions that the tokens had."""
    if not settings.seq_aux:
        return routing.load_balance_loss(routed.probs, routed.expert_ids, mask)
    by_sequence = (math.prod(leading[:-1]), leading[-1] if leading else 1)
    return routing.sequence_load_balance_loss(
        routed.probs.reshape(*by_sequence, settings.num_experts),  # not -1, which no tokens would leave undefined
        routed.expert_ids.reshape(*by_sequence, settings.num_experts_per_tok),
        None if mask is None else mask.reshape(by_sequence),
    )


def _shared_experts(settings: Settings, weights: Weights, tokens: jax.Array) -> jax.Array:
    """``(silu(x @ wi_0) * (x @ wi_1)) @ wo``, clamped and gated, over all axes of the mesh: ``[N, H]``, not rounded."""
    rows = splitting.share(settings.split(), tokens)

    def wide(lhs, weight):
        return jnp.dot(lhs, weight.astype(lhs.dtype), preferred_element_type=accumulator_dtype(lhs.dtype))

    gate, up = wide(rows, weights.shared_wi_0), wide(rows, weights.shared_wi_1)
    hidden = activate("swiglu", gate, up, settings.shared_activation_limit)
    output = wide(hidden.astype(tokens.dtype), weights.shared_wo)
    if weights.shared_gate is not None:
        output *= jax.nn.sigmoid(_router_logits(rows, weights.shared_gate))
    return output[: tokens.shape[0]]


def _experts(settings: Settings, weights: Weights, tokens: jax.Array, routed: routing.Routing) -> jax.Array:
    """The expert step: ``[N, H] -> [N, H]``, over the mesh if there is one."""
    if tokens.shape[0] == 0:
        return tokens
    split = settings.split()
    step: Callable[..., jax.Array] = functools.partial(
        mok_jax.moe,
        axis_name=None if split is None else settings.expert_axis,
        activation=settings.activation,
        activation_limit=settings.activation_limit,
        config=settings.config or MoKConfig(),
        implementation=settings.implementation,
    )
    experts: list[Any] = [weights.wi_0, weights.wi_1, weights.wo]
    if settings.use_bias:
        # Rematerialised, so that weights with a row more are not kept from the forward to the backward.
        step = jax.checkpoint(functools.partial(_with_first_biases, step), policy=mok_jax.remat_policy)
        experts += [weights.wi_0_bias, weights.wi_1_bias]
    if settings.apply_router_weight_on_input:
        step = functools.partial(_with_weighted_inputs, step)
    rows = tokens, routed.expert_ids, routed.expert_weights
    return splitting.map_shares(split, step, rows, experts, P(settings.expert_axis))


def _with_first_biases(moe, tokens, expert_ids, expert_weights, wi_0, wi_1, wo, wi_0_bias, wi_1_bias) -> jax.Array:
    """``moe`` with the two biases as one more row of ``wi_0`` and ``wi_1``, which meets a 1 in the tokens."""
    columns = 8  # of which 7 are zeros; ``wo`` gets as many, whose outputs are cut off
    one = jnp.broadcast_to(jnp.arange(columns) == 0, (tokens.shape[0], columns)).astype(tokens.dtype)

    def with_row(weight, bias):
        return jnp.concatenate([weight, jnp.pad(bias[:, None], ((0, 0), (0, columns - 1), (0, 0)))], axis=1)

    output = moe(
        jnp.concatenate([tokens, one], axis=1),
        expert_ids,
        expert_weights,
        with_row(wi_0, wi_0_bias),
        with_row(wi_1, wi_1_bias),
        jnp.pad(wo, ((0, 0), (0, 0), (0, columns))),
    )
    return output[:, : tokens.shape[1]]


def _with_weighted_inputs(moe, tokens, expert_ids, expert_weights, *experts) -> jax.Array:
    """``sum_k f(w[t, k] * x[t])`` in place of ``sum_k w[t, k] * f(x[t])``, ``f`` being expert ``ids[t, k]``."""
    wide = accumulator_dtype(tokens.dtype)
    slots = tokens.astype(wide)[:, None, :] * expert_weights.astype(wide)[:, :, None]
    ids, ones = expert_ids.reshape(-1, 1), jnp.ones((expert_ids.size, 1), expert_weights.dtype)
    outputs = moe(slots.reshape(-1, slots.shape[-1]).astype(tokens.dtype), ids, ones, *experts)
    return outputs.reshape(slots.shape).astype(wide).sum(axis=1).astype(tokens.dtype)


def _last_bias(settings: Settings, wo_bias: jax.Array, routed: routing.Routing) -> jax.Array:
    """``sum_k w[t, k] * wo_bias[ids[t, k]]``, f32 ``[N, H]``; without ``w`` where that is on the experts' inputs."""
    weights = routed.expert_weights
    if settings.apply_router_weight_on_input:
        weights = jnp.ones_like(weights)
    # As a product, not a gather, whose gradient would be a scatter-add: those add in any order on a GPU.
    chosen = jax.nn.one_hot(routed.expert_ids, wo_bias.shape[0], dtype=bool)
    dense = jnp.sum(jnp.where(chosen, weights[..., None], 0), axis=1)
    rows = splitting.share(settings.split(), dense)
    output = jnp.dot(rows, wo_bias.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)
    return output[: dense.shape[0]]


def _router_logits(tokens: jax.Array, gate: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """``[N, H], [H, E] -> f32 [N, E]``, in f32 whatever the layer's dtype; with ``bias [E]``, if any."""
    # HIGHEST: a GPU's default for f32 is TF32, whose error is enough to choose other experts.
    logits = jnp.dot(tokens.astype(jnp.float32), gate.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)
    return logits if bias is None else logits + bias.astype(jnp.float32)[None]
