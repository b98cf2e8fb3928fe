"""What is counted as work: ``mok_jax.flops`` of real rows only, without padding, recomputation or router."""

from typing import Any

import mok_jax

# Of one Hopper SM, dense bf16 products: 989 TFLOP/s on 132 SMs at 1.83 GHz (NVIDIA, H100 data sheet).
HOPPER_FLOPS_PER_CYCLE = 4096

# "forward+saves" is the forward as it runs in training: it also leaves what its backward needs.
PASSES = ("forward", "forward+saves", "backward", "forward+backward")


def flops(pass_name: str, rows: int, hidden: int, intermediate: int) -> int:
    """Of ``rows`` (token, expert) pairs.

    Example:
      >>> flops("forward+backward", rows=1, hidden=10, intermediate=1)
      180
    """
    direction: Any = pass_name.removesuffix("+saves")
    return mok_jax.flops(rows, hidden, intermediate, direction)
