"""The unfused layer on one device around any grouped product, as its best user writes it.

Slots are sorted by expert and gathered; gate and up are one product with weights stored side by side; the router
weight's gradient is a dot of values that the backward has anyway; nothing is scattered: the way back from sorted rows
is a gather with the inverse permutation. All ids must be valid (the benchmark's are).
"""

from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp


class Products(Protocol):
    """Grouped products over rows sorted by group, with ``sizes`` int32 ``[G]``; results in the operands' dtype."""

    def dot(self, lhs: jax.Array, rhs: jax.Array, sizes: jax.Array) -> jax.Array:
        """``[R, A] x [G, A, B] -> [R, B]``."""

    def dot_transposed(self, lhs: jax.Array, rhs: jax.Array, sizes: jax.Array) -> jax.Array:
        """``[R, B] x [G, A, B] -> [R, A]``."""

    def weight_gradient(self, lhs: jax.Array, rhs: jax.Array, sizes: jax.Array) -> jax.Array:
        """``[R, A] x [R, B] -> [G, A, B]``: of each group its own rows."""


class Order(NamedTuple):
    """``slot [R]`` in each sorted row, ``row [R]`` of each slot, and ``sizes [E]`` of the experts' groups."""

    slot: jax.Array
    row: jax.Array
    sizes: jax.Array


def make_layer(products: Products):
    """The layer as ``(x, expert_ids, expert_weights, wi [E, H, 2I], wo [E, I, H]) -> y``, with its own derivative."""

    @jax.custom_vjp
    def layer(x, expert_ids, expert_weights, wi, wo):
        return forward(x, expert_ids, expert_weights, wi, wo)[0]

    def forward(x, expert_ids, expert_weights, wi, wo):
        order = sort_slots(expert_ids, wi.shape[0])
        rows = x[order.slot // expert_ids.shape[1]]
        gate_up = products.dot(rows, wi, order.sizes)
        outputs = products.dot(swiglu(gate_up), wo, order.sizes)
        weighted = outputs[order.row].reshape(*expert_ids.shape, -1).astype(jnp.float32) * expert_weights[..., None]
        return weighted.sum(axis=1).astype(x.dtype), (order, rows, gate_up, expert_weights, wi, wo)

    def backward(saved, dy):
        order, rows, gate_up, expert_weights, wi, wo = saved
        top_k = expert_weights.shape[1]
        row_weight = expert_weights.reshape(-1)[order.slot][:, None]
        d_rows = dy[order.slot // top_k]
        d_hidden = products.dot_transposed(d_rows, wo, order.sizes).astype(jnp.float32)
        hidden, swiglu_vjp = jax.vjp(swiglu_wide, gate_up)
        d_weight = (d_hidden * hidden).sum(axis=1)
        (d_gate_up,) = swiglu_vjp(d_hidden * row_weight)
        d_wo = products.weight_gradient((hidden * row_weight).astype(rows.dtype), d_rows, order.sizes)
        d_wi = products.weight_gradient(rows, d_gate_up, order.sizes)
        d_x_rows = products.dot_transposed(d_gate_up, wi, order.sizes)
        dx = d_x_rows[order.row].reshape(*expert_weights.shape, -1).astype(jnp.float32).sum(axis=1)
        return dx.astype(dy.dtype), None, d_weight[order.row].reshape(expert_weights.shape), d_wi, d_wo

    layer.defvjp(forward, backward)
    return layer


def sort_slots(expert_ids: jax.Array, num_experts: int) -> Order:
    """Orders slots by expert, and within an expert as they come."""
    ids = expert_ids.reshape(-1)
    slot = jnp.argsort(ids, stable=True).astype(jnp.int32)
    row = jnp.zeros_like(slot).at[slot].set(jnp.arange(ids.size, dtype=jnp.int32), unique_indices=True)
    ends = jnp.searchsorted(ids[slot], jnp.arange(num_experts, dtype=ids.dtype), side="right").astype(jnp.int32)
    return Order(slot, row, jnp.diff(ends, prepend=0))


def swiglu_wide(gate_up: jax.Array) -> jax.Array:
    """``[R, 2I]``, gate before up, to float32 ``[R, I]``."""
    gate, up = jnp.split(gate_up.astype(jnp.float32), 2, axis=1)
    return jax.nn.silu(gate) * up


def swiglu(gate_up: jax.Array) -> jax.Array:
    """``swiglu_wide`` rounded to the operand's dtype."""
    return swiglu_wide(gate_up).astype(gate_up.dtype)


def side_by_side(weights) -> tuple[jax.Array, jax.Array]:
    """``(wi_0, wi_1, wo)`` as ``(wi, wo)``."""
    return jnp.concatenate([weights.wi_0, weights.wi_1], axis=2), weights.wo


def split_gradients(d_wi: jax.Array, d_wo: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of ``(wi, wo)`` as those of ``(wi_0, wi_1, wo)``."""
    d_wi_0, d_wi_1 = jnp.split(d_wi, 2, axis=2)
    return d_wi_0, d_wi_1, d_wo
