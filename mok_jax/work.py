"""How much work a call is, in floating-point operations."""

import operator
from typing import Literal

from mok_jax.config import require_choice

Direction = Literal["forward", "backward", "forward+backward"]

# A product has two in its backward, of as many operations each.
_PRODUCTS: dict[Direction, int] = {"forward": 1, "backward": 2, "forward+backward": 3}


def flops(rows: int, hidden_size: int, intermediate_size: int, direction: Direction = "forward") -> int:
    """Floating-point operations of experts: ``6 * rows * H * I`` forward, twice that backward.

    Three products of ``2 * H * I`` a row. A row is a (token, expert) pair that is in use: ``T * K`` for all of ``T``
    tokens, ``int(stats.rows)`` of one rank. Padding is not counted, nor what a backward computes again (``4 * H * I`` a
    row beyond the ring or with ``save="nothing"``), nor the router: ``layer.settings.flops`` has a whole layer.

    ``cost_analysis()`` of a compiled program does not know them: XLA counts every custom call that is not its own as
    -1, and nothing in a call can tell it otherwise (``HandleCustomCall`` in XLA's ``hlo_cost_analysis.cc``).

    Args:
      rows: how many.
      hidden_size: ``H``.
      intermediate_size: ``I``, of one expert.
      direction: ``"forward"``, ``"backward"`` or ``"forward+backward"``.

    Raises:
      ValueError: ``direction`` is another.

    Example:
      >>> flops(rows=4096 * 8, hidden_size=7168, intermediate_size=2048) / 1e12
      2.886218022912
    """
    return 3 * product_flops(rows, hidden_size, intermediate_size, direction)


def product_flops(rows: int, width: int, columns: int, direction: Direction) -> int:
    """Of ``[rows, width] @ [width, columns]``, or of the two products that are its backward."""
    require_choice("direction", direction, tuple(_PRODUCTS))
    # As Python's integers: rows of an int32, such as those that a device has counted, would overflow silently.
    return _PRODUCTS[direction] * 2 * operator.index(rows) * operator.index(width) * operator.index(columns)
