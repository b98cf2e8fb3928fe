"""The arithmetic of `csrc/moe` against definitions in Python: row table, macrobatches, bounds, offsets beyond 2^31."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.row_table import ROW_BLOCK, clean, row_table
from support.verifier import ask

PULLS_PER_BLOCK = 16
many = settings(max_examples=400, deadline=None, database=None)


@many
@given(
    st.integers(1, 6), st.integers(1, 70), st.integers(1, 4), st.integers(1, 4), st.floats(0, 1), st.integers(0, 2**32)
)
def test_row_table(ranks, tokens, top_k, local_experts, share_of_first, seed):
    rng = np.random.default_rng(seed)
    experts = ranks * local_experts
    ids = rng.integers(-1, experts, (ranks, tokens, top_k))
    ids[rng.random(ids.shape) < share_of_first] = rng.integers(-1, experts)
    ids[rng.random(ids.shape) < 0.02] = rng.choice([-2, experts, 2**31 - 1, -(2**31)])
    rank = int(rng.integers(0, ranks))
    answer = ask("rows", rank, ranks, tokens, top_k, local_experts, 1, 1, ids.ravel().tolist())
    ids = clean(ids, experts)
    expected = row_table(ids, rank, local_experts)
    assert answer["row_rank"] == expected[:, 0].tolist()
    assert answer["row_slot"] == expected[:, 1].tolist()
    counts = [int((ids == e).sum()) for e in range(rank * local_experts, (rank + 1) * local_experts)]
    assert answer["expert_rows"] == counts
    assert answer["expert_block"] == [0, *itertools.accumulate(-(-n // ROW_BLOCK) for n in counts)]
    assert answer["valid_slots"] == int((ids[rank] >= 0).sum())


@many
@given(
    st.integers(1, 6), st.integers(1, 70), st.integers(1, 4), st.integers(1, 4), st.integers(1, 40), st.integers(1, 8),
    st.sampled_from([1, 4, 32]), st.integers(0, 2**32)
)  # fmt: skip
def test_row_table_in_chunks(ranks, tokens, top_k, local_experts, chunks, shares, lanes, seed):
    """As GPUs build it, counted and written chunk by chunk: the same, whatever the chunks and their order."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(-1, ranks * local_experts, (ranks, tokens * top_k))
    rank = int(rng.integers(0, ranks))
    shape = [ranks, tokens, top_k, local_experts, 1, 1]
    answer = ask("chunked", rank, shape, chunks, shares, lanes, seed, ids.ravel().tolist())
    expected = row_table(ids, rank, local_experts)
    assert answer["row_rank"] == expected[:, 0].tolist()
    assert answer["row_slot"] == expected[:, 1].tolist()


def macrobatches(expert_block, ring_blocks):
    """Definition: at most a ring, cut at the last expert boundary in its last quarter, else where it is full."""
    total, cuts = expert_block[-1], [0]
    while total - cuts[-1] > ring_blocks:
        full = cuts[-1] + ring_blocks
        last_quarter = [b for b in expert_block if full - ring_blocks / 4 <= b <= full]
        cuts.append(max(last_quarter, default=full))
    return [*cuts, total]


@many
@given(st.lists(st.integers(0, 12), min_size=1, max_size=20), st.integers(1, 20))
def test_macrobatches(blocks_per_expert, ring_blocks):
    expert_block = [0, *itertools.accumulate(blocks_per_expert)]
    cuts = ask("macrobatches", ring_blocks, expert_block)
    assert cuts == macrobatches(expert_block, ring_blocks)
    # The bound by which memory is sized: no macrobatch but the last is shorter than three quarters of the ring.
    assert all(ring_blocks * 3 / 4 <= b - a <= ring_blocks for a, b in itertools.pairwise(cuts[:-1]))


def most_rows(slots, experts):
    """The worst routing: each expert that has a row at all has one more than whole blocks, as far as slots go."""
    return max(
        (slots - (used - 1)) // ROW_BLOCK * ROW_BLOCK + ((slots - (used - 1)) % ROW_BLOCK > 0) * ROW_BLOCK
        + (used - 1) * ROW_BLOCK
        for used in range(1, min(experts, slots) + 1)
    )  # fmt: skip


