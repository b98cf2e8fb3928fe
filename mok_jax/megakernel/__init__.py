"""The fused implementation: a ``custom_vjp`` around one JAX primitive, and one FFI call, per direction.

From the caller to the handlers: :mod:`derivative`, which rounds, saves and differentiates; :mod:`lowering`, the
primitives; :mod:`buffers`, what crosses the FFI, by name; :mod:`call`, what a call site fixes.
"""

from mok_jax.megakernel.buffers import (
    BackwardOperands,
    BackwardResults,
    ForwardOperands,
    ForwardResults,
    Residuals,
    backward_results,
    forward_results,
    residuals_of,
    weight_grad_dtype,
)
from mok_jax.megakernel.call import Call, make_call
from mok_jax.megakernel.derivative import moe, remat_policy
from mok_jax.megakernel.lowering import backward, backward_p, forward, forward_p

__all__ = [
    "BackwardOperands",
    "BackwardResults",
    "Call",
    "ForwardOperands",
    "ForwardResults",
    "Residuals",
    "backward",
    "backward_p",
    "backward_results",
    "forward",
    "forward_p",
    "forward_results",
    "make_call",
    "moe",
    "remat_policy",
    "residuals_of",
    "weight_grad_dtype",
]
