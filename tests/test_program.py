"""The task program, proven by running all ranks together: no deadlock, no conflict that the waits leave without order.

`csrc/verify` says what is checked; here are the cases, of which `support.task_programs` draws shapes and routings.
"""

import collections
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.task_programs import RACK_SIZE, SAVES, SKEWS, directions, programs, routing
from support.verifier import ask

machines = st.tuples(st.booleans(), st.integers(1, 4), st.integers(1, 4), st.integers(0, 2**31 - 1)).map(
    lambda machine: [int(word) for word in machine]
)


def check(direction, program, machine):
    """Fails if anything is wrong with the program; returns how many macrobatches and tasks it has."""
    shape, ids = program
    answer = ask("enumerate", direction, shape, machine, ids)
    if answer["error"]:
        pytest.fail(answer["error"])
    return answer


def check_many(direction, cases, drawn):
    """So many cases, of which some must reach beyond one macrobatch: a program of one says little."""
    seen = collections.Counter()

    @settings(max_examples=cases, deadline=None, database=None)
    @given(drawn, machines)
    def check_each(program, machine):
        answer = check(direction, program, machine)
        seen.update(cases=1, tasks=answer["tasks"], several_macrobatches=answer["macrobatches"] > 1)

    check_each()
    print(dict(seen))
    assert seen["several_macrobatches"] > seen["cases"] / 50


@directions
def test_few_ranks(direction):
    check_many(direction, 3000, programs(st.integers(1, 8), 100))


@directions
def test_more_blocks_than_are_pulled_first(direction):
    many_blocks = {"experts": (14, 24), "ring_blocks": (8, 48), "minibatch_blocks": (8, 32)}
    check_many(direction, 300, programs(st.integers(1, 3), 100, **many_blocks))


@directions
def test_many_ranks(direction):
    check_many(direction, 250, programs(st.integers(9, RACK_SIZE), 6))


@directions
@pytest.mark.parametrize("skew", SKEWS)
@pytest.mark.parametrize("shared", (0, 1), ids=("dedicated", "shared"))
def test_rack(direction, skew, shared):
    for save, ring_blocks in itertools.product(SAVES, (1, 2)):
        shape = [save, RACK_SIZE, 4, 3, 2, ring_blocks, 1, [2, 2, 1, 2, 3, 4]]
        check(direction, (shape, routing(skew, 1, RACK_SIZE * 12, RACK_SIZE * 2)), [shared, 1, 1, 5])


def mutation_cases():
    """Shapes, and ids of all ranks. At most 4 tokens, so that one reduce task reads every slot of its rank."""
    rng = np.random.default_rng(0)

    def shuffled(*slots_per_expert):
        return rng.permutation(np.repeat(np.arange(len(slots_per_expert)), slots_per_expert)).tolist()

    # Five blocks of an expert, then more than a ring of four: the second one goes over a cut in the macrobatch in which
    # the first one ends.
    yield [2, 4, 224, 2, 4, 2, [1, 1, 1, 1, 2, 4]], shuffled(600, 900, 150, 142)
    # Experts of two blocks in a ring of three: every second macrobatch ends within an expert, the others between two.
    yield [2, 4, 300, 6, 3, 2, [1, 1, 1, 1, 2, 4]], shuffled(*[200] * 12)
    # A continued expert whose blocks take the places of another's.
    yield [2, 4, 128, 2, 4, 1, [1, 1, 2, 1, 2, 4]], shuffled(200, 500, 200, 124)
    # A macrobatch a block, and one expert that goes through three of them.
    yield [2, 4, 64, 2, 1, 1, [2, 2, 2, 2, 2, 4]], shuffled(300, 0, 112, 100)
    # Everything fits.
    yield [3, 4, 30, 2, 8, 2, [2, 3, 2, 3, 2, 4]], shuffled(60, 60, 60, 60, 60, 60)
    # All groups of columns, over two macrobatches.
    yield [2, 4, 96, 2, 3, 1, [1, 9, 1, 9, 1, 4]], shuffled(300, 168, 200, 100)
    # More ranks.
    yield [8, 4, 8, 1, 2, 1, [2, 1, 1, 2, 1, 4]], shuffled(*[32] * 8)


@directions
def test_every_mutation_is_caught(direction):
    """Whatever is removed or weakened shows up, except a wait that others imply in that instance; none does always."""
    rules = collections.defaultdict(collections.Counter)
    for (shape, ids), save in itertools.product(mutation_cases(), SAVES):
        check(direction, ([save, *shape], ids), [0, 1, 1, 0])
        for rule, tally in ask("mutate", direction, save, shape, ids).items():
            rules[rule].update(tally)
    for rule, tally in sorted(rules.items()):
        print(f"{rule}: {dict(tally)}")
    assert len(rules) > 10
    for rule, tally in rules.items():
        assert tally["missed"] == 0, (rule, tally)
        assert tally["caught"] > 0, f"superfluous: {rule}"
        if tally["unread"]:  # of the last piece of an expert: nobody waits for it
            assert rule == "drop: weight_grad signals piece_weight_grad"
