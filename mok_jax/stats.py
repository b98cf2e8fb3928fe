"""What a call of the layer reports about its routing, as values on the device."""

from typing import NamedTuple

import jax


class MoEStats(NamedTuple):
    """Routing of one rank in one call. Nothing here is differentiable.

    Attributes:
      rows: int32 scalar; (token, k) pairs that arrived at this rank's experts, padding excluded.
      rows_per_expert: int32 ``[E_local]``; the same, for each local expert.
      bad_tokens: int32 scalar; tokens *of this rank* with an expert id outside ``[-1, E)``.
    """

    rows: jax.Array
    rows_per_expert: jax.Array
    bad_tokens: jax.Array
