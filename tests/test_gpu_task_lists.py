"""The algorithm of `csrc/moe` as a device runs it: row tables, macrobatches and every task, equal to the host's.

The cases are those by which `test_program` proves the host's lists free of deadlock and conflicts.
"""

import collections

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support import cuda_programs
from support.task_programs import RACK_SIZE, SAVES, SKEWS, directions, programs, routing
from support.verifier import flat

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def device():
    with cuda_programs.start(cuda_programs.build("task_lists")) as process:
        yield process
        process.stdin.close()


def check(device, direction, program):
    shape, ids = program
    print(*flat([direction, shape, ids]), file=device.stdin, flush=True)
    answer = device.stdout.readline().strip()
    assert answer.isdigit(), answer
    return int(answer)


def check_many(device, direction, cases, drawn):
    """So many cases, which must have many tasks: a short list says little."""
    seen = collections.Counter()

    @settings(max_examples=cases, deadline=None, database=None, derandomize=True)
    @given(program=drawn)
    def check_each(program):
        seen.update(cases=1, tasks=check(device, direction, program))

    check_each()
    print(dict(seen))
    assert seen["tasks"] > 100 * seen["cases"]


@directions
def test_few_ranks(device, direction):
    check_many(device, direction, 150, programs(st.integers(1, 8), 100))


@directions
def test_many_ranks(device, direction):
    check_many(device, direction, 15, programs(st.integers(9, RACK_SIZE), 6))


@directions
@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("skew", SKEWS)
def test_rack(device, direction, save, skew):
    shape = [save, RACK_SIZE, 4, 3, 2, 1, 1, [2, 2, 1, 2, 3, 2]]
    check(device, direction, (shape, routing(skew, 1, RACK_SIZE * 12, RACK_SIZE * 2)))


@directions
def test_model_shape(device, direction):
    """One rank of 16 experts and 4,096 tokens of a published model, in a ring of a third of its rows."""
    tiles = [16, 28, 8, 28, 1344, 4]
    ids = np.random.default_rng(0).integers(0, 16, 4096 * 8).tolist()
    check(device, direction, ([1, 1, 4096, 8, 16, 90, 17, tiles], ids))
