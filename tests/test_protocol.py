"""The protocol between calls of several ranks, proven by exploring every state that a sequence of calls can reach.

`csrc/verify/protocol.h` says what is looked for; here are the sequences. A sequence is a list of call sites, and of
each rank the streams that make calls of them. `docs/algorithm.md` tells the protocol in words.
"""

import itertools

import numpy as np
import pytest

from support.verifier import ask

FORWARD, BACKWARD = 0, 1

# Tokens, top_k, hidden. Two ranks that use WIDE and TALL use the same arena, with other things at the same places.
WIDE, TALL, LARGE = (2, 2, 1024), (4, 1, 768), (4, 2, 1536)


def site(direction, shape, ids):
    return [direction, *shape, np.ravel(ids).tolist()]


def routed(direction, shape, ranks, name):
    """A call site; every rank has one expert."""
    slots = shape[0] * shape[1]
    rank, slot = np.arange(ranks)[:, None], np.arange(slots)
    return site(
        direction,
        shape,
        {
            "to rank 0": 0 * (rank + slot),
            "at home": rank + 0 * slot,  # no rank has rows of another, so that none waits for another but to begin
            "mixed": (rank + slot) % ranks,
        }[name],
    )


def sequence(sites, programs, blocks=1, bands=1, failures=0):
    """`programs` are lists of streams, which are lists of numbers of sites; bands are those of columns."""
    streams = [[len(rank), [[len(calls), calls] for calls in rank]] for rank in programs]
    return [len(programs), blocks, bands, failures, len(sites), sites, streams]


def alike(ranks, calls):
    """Programs of ranks that all make the same calls."""
    return [[list(calls)]] * ranks


def explore(words, flaw="none"):
    return ask("protocol", flaw, words)


def check(words):
    found = explore(words)
    if found["error"]:
        pytest.fail(f"{found['error']}, after {found['steps']}")
    assert found["furthest_ahead"] <= 1
    return found


def two_ranks():
    sites = [
        routed(FORWARD, WIDE, 2, "to rank 0"),
        routed(BACKWARD, WIDE, 2, "to rank 0"),
        routed(FORWARD, TALL, 2, "mixed"),
        routed(BACKWARD, TALL, 2, "mixed"),
        routed(FORWARD, WIDE, 2, "at home"),
        routed(FORWARD, TALL, 2, "at home"),
    ]
    classes = [sites[0], routed(FORWARD, LARGE, 2, "mixed")]
    # Both ranks make two calls; XLA may run them at the same time.
    at_once = [[[0], [2]], [[0, 2]]]
    yield "shapes", sequence(sites, alike(2, (0, 2, 3, 1, 4, 2)), bands=2)
    yield "nothing from peers", sequence(sites, alike(2, (2, 4, 5)), bands=2)
    yield "failure", sequence(sites, alike(2, (0, 2)), blocks=2, failures=1)
    yield "two failures", sequence(sites, alike(2, (0, 2, 3)), failures=2)
    yield "other calls", sequence(sites, [[[0, 2]], [[2, 0]]])
    yield "classes", sequence(classes, alike(2, (0, 1, 0)), failures=1)
    yield "calls of other classes", sequence(classes, [[[0, 1]], [[1, 0]]])
    yield "at once", sequence(sites, at_once, blocks=2)


def three_ranks():
    sites = [
        routed(FORWARD, WIDE, 3, "to rank 0"),
        routed(FORWARD, TALL, 3, "at home"),
        routed(BACKWARD, TALL, 3, "mixed"),
        routed(FORWARD, TALL, 3, "mixed"),
    ]
    yield "three ranks", sequence(sites, alike(3, (0, 1, 2, 3, 1)), bands=2)
    yield "three ranks, failure", sequence(sites, alike(3, (0, 2)), failures=1)


SEQUENCES = dict(itertools.chain(two_ranks(), three_ranks()))


@pytest.mark.parametrize("name", SEQUENCES)
def test_sequences(name):
    found = check(SEQUENCES[name])
    print(found["states"])
    assert found["states"] > 200 and (found["furthest_ahead"] == 1 or "other" in name)


@pytest.mark.parametrize(("ranks", "cases", "calls"), ((2, 150, 6), (3, 20, 4)))
def test_drawn_sequences(ranks, cases, calls):
    """Shapes, routings and directions at random; some ranks get nothing, some slots are empty."""
    states = 0
    for seed in range(cases):
        rng = np.random.default_rng(seed)
        sites = []
        for _ in range(3):
            shape = (WIDE, TALL, LARGE, (1, 3, 512))[rng.integers(4)]
            ids = rng.integers(-1, rng.integers(0, ranks) + 1, (ranks, shape[0] * shape[1]))
            sites += [site(direction, shape, ids) for direction in (FORWARD, BACKWARD)]
        kept = rng.permutation(6)[:4]
        words = sequence(
            [sites[i] for i in kept], alike(ranks, rng.integers(0, 4, calls).tolist()), bands=int(rng.integers(1, 3))
        )
        states += check(words)["states"]
    print(f"{cases} sequences, {states} states")


