"""Task programs to try: shapes with their tile counts, and routings, as words for the verifier or for a device.

Shapes are drawn, ids made from a seed: to draw thousands of ids would take longer than the proof.
"""

import numpy as np
import pytest
from hypothesis import strategies as st

FORWARD, BACKWARD = 0, 1
SAVES = (0, 1, 2)
RACK_SIZE = 72
SKEWS = ("uniform", "one expert", "one rank", "few experts", "mostly absent", "all absent", "bad ids")

directions = pytest.mark.parametrize("direction", (FORWARD, BACKWARD), ids=("forward", "backward"))


@st.composite
def programs(draw, ranks, max_tokens, experts=(1, 5), ring_blocks=(1, 6), minibatch_blocks=(1, 4)):
    """A save policy, a shape, tile counts and a routing, as words for the verifier."""
    ep = draw(ranks)
    tokens, top_k, experts = draw(st.integers(1, max_tokens)), draw(st.integers(1, 4)), draw(st.integers(*experts))
    ring_blocks, minibatch_blocks = draw(st.integers(*ring_blocks)), draw(st.integers(*minibatch_blocks))
    few, many = st.integers(1, 3), st.integers(1, 9)  # many: down and row_grad, which have groups of columns
    tiles = draw(st.tuples(few, many, few, many, few, st.integers(1, 4)))
    ids = routing(draw(st.sampled_from(SKEWS)), draw(st.integers(0, 2**32 - 1)), ep * tokens * top_k, ep * experts)
    return [draw(st.sampled_from(SAVES)), ep, tokens, top_k, experts, ring_blocks, minibatch_blocks, tiles], ids


def routing(skew, seed, slots, experts):
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, experts, slots)
    if skew == "one expert":
        ids[:] = ids[0]
    elif skew == "one rank":
        ids = ids[0] // 5 * 5 + ids % min(5, experts)
    elif skew == "few experts":  # three quarters on two, so that some are empty and some are cut
        ids = np.where(rng.random(slots) < 0.75, ids[rng.integers(0, min(2, slots), slots)], ids)
    elif skew == "mostly absent":
        ids[rng.random(slots) < 0.9] = -1
    elif skew == "all absent":
        ids[:] = -1
    elif skew == "bad ids":
        ids[rng.random(slots) < 0.05] = experts
    return ids.tolist()
