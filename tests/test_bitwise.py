"""The megakernel's promise: the same inputs give the same bits, however the work is cut, spread and timed.

The only comparison is equality of bytes, NaN and the sign of zero included. Whether the values are right is the subject
of `test_outputs`.
"""

import functools

import numpy as np
import pytest
from cases import by_name, make
from runner import run

from mok_jax.config import SAVE_POLICIES, MoKConfig

# (case, dtype): several row blocks of several experts, in both dtypes; repeated ids; absent and bad ids, odd counts.
SHAPES = (
    ("wide", "bfloat16"),
    ("wide", "float32"),
    ("duplicates", "float32"),
    ("bad_ids", "bfloat16"),
)
BASE_CONFIG = MoKConfig(host_comm_workers=1, host_compute_workers=1)

every_shape = pytest.mark.parametrize(("case", "dtype"), SHAPES)


@functools.cache
def inputs_of(case, dtype):
    return make(by_name(case), dtype, seed=1)


@functools.cache
def base_run(case, dtype):
    """One rank, the ring that holds everything, one worker of each kind: what all other runs have to equal."""
    return run(inputs_of(case, dtype), 1, implementation="megakernel", config=BASE_CONFIG)


def check(case, dtype, ep, **config):
    actual = run(inputs_of(case, dtype), ep, implementation="megakernel", config=MoKConfig(**config))
    assert_same_bits(actual, base_run(case, dtype))


def assert_same_bits(actual, expected):
    """Both are ``Outputs``; the message says where they differ and how often."""
    different = {name: _count_different(getattr(actual, name), getattr(expected, name)) for name in actual._fields}
    assert not any(different.values()), f"elements that differ: {different}"


def _count_different(actual, expected):
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    as_bits = np.dtype(f"u{actual.dtype.itemsize}")
    return int((actual.view(as_bits) != expected.view(as_bits)).sum())


@every_shape
@pytest.mark.parametrize("ep", (2, 4, 8))
def test_number_of_ranks(case, dtype, ep):
    check(case, dtype, ep)


@every_shape
@pytest.mark.parametrize("ep", (1, 4))
@pytest.mark.parametrize(("ring_rows", "minibatch_rows"), ((128, 128), (256, 128), (512, 256), (4096, 1024)))
def test_ring_and_minibatch(case, dtype, ep, ring_rows, minibatch_rows):
    check(case, dtype, ep, ring_rows=ring_rows, minibatch_rows=minibatch_rows)


@every_shape
@pytest.mark.parametrize("ring_rows", (None, 256))
@pytest.mark.parametrize("save", SAVE_POLICIES)
def test_save_policy(case, dtype, save, ring_rows):
    check(case, dtype, 2, save=save, ring_rows=ring_rows)


@every_shape
@pytest.mark.parametrize(("comm", "compute"), ((1, 1), (1, 3), (3, 1), (2, 4)))
def test_number_of_workers(case, dtype, comm, compute):
    workers = dict(host_comm_workers=comm, host_compute_workers=compute)
    check(case, dtype, 2, ring_rows=256, minibatch_rows=128, **workers)


@every_shape
@pytest.mark.parametrize("seed", (1, 2, 3))
def test_timing(case, dtype, seed):
    """Random sleeps before tasks, with more workers than cores, so that everything that can overtake does."""
    workers = dict(host_comm_workers=2, host_compute_workers=3, host_delay_seed=seed)
    check(case, dtype, 4, ring_rows=256, minibatch_rows=128, **workers)


@every_shape
def test_repetition(case, dtype):
    """The second call finds memory as the first has left it."""
    for _ in range(3):
        check(case, dtype, 2, ring_rows=256)


@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
@pytest.mark.parametrize("ep", (1, 4))
def test_token_is_independent_of_the_batch(ep, dtype):
    """`y` and `dx` of a third of the tokens, while all others change their data, their experts, or their existence."""
    inputs, other = inputs_of("zipf", dtype), make(by_name("zipf"), dtype, seed=2)
    kept = np.arange(len(inputs.x)) % 3 == 0

    def replace_others(values, replacement):
        return np.where(kept[:, None], values, replacement)

    changed = inputs._replace(
        **{name: replace_others(getattr(inputs, name), getattr(other, name)) for name in inputs._fields[:3]},
        dy=replace_others(inputs.dy, other.dy),
    )
    alone = inputs._replace(expert_ids=replace_others(inputs.expert_ids, -1))
    expected = base_run("zipf", dtype)
    for variant in (changed, alone):
        actual = run(variant, ep, implementation="megakernel")
        for name in ("y", "dx"):
            assert _count_different(getattr(actual, name)[kept], getattr(expected, name)[kept]) == 0, name
