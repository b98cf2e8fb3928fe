"""The layer in a page of plain JAX: the definition that the other implementations are compared with.

Every expert is applied to every slot and the wanted results are selected, so the cost is ``E_local * EP`` times that of
a real implementation. There is no sorting, no buffer and no tile here, hence nothing to get wrong but the mathematics.
Any floating dtype works (float64 needs ``jax.enable_x64``), outside ``jax.shard_map`` and inside it. With expert
parallelism each rank gathers all weights and computes its own tokens; differentiation turns that gather into a
reduce-scatter.
"""

import jax
import jax.numpy as jnp

from mok_jax.activation import activate
from mok_jax.semantics import accumulator_dtype, combine, drop_bad_tokens, poison, routing_stats, vary_alike


def moe(x, expert_ids, expert_weights, wi_0, wi_1, wo, *, axis_name, activation, activation_limit):
    """Sends each token through its experts: ``y[t] = sum_k w[t, k] * activate(x @ wi_0[e], x @ wi_1[e]) @ wo[e]``.

    Products accumulate in float32 (float64 for float64 ``x``). The hidden activations and each slot's output are
    rounded to ``x.dtype``; the sum over k ascends in the accumulator's dtype and is rounded once.

    Args:
      x: ``[T, H]``, this rank's tokens.
      expert_ids: int32 ``[T, K]``, global ids; -1 selects nothing. Any other id outside ``[0, E)`` makes its token bad:
        the token is sent nowhere, and its rows of ``y`` and of the gradients of ``x`` and ``expert_weights`` are NaN.
      expert_weights: float32 ``[T, K]``.
      wi_0: ``[E_local, H, I]``, gate projection. Rounded to ``x.dtype`` like the other two.
      wi_1: ``[E_local, H, I]``, up projection.
      wo: ``[E_local, I, H]``, down projection.
      axis_name: mesh axis, or tuple of axes (first major), over which experts are sharded; None for one rank.
      activation: one of ``mok_jax.activation.ACTIVATIONS``.
      activation_limit: L clamps the gate from above at L and the up projection to ``[-L, L]``; None clamps nothing.

    Returns:
      ``y [T, H]`` in ``x.dtype``, and the ``MoEStats`` of this rank.
    """
    x, expert_ids, expert_weights, wi_0, wi_1, wo = vary_alike(
        x, expert_ids, expert_weights, wi_0, wi_1, wo, axis_name=axis_name
    )
    accumulator = accumulator_dtype(x.dtype)
    num_local_experts = wi_0.shape[0]
    # Cast, then gathered in the accumulator's dtype, so that the ranks' shares of a gradient are summed in it.
    weights = [all_gather(w.astype(x.dtype).astype(accumulator), axis_name) for w in (wi_0, wi_1, wo)]
    num_experts = weights[0].shape[0]
    ids, bad = drop_bad_tokens(expert_ids, num_experts)

    # Repeating tokens in the accumulator's dtype makes the gradient of x one sum over k, rounded once.
    num_slots = ids.size
    slots = jnp.repeat(x.astype(accumulator), ids.shape[1], axis=0).astype(x.dtype)

    def apply_expert(outputs, expert):
        index, *matrices = expert
        selected = (ids.reshape(num_slots) == index)[:, None]
        results = expert_mlp(slots, selected, *matrices, activation=activation, activation_limit=activation_limit)
        return jnp.where(selected, results, outputs), None

    outputs, _ = jax.lax.scan(apply_expert, jnp.zeros_like(slots), (jnp.arange(num_experts), *weights))
    y = combine(outputs.reshape(*ids.shape, -1), ids, expert_weights)
    y = poison(y, bad, x, expert_weights)
    return y.astype(x.dtype), routing_stats(ids, bad, num_experts, num_local_experts, axis_name)


def expert_mlp(rows, selected, wi_0, wi_1, wo, *, activation, activation_limit):
    """One expert on ``rows [R, H]``; rows that are not ``selected`` (bool ``[R, 1]``) are zero until the last product.

    They are masked before the first products and again after them. So neither a non-finite row nor a non-finite weight
    can reach, through ``0 * inf`` in a product or in its transpose, an expert or a token that is not concerned.
    Weights are ``[H, I]`` and ``[I, H]`` in the accumulator's dtype; the result has the dtype of ``rows``.
    """
    accumulator = wi_0.dtype
    operand = jnp.where(selected, rows, 0).astype(accumulator)
    gate = jnp.where(selected, dot(operand, wi_0), 0)
    up = jnp.where(selected, dot(operand, wi_1), 0)
    hidden = activate(activation, gate, up, activation_limit).astype(rows.dtype)
    return dot(hidden.astype(accumulator), wo).astype(rows.dtype)


def dot(lhs, rhs):
    """``lhs @ rhs`` of rounded operands held in the accumulator's dtype: exact products, summed wide."""
    return jnp.dot(lhs, rhs, precision=jax.lax.Precision.HIGHEST, preferred_element_type=lhs.dtype)


def all_gather(array, axis_name):
    """Concatenates the ranks' arrays along their first dimension."""
    return array if axis_name is None else jax.lax.all_gather(array, axis_name, axis=0, tiled=True)
