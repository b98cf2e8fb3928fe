"""The ideal of an unfused layer: its matrix products as dense ones, and its passes over memory, each on its own.

Every product has all rows and one expert's matrix, which no real layer gets; every pass reads and writes each value
once. They are compiled apart and launched one after another, so that the time of a launch is the sum of theirs. On a
CPU it is the products alone. With several GPUs one of them does one rank's share, and communication costs nothing.
There is nothing to check, since the parts do not form a layer.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from benchmarks.implementations import compiled
from benchmarks.implementations.base import Bind, Implementation, Program
from benchmarks.problem import Problem, Tokens


def _build(problem: Problem, pass_name: str) -> Bind:
    on_cpu = problem.platform == "cpu"
    rows = problem.rows if on_cpu else problem.rows // problem.ranks
    buffers = Buffers(problem, rows)
    parts: list[tuple[Callable, tuple]] = []
    if "forward" in pass_name.split("+"):
        parts += forward_products(buffers) + ([] if on_cpu else forward_passes(buffers))
    if "backward" in pass_name.split("+"):
        parts += backward_products(buffers) + ([] if on_cpu else backward_passes(buffers))
    steps = [(jax.jit(part).lower(*arguments).compile(), arguments) for part, arguments in parts]
    peak = max(compiled.peak_bytes(step) or 0 for step, _ in steps)

    def bind(_: Sequence[Tokens]) -> Program:
        return Program(lambda i: [step(*arguments) for step, arguments in steps], _wait_for_all, peak)

    return bind


class Buffers:
    """Random arrays of the sizes that the layer's intermediate results have, on one device."""

    def __init__(self, problem: Problem, rows: int):
        hidden, intermediate, self.top_k = problem.shape.hidden, problem.shape.intermediate, problem.shape.top_k
        self._keys = iter(jax.random.split(jax.random.key(7), 16))
        self._dtype, self._device = problem.dtype, problem.mesh.devices.flat[0]
        self.token = jax.device_put(
            jax.random.permutation(next(self._keys), rows).astype(jnp.int32) // self.top_k, self._device
        )
        self.slot = jax.device_put(jax.random.permutation(next(self._keys), rows).astype(jnp.int32), self._device)
        self.expert_weights = self.normal(rows // self.top_k, self.top_k).astype(jnp.float32)
        self.tokens = self.normal(rows // self.top_k, hidden)
        self.rows, self.d_rows = self.normal(rows, hidden), self.normal(rows, hidden)
        self.gate_up, self.d_gate_up = self.normal(rows, 2 * intermediate), self.normal(rows, 2 * intermediate)
        self.activated = self.normal(rows, intermediate)
        self.wi, self.wo = self.normal(hidden, 2 * intermediate), self.normal(intermediate, hidden)

    def normal(self, *shape: int) -> jax.Array:
        """Random values of the layer's dtype."""
        return jax.device_put(jax.random.normal(next(self._keys), shape, self._dtype), self._device)


def product(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    """``lhs @ rhs``, in full float32 where the operands are."""
    return jnp.dot(lhs, rhs, precision="highest" if lhs.dtype == jnp.float32 else None)


def forward_products(b: Buffers) -> list[tuple[Callable, tuple]]:
    """Gate and up as one product, and down."""
    return [(product, (b.rows, b.wi)), (product, (b.activated, b.wo))]


def backward_products(b: Buffers) -> list[tuple[Callable, tuple]]:
    """Gradients of the operands of both forward products."""
    return [
        (lambda d, w: product(d, w.T), (b.d_rows, b.wo)),
        (lambda h, d: product(h.T, d), (b.activated, b.d_rows)),
        (lambda d, w: product(d, w.T), (b.d_gate_up, b.wi)),
        (lambda x, d: product(x.T, d), (b.rows, b.d_gate_up)),
    ]


def forward_passes(b: Buffers) -> list[tuple[Callable, tuple]]:
    """Gather the rows, activate, combine."""
    return [
        (lambda x, token: x[token], (b.tokens, b.token)),
        (lambda gate_up: _swiglu(*jnp.split(gate_up, 2, axis=1)), (b.gate_up,)),
        (_combine, (b.rows, b.slot, b.expert_weights)),
    ]


def backward_passes(b: Buffers) -> list[tuple[Callable, tuple]]:
    """Gather the rows of dy, differentiate the activation, sum dx over k. Rows of x are kept from the forward."""
    return [
        (lambda dy, token: dy[token], (b.tokens, b.token)),
        (_swiglu_gradient, (b.gate_up, b.activated)),
        (lambda rows, slot: _gather_slots(rows, slot, b.top_k).sum(axis=1).astype(rows.dtype), (b.rows, b.slot)),
    ]


def _swiglu(gate, up):
    gate, up = gate.astype(jnp.float32), up.astype(jnp.float32)
    return (jax.nn.silu(gate) * up).astype(jnp.bfloat16)


def _swiglu_gradient(gate_up, d_activated):
    activated, vjp = jax.vjp(lambda gate_up: _swiglu(*jnp.split(gate_up, 2, axis=1)), gate_up)
    return activated, vjp(d_activated.astype(activated.dtype))[0]


def _gather_slots(rows, slot, top_k):
    return rows[slot].reshape(-1, top_k, rows.shape[1]).astype(jnp.float32)


def _combine(rows, slot, expert_weights):
    return (_gather_slots(rows, slot, expert_weights.shape[1]) * expert_weights[:, :, None]).sum(1).astype(rows.dtype)


def _wait_for_all(results):
    jax.block_until_ready(results)


IDEAL_UNFUSED = Implementation("ideal-unfused", lambda _: None, _build)