@many
@given(st.integers(1, 8), st.integers(1, 200), st.integers(1, 8), st.integers(1, 40), st.integers(1, 9))
def test_bounds(ranks, tokens, top_k, local_experts, ring_blocks):
    bounds = ask("bounds", ranks, tokens, top_k, local_experts, ring_blocks, 1)
    slots = ranks * tokens * top_k
    assert bounds["max_rows"] >= most_rows(slots, local_experts)
    assert bounds["max_rows"] == (slots + min(local_experts, slots) * 127) // 128 * 128
    default = bounds["default_ring_rows"]
    assert default % ROW_BLOCK == 0
    if ranks == 1:
        assert default == bounds["max_rows"]
    else:
        usual = 1.25 * tokens * top_k + min(local_experts, slots) * ROW_BLOCK
        assert default == min(bounds["max_rows"], -(-usual // ROW_BLOCK) * ROW_BLOCK)
    shortest = -(-ring_blocks * 3 // 4) * ROW_BLOCK
    assert bounds["max_macrobatches"] == max(1, -(-bounds["max_rows"] // shortest))


def test_bounds_beyond_32_bits():
    tokens, top_k, experts = 2**20, 8, 4
    bounds = ask("bounds", 512, tokens, top_k, experts, 2**16, 8)
    assert bounds["max_rows"] == (512 * tokens * top_k + experts * 127) // 128 * 128 > 2**32


@pytest.mark.parametrize(("tokens", "top_k", "hidden", "item"), ((1, 1, 8, 2), (1001, 3, 136, 4), (2**20, 8, 7168, 2)))
def test_arena(tokens, top_k, hidden, item):
    """Regions follow one another, aligned, without overlap; the last shape is 134 GB, of which nothing is allocated."""
    slots = tokens * top_k
    sizes = [tokens * hidden * item] * 2 + [slots * hidden * item] + [slots * 4] * 3
    offsets = ask("arena", 2, tokens, top_k, 2, 1, 1, hidden, item)
    assert offsets == [0, *itertools.accumulate(-(-size // 1024) * 1024 for size in sizes)]


FORWARD, BACKWARD = 0, 1
COMPUTE, COMMUNICATION = 0, 1


def ticket(direction, which, number, tiles, ring_blocks, minibatch_blocks, expert_rows):
    return ask("ticket", direction, which, number, tiles, ring_blocks, minibatch_blocks, expert_rows)


def test_tickets_beyond_32_bits():
    """Two experts of 2^30 rows each, more tiles than real widths have: a list is a function, so it costs nothing."""
    tiles, blocks = [300, 200, 100, 200, 10, 4], 2**23
    task = ticket(FORWARD, COMPUTE, 0, tiles, 2 * blocks, 2 * blocks, [2**30 - 1, 2**30 - 1])
    assert task["tasks"] == 2 * blocks * 500 > 2**32
    last_down = ticket(FORWARD, COMPUTE, -1, tiles, 2 * blocks, 2 * blocks, [2**30 - 1, 2**30 - 1])
    expected = {"kind": "down", "block": 2 * blocks - 1, "expert": 1, "part": 199, "ring_row": 2**31 - ROW_BLOCK}
    assert {key: last_down[key] for key in expected} == expected
    # The first tile of the second expert's gate and up comes after all tiles of the first one's.
    task = ticket(FORWARD, COMPUTE, blocks * 300, tiles, 2 * blocks, 2 * blocks, [2**30 - 1, 2**30 - 1])
    assert (task["kind"], task["block"], task["part"], task["expert"]) == ("gate_up", blocks, 0, 1)


def test_ring_beyond_a_macrobatch():
    """Many macrobatches of a large ring: a block's place is its number modulo the ring's blocks."""
    ring_blocks, rows = 5 * 2**20, [2**31 - 2**24]
    task = ticket(BACKWARD, COMMUNICATION, -2, [1] * 6, ring_blocks, 2**20, rows)  # the last one but reduce
    last = -(-rows[0] // ROW_BLOCK) - 1
    assert (task["kind"], task["block"]) == ("notify", last)
    assert task["macrobatch"] == last // ring_blocks == 3
    assert task["ring_row"] == last % ring_blocks * ROW_BLOCK
