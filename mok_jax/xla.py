"""The layer as JAX users write it today, from XLA's own operations: sort, all-to-all, ``ragged_dot``, and back.

It runs on every platform and drops no token, and it is what the fused kernel has to beat. It means exactly what
``mok_jax.reference`` means, whose small pieces it shares; only the way of the tokens to their experts and back differs.

The all-to-all is padded: every rank sends every peer room for all of its ``T * K`` slots, since all of them may have
one destination. ``jax.lax.ragged_all_to_all`` would send only what is there, but does not exist on the CPU; the padded
form is used on all platforms for now.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from mok_jax.activation import activate
from mok_jax.semantics import (
    accumulator_dtype,
    combine,
    drop_bad_tokens,
    group_size,
    poison,
    routing_stats,
    vary_alike,
)


def moe(x, expert_ids, expert_weights, wi_0, wi_1, wo, *, axis_name, activation, activation_limit):
    """Sends each token through its experts; arguments, results and meaning are those of ``mok_jax.reference.moe``."""
    x, expert_ids, expert_weights, wi_0, wi_1, wo = vary_alike(
        x, expert_ids, expert_weights, wi_0, wi_1, wo, axis_name=axis_name
    )
    num_ranks = group_size(axis_name)
    num_local_experts = wi_0.shape[0]
    num_experts = num_ranks * num_local_experts
    ids, bad = drop_bad_tokens(expert_ids, num_experts)
    plan = plan_exchange(ids.reshape(-1), num_ranks, num_local_experts)

    # Repeating in the accumulator's dtype makes the gradient of x one sum over k, rounded once.
    slots = jnp.repeat(x.astype(accumulator_dtype(x.dtype)), ids.shape[1], axis=0).astype(x.dtype)
    # The mask is for the gradient: what comes back to unused rows belongs to no slot, and is not specified.
    sent = jnp.where(plan.is_sent[:, None], take_rows(slots, plan.slot_of_sent), 0)
    received = all_to_all(sent, axis_name)
    local_expert = all_to_all(plan.local_expert_of_sent, axis_name)
    results = grouped_mlp(
        received, local_expert, wi_0, wi_1, wo, activation=activation, activation_limit=activation_limit
    )
    outputs = take_rows(all_to_all(results, axis_name), plan.sent_of_slot).reshape(*ids.shape, -1)

    y = poison(combine(outputs, ids, expert_weights), bad, x, expert_weights)
    return y.astype(x.dtype), routing_stats(ids, bad, num_experts, num_local_experts, axis_name)


class ExchangePlan(NamedTuple):
    """Where slots travel. The send buffer has ``num_ranks`` parts of ``S = T * K`` rows; unused rows end each part.

    Attributes:
      slot_of_sent: int32 ``[num_ranks * S]``, the slot in each row of the send buffer (any slot, if unused).
      is_sent: bool ``[num_ranks * S]``, whether that row is used.
      local_expert_of_sent: int32 ``[num_ranks * S]``, its expert at the destination; ``num_local_experts`` if unused.
      sent_of_slot: int32 ``[S]``, the inverse; 0 for slots that are not sent.
    """

    slot_of_sent: jax.Array
    is_sent: jax.Array
    local_expert_of_sent: jax.Array
    sent_of_slot: jax.Array


def plan_exchange(ids, num_ranks, num_local_experts):
    """Lays slots out by destination rank, in slot order within one; ``ids [S]`` holds -1 for slots that stay."""
    num_slots = ids.shape[0]
    rank = jnp.where(ids >= 0, ids // num_local_experts, num_ranks)
    order = jnp.argsort(rank, stable=True)
    count = jnp.bincount(rank, length=num_ranks + 1)
    start = jnp.cumsum(count) - count

    column = jnp.arange(num_slots)
    is_sent = (column[None] < count[:num_ranks, None]).reshape(-1)
    position = jnp.minimum(start[:num_ranks, None] + column[None], num_slots - 1).reshape(-1)
    slot_of_sent = order[position]
    local_expert = jnp.where(is_sent, ids[slot_of_sent] % num_local_experts, num_local_experts)

    place = inverse_permutation(order)
    sent_of_slot = jnp.where(ids >= 0, rank * num_slots + place - start[rank], 0)
    return ExchangePlan(slot_of_sent, is_sent, local_expert, sent_of_slot)


def grouped_mlp(rows, local_expert, wi_0, wi_1, wo, *, activation, activation_limit):
    """Applies to each of ``rows [R, H]`` its ``local_expert [R]``; rows of no expert (``E_local``) give zeros."""
    num_local_experts = wi_0.shape[0]
    order = jnp.argsort(local_expert, stable=True)
    group_sizes = jnp.bincount(local_expert, length=num_local_experts + 1)[:num_local_experts].astype(jnp.int32)
    is_real = (local_expert < num_local_experts)[order, None]

    def project(operand, weight):
        # What ragged_dot leaves in rows that belong to no group is not specified.
        return jnp.where(is_real, grouped_dot(operand, weight.astype(rows.dtype), group_sizes), 0)

    sorted_rows = take_rows(rows, order)
    gate, up = project(sorted_rows, wi_0), project(sorted_rows, wi_1)
    hidden = activate(activation, gate, up, activation_limit)
    outputs = project(hidden.astype(rows.dtype), wo).astype(rows.dtype)
    return take_rows(outputs, inverse_permutation(order))


def grouped_dot(lhs, rhs, group_sizes):
    """``ragged_dot`` of ``lhs [R, A]`` and ``rhs [E_local, A, B]``, in the accumulator's dtype.

    Non-finite rows stay in their group. A non-finite ``rhs`` does not where XLA has no grouped product and multiplies
    every row, zeroed, with every group's matrix, as on the CPU.
    """
    accumulator = accumulator_dtype(lhs.dtype)
    # A float32 product must not fall back to TensorFloat-32 on a GPU; narrower operands are exact anyway.
    precision = jax.lax.Precision.HIGHEST if lhs.dtype == accumulator else None
    return jax.lax.ragged_dot(lhs, rhs, group_sizes, precision=precision, preferred_element_type=accumulator)


def take_rows(array, index):
    """``array[index]`` for an index that is known to be in bounds."""
    return array.at[index].get(mode="promise_in_bounds")


def inverse_permutation(order):
    """The ``inverse`` with ``inverse[order[i]] == i``."""
    return jnp.zeros_like(order).at[order].set(jnp.arange(order.size, dtype=order.dtype), unique_indices=True)


def all_to_all(array, axis_name):
    """Part r of ``array [num_ranks * S, ...]`` goes to rank r; part r of the result came from rank r."""
    return array if axis_name is None else jax.lax.all_to_all(array, axis_name, 0, 0, tiled=True)