WAITS_FOR_EVER = ("nothing can happen any more",)
TWO_CALLS = ("rank 0, stream 1", "while rank 0, stream 0")
CAUGHT = {  # in which sequence, and words of what is found there
    "ids_in_place_by_shape": ("nothing from peers", ("reads ids", "stages its rows")),
    "ids_pushed_by_shape": ("nothing from peers", ("pushes its ids", "reduces")),
    "one_buffer_of_ids": ("shapes", ("pushes its ids", "reads ids")),
    "enter_before_ids": ("three ranks", ("pushes its ids", "reads ids")),
    "enter_before_staging": ("shapes", ("stages its rows", "pulls rows")),
    "meet_previous_call": ("three ranks", ("the same call passes for another",)),
    "meet_not_all": ("three ranks", ("the same call passes for another",)),
    "backward_does_not_meet": ("shapes", ("while",)),
    "notify_before_pulled": ("shapes", ("stages its rows", "pulls rows")),
    "notify_before_pushed": ("shapes", ("reduces", "pushes rows")),
    "leave_before_last_band": ("shapes", ("reduces", "pushes rows")),
    "settle_when_met": ("shapes", WAITS_FOR_EVER),
    "never_settle": ("shapes", ("reduces", "pushes rows")),
    "one_hash": ("shapes", ("the same call passes for another",)),
    "hash_after_entry": ("shapes", ("the same call passes for another",)),
    "hash_not_compared": ("other calls", ("another call passes for the same",)),
    "enter_by_class": ("calls of other classes", WAITS_FOR_EVER),
    "cancel_own_rank": ("failure", WAITS_FOR_EVER),
    "cancel_ignored_in_meet": ("failure", WAITS_FOR_EVER),
    "cancel_ignored_in_barrier": ("failure", WAITS_FOR_EVER),
    "cancel_ignored_in_tasks": ("failure", WAITS_FOR_EVER),
    "cancel_ignored_at_entry": ("two failures", ("the same call passes for another",)),
    "cancel_forgotten": ("failure", WAITS_FOR_EVER),
    "cancel_by_class": ("classes", WAITS_FOR_EVER),
    "no_abort": ("failure", WAITS_FOR_EVER),
    "host_not_told": ("failure", ("the host of rank", "has not learnt")),
    "busy_ignored": ("at once", TWO_CALLS),
    "busy_not_atomic": ("at once", TWO_CALLS),
    "busy_seen_by_one_block": ("at once", TWO_CALLS),
}


def test_all_flaws_have_a_case():
    assert ask("flaws") == ["none", *CAUGHT]


@pytest.mark.parametrize("flaw", CAUGHT)
def test_every_flaw_is_caught(flaw):
    """Each way to be wrong shows up, and as what it is."""
    name, words = CAUGHT[flaw]
    found = explore(SEQUENCES[name], flaw)
    assert found["error"] and all(word in found["error"] for word in words), found


SHAPES = [*itertools.product((1, 7, 1000, 4096), (1, 3, 8), (8, 136, 7168)), (2**20, 8, 7168)]


@pytest.mark.parametrize("ranks", (2, 72))
def test_shared_arena(ranks):
    """An arena depends on its class alone, has room for all its shapes, and is at most a quarter too large."""
    layouts = {}
    for tokens, top_k, hidden in SHAPES:
        words = (ranks, tokens, top_k, 1, 1, 1, hidden, 2)
        ids, rows, first_ids, second_ids, rows_begin, size = ask("shared_arena", *words)
        needed_ids, needed_rows = ranks * tokens * top_k, ask("arena", *words)[-2]  # without the ids that it ends with
        for room, needed in ((ids, needed_ids), (rows, needed_rows)):
            odd = room // (room & -room)
            assert odd in (1, 3, 5, 7) and needed <= room <= needed * 5 / 4
        assert first_ids == 0 and second_ids >= 4 * ids and rows_begin >= second_ids + 4 * ids
        assert size >= rows_begin + rows and all(at % 1024 == 0 for at in (second_ids, rows_begin, size))
        assert layouts.setdefault((ids, rows), (second_ids, rows_begin, size)) == (second_ids, rows_begin, size)
    assert ask("shared_arena", 2, *WIDE[:2], 1, 1, 1, WIDE[2], 2) == ask(
        "shared_arena", 2, *TALL[:2], 1, 1, 1, TALL[2], 2
    )
