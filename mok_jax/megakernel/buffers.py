"""The buffers of a call by name, in the order in which they cross the FFI: ``csrc/ffi/buffers.h`` has the same lists.

A new buffer is a field here, with the size of a result, and a member there. ``native.INTERFACE`` then goes up, so that
a program and an extension that do not fit refuse each other.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple, Self

import numpy as np

from mok_jax import native
from mok_jax.config import SAVE_POLICIES, Save
from mok_jax.megakernel.call import Call


class ForwardOperands(NamedTuple):
    """Of one rank, as of all that :attr:`Call.virtual_ranks` counts: their arrays one after the other."""

    x: Any  # [T, H]
    expert_ids: Any  # int32 [T, K]
    expert_weights: Any  # float32 [T, K]
    wi_0: Any  # [E_local, H, I], like all weights in the dtype of x
    wi_1: Any
    wo: Any  # [E_local, I, H]
    where: Any  # int32 [2], see `derivative.coordinates`

    @classmethod
    def of(cls, where, x, expert_ids, expert_weights, wi_0, wi_1, wo) -> Self:
        """Of the arguments of ``mok_jax.moe``: weights in the dtype of ``x``, as kernels read them."""
        wi_0, wi_1, wo = (w.astype(x.dtype) for w in (wi_0, wi_1, wo))
        return cls(x, expert_ids, expert_weights, wi_0, wi_1, wo, where)


class ForwardResults(NamedTuple):
    """What the forward writes."""

    y: Any
    row_table: Any
    expert_rows: Any  # rows per local expert
    bad_tokens: Any
    pre_activations: Any  # of gate and up, in whole tiles, in whatever order the executor likes; empty: not wanted
    rows: Any  # of x
    hidden: Any
    workspace: Any

    @property
    def rings(self) -> tuple:
        """What rows flow through; of some of it the first macrobatch stays."""
        return self.pre_activations, self.rows, self.hidden


class Residuals(NamedTuple):
    """What a forward hands to its backward besides its operands; None where ``save`` does not name it."""

    row_table: Any
    expert_rows: Any
    saved_pre_activations: Any
    saved_rows: Any


class BackwardOperands(NamedTuple):
    """The forward's, the cotangent of ``y``, and the residuals."""

    x: Any
    expert_ids: Any
    expert_weights: Any
    wi_0: Any
    wi_1: Any
    wo: Any
    where: Any
    dy: Any
    row_table: Any
    expert_rows: Any
    saved_pre_activations: Any
    saved_rows: Any

    @classmethod
    def of(cls, operands: ForwardOperands, dy: Any, residuals: Residuals) -> Self:
        return cls(**operands._asdict(), dy=dy, **residuals._asdict())


class BackwardResults(NamedTuple):
    """What the backward writes: gradients, then rings and scratch. Empty is what a call has no use for."""

    dx: Any
    router_grads: Any
    wi_0_grad: Any
    wi_1_grad: Any
    wo_grad: Any
    rows: Any  # of x
    grads: Any  # rows of dy
    pre_activations: Any
    hidden: Any  # times the router weight
    gate_up_grads: Any
    row_weights: Any
    router_parts: Any  # of a row's router gradient, by tile
    straddle: Any  # accumulators of the expert that straddles two macrobatches
    workspace: Any

    @property
    def gradients(self) -> tuple:
        """In the order of the arguments of ``mok_jax.moe`` that have one."""
        return self.dx, self.router_grads, self.wi_0_grad, self.wi_1_grad, self.wo_grad

    @property
    def scratch(self) -> list:
        """All but gradients and workspace."""
        others = ("dx", "router_grads", "wi_0_grad", "wi_1_grad", "wo_grad", "workspace")
        return [buffer for name, buffer in self._asdict().items() if name not in others]


class Spec(NamedTuple):
    """A buffer before it exists."""

    shape: tuple[int, ...]
    dtype: Any


# The policies that keep a residual which not all do.
_KEPT_BY: dict[str, tuple[Save, ...]] = {
    "saved_pre_activations": ("pre_activations", "pre_activations_and_rows"),
    "saved_rows": ("pre_activations_and_rows",),
}


def _is_kept(call: Call, name: str) -> bool:
    return call.save in _KEPT_BY.get(name, SAVE_POLICIES)


def residuals_of(call: Call, results: ForwardResults) -> Residuals:
    """Those results of the forward that the ``save`` policy hands to the backward."""
    every = Residuals(results.row_table, results.expert_rows, results.pre_activations, results.rows)
    return Residuals(**{name: value if _is_kept(call, name) else None for name, value in every._asdict().items()})


