"""Floating-point operations of the layer: those of real rows only, without padding, recomputation or router."""

# Of one Hopper SM, dense bf16 products: 989 TFLOP/s on 132 SMs at 1.83 GHz (NVIDIA, H100 data sheet).
HOPPER_FLOPS_PER_CYCLE = 4096

PASSES = ("forward", "backward", "forward+backward")


def flops(pass_name: str, rows: int, hidden: int, intermediate: int) -> int:
    """Operations of ``rows`` (token, expert) pairs: three products of ``2 * H * I`` a row forward, six backward.

    Example:
      >>> flops("forward+backward", rows=1, hidden=10, intermediate=1)
      180
    """
    return {"forward": 6, "backward": 12, "forward+backward": 18}[pass_name] * rows * hidden * intermediate
