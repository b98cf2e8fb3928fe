"""Floating-point operations of the layer: those of real rows only, without padding, recomputation or router."""

# Of one Hopper SM, dense bf16 products: 989 TFLOP/s on 132 SMs at 1.83 GHz (NVIDIA, H100 data sheet).
HOPPER_FLOPS_PER_CYCLE = 4096

# "forward+saves" is the forward as it runs in training: it also leaves what its backward needs.
PASSES = ("forward", "forward+saves", "backward", "forward+backward")


def flops(pass_name: str, rows: int, hidden: int, intermediate: int) -> int:
    """Operations of ``rows`` (token, expert) pairs: three products of ``2 * H * I`` a row forward, six backward.

    Example:
      >>> flops("forward+backward", rows=1, hidden=10, intermediate=1)
      180
    """
    products = {"forward": 3, "forward+saves": 3, "backward": 6, "forward+backward": 9}[pass_name]
    return products * 2 * rows * hidden * intermediate