def name_forward_operands(call: Call, operands: Iterable[Any]) -> ForwardOperands:
    """Of a primitive's operands."""
    del call
    return ForwardOperands(*operands)


def name_backward_operands(call: Call, operands: Iterable[Any]) -> BackwardOperands:
    """Of a primitive's operands, which are without those residuals that were not saved: None."""
    rest = iter(operands)
    named = BackwardOperands(*(next(rest) if _is_kept(call, name) else None for name in BackwardOperands._fields))
    assert next(rest, None) is None, "more operands than the policy keeps"
    return named


def empty_residuals(operands: ForwardOperands | BackwardOperands) -> dict[str, Spec]:
    """By name, what a handler is given for each operand that is None."""
    _, hidden, intermediate = operands.wi_0.shape
    widths = {"saved_pre_activations": _pre_activation_width(intermediate), "saved_rows": hidden}
    bits = _bits(operands.x.dtype)
    return {name: Spec((0, width), bits) for name, width in widths.items() if getattr(operands, name, ()) is None}


def weight_grad_dtype(x, weight):
    """What the kernels write weight gradients in: float32 for float32 weights, not rounded in between."""
    return np.dtype(np.float32) if weight.dtype == np.float32 else np.dtype(x.dtype)


def forward_results(call: Call, operands: Any) -> ForwardResults:
    """A :class:`Spec` of each result, given what has the operands that they depend on, with shapes and dtypes."""
    x, n = operands.x, call.virtual_ranks
    experts, hidden, intermediate = operands.wi_0.shape
    ring, bits = n * call.ring_rows, _bits(x.dtype)
    return ForwardResults(
        y=Spec(x.shape, x.dtype),
        row_table=Spec((n * call.max_rows, 2), np.int32),
        expert_rows=Spec((experts,), np.int32),
        bad_tokens=Spec((n,) if n > 1 else (), np.int32),
        pre_activations=Spec((ring if call.save != "nothing" else 0, _pre_activation_width(intermediate)), bits),
        rows=Spec((ring, hidden), bits),
        hidden=Spec((ring, intermediate), bits),
        workspace=Spec((_workspace_bytes(call, operands),), np.uint8),
    )


def backward_results(call: Call, operands: Any) -> BackwardResults:
    """Likewise."""
    x, wi, wo, n = operands.x, operands.wi_0, operands.wo, call.virtual_ranks
    _, hidden, intermediate = wi.shape
    ring, overflow = n * call.ring_rows, call.ring_may_overflow
    pulled = ring if overflow or call.save != "pre_activations_and_rows" else 0
    replayed = ring if overflow or call.save == "nothing" else 0
    straddle = n * native.library().straddle_elements(hidden=hidden, intermediate=intermediate) if overflow else 0
    bits, wide = _bits(x.dtype), _bits(np.float32)
    return BackwardResults(
        dx=Spec(x.shape, x.dtype),
        router_grads=Spec(operands.expert_weights.shape, np.float32),
        wi_0_grad=Spec(wi.shape, call.weight_grad_dtype),
        wi_1_grad=Spec(wi.shape, call.weight_grad_dtype),
        wo_grad=Spec(wo.shape, call.weight_grad_dtype),
        rows=Spec((pulled, hidden), bits),
        grads=Spec((ring, hidden), bits),
        pre_activations=Spec((replayed, _pre_activation_width(intermediate)), bits),
        hidden=Spec((ring, intermediate), bits),
        gate_up_grads=Spec((ring, 2 * intermediate), bits),
        row_weights=Spec((ring,), wide),
        router_parts=Spec((ring, native.library().router_parts_width(intermediate)), wide),
        straddle=Spec((straddle,), wide),
        workspace=Spec((_workspace_bytes(call, operands),), np.uint8),
    )


def _workspace_bytes(call: Call, operands: Any) -> int:
    """Of all virtual ranks: a GPU's schedule and counters, and what ranks that are all in one place share."""
    n = call.virtual_ranks
    tokens, hidden = operands.x.shape
    return n * native.library().workspace_bytes(
        ranks=call.ranks,
        tokens=tokens // n,
        top_k=operands.expert_weights.shape[1],
        local_experts=operands.wi_0.shape[0] // n,
        ring_rows=call.ring_rows,
        hidden=hidden,
        ranks_here=n,
    )


def _pre_activation_width(intermediate: int) -> int:
    return native.library().pre_activation_width(intermediate)


def _bits(dtype):
    """Unsigned integers as wide as ``dtype``: the type of results that may hold bytes which nobody wrote.

    JAX's debug modes look for NaN and infinity in floats, and would find what memory held before.
    """
    return np.dtype(f"u{np.dtype(dtype).itemsize}")
