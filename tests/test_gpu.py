"""The megakernel on a GPU against the float64 oracle: every output and gradient, with virtual ranks and, as users call
it, through ``mok_jax.moe``. Bitwise invariance on the GPU is in `test_invariance`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mok_jax
from mok_jax.config import SAVE_POLICIES, MoKConfig
from support import virtual_ranks
from support.cases import CASES, Case, by_name, make, one_expert, uniform, zipf
from support.compare import assert_close, assert_dtypes, assert_harm_stays, differences, relative_l2
from support.oracle import Outputs, forward_backward, stats

pytestmark = pytest.mark.gpu

TOLERANCE = 1e-2
# Widths that no tile divides, and published ones that are no multiples of 128: gpt-oss (wide enough for groups of
# columns), and a small DeepSeek. A slot of many pieces, and more slots a token than the reduce looks up at a time. Zero
# gradients of empty experts right behind the few tiles of a busy one, which lend out the same memory.
WIDTHS = (
    Case("2880", 300, 4, 8, 2880, 2880, uniform),
    Case("1408", 520, 3, 8, 2048, 1408, zipf),
    Case("narrow", 257, 2, 8, 8, 16, zipf),
    Case("many pieces", 37, 3, 4, 12304, 24, uniform),
    Case("56 experts a token", 41, 56, 64, 136, 72, uniform),
    Case("one busy expert, one chunk", 300, 1, 32, 256, 64, one_expert),
    Case("one busy expert", 300, 1, 32, 256, 256, one_expert),
)


def check(inputs, ep, config=None, activation_limit=None):
    """Runs the step, and compares each output with what it has to be."""
    actual = virtual_ranks.run(inputs, ep, config, activation_limit)
    compare(actual, inputs, activation_limit)


def compare(actual, inputs, activation_limit=None):
    expected = forward_backward(*inputs.for_oracle(), "swiglu", activation_limit, inputs.x.dtype)
    assert_close(actual, expected, TOLERANCE)
    assert_dtypes(actual, inputs)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("ep", (1, 2, 8))
def test_case(case, ep):
    check(make(case, "bfloat16"), ep)


@pytest.mark.parametrize("case", WIDTHS, ids=str)
@pytest.mark.parametrize("ep", (1, 4))
def test_widths(case, ep):
    check(make(case, "bfloat16"), ep, MoKConfig(ring_rows=512))


@pytest.mark.parametrize("save", SAVE_POLICIES)
@pytest.mark.parametrize("comm_sms", (0, 2))
@pytest.mark.parametrize("ring_rows", (128, 512, None))
def test_ring_and_save(ring_rows, comm_sms, save):
    """From many macrobatches, straddled by experts, to one; both ways to communicate."""
    config = MoKConfig(ring_rows=ring_rows, minibatch_rows=128, comm_sms=comm_sms, save=save)
    check(make(by_name("wide"), "bfloat16"), 2, config)


@pytest.mark.parametrize("ring_rows", (128, None))
def test_activation_limit(ring_rows):
    check(make(by_name("zipf"), "bfloat16"), 2, MoKConfig(ring_rows=ring_rows), activation_limit=0.75)


@pytest.mark.parametrize("ring_rows", (128, None))
def test_master_weights(ring_rows):
    """float32 weights: the gradient leaves as the float32 accumulator."""
    check(make(by_name("wide"), "bfloat16", weight_dtype="float32"), 2, MoKConfig(ring_rows=ring_rows))


@pytest.mark.parametrize("poisoned", ("x", "expert_weights", "dy"))
@pytest.mark.parametrize("value", (np.inf, np.nan))
def test_non_finite_values_stay_where_they_are(value, poisoned):
    inputs, token = make(by_name("zipf"), "bfloat16"), 7
    getattr(inputs, poisoned)[token, 0] = value
    assert_harm_stays(virtual_ranks.run(inputs, 2), inputs, token, TOLERANCE)
    # The same step without the value, in memory that now holds what it left: nothing is inherited.
    check(make(by_name("zipf"), "bfloat16"), 2)


@pytest.mark.parametrize("ep", (1, 4))
def test_stats(ep):
    inputs = make(by_name("bad_ids"), "bfloat16")
    _, actual = virtual_ranks.run_with_stats(inputs, ep)
    for got, expected in zip(actual, stats(inputs.expert_ids, by_name("bad_ids").E, ep), strict=True):
        np.testing.assert_array_equal(got, expected)


def step(inputs, **options):
    """As a user writes it: ``y`` and the gradients, jitted, on the default device."""

    def loss(x, expert_ids, expert_weights, wi_0, wi_1, wo, dy):
        y = mok_jax.moe(x, expert_ids, expert_weights, wi_0, wi_1, wo, **options)
        return jnp.sum(y.astype(jnp.float32) * dy.astype(jnp.float32)), y

    gradients, y = jax.jit(jax.grad(loss, argnums=(0, 2, 3, 4, 5), has_aux=True))(*inputs)
    return Outputs(*jax.device_get((y, *gradients)))


def test_moe_chooses_the_megakernel():
    inputs = make(by_name("wide"), "bfloat16")
    compare(step(inputs), inputs)
    chosen, named = step(inputs), step(inputs, implementation="megakernel")
    assert not any(differences(chosen, named).values())


def test_scan_and_command_buffers():
    """A layer applied in a loop, often enough to be captured in a graph, is the same as its applications one by one."""
    inputs = make(Case("square", 256, 2, 8, 128, 256, uniform), "bfloat16")
    arguments = [jax.device_put(a) for a in inputs[1:6]]

    def layer(x):
        return (x + mok_jax.moe(x, *arguments)).astype(x.dtype)

    once = jax.jit(layer)
    x = expected = jax.device_put(inputs.x)
    for _ in range(6):
        expected = once(expected)
    unrolled = jax.jit(lambda x: layer(layer(layer(layer(layer(layer(x)))))))
    scanned = jax.jit(lambda x: jax.lax.scan(lambda x, _: (layer(x), None), x, length=6)[0])
    for several in (unrolled, scanned):
        for _ in range(3):
            np.testing.assert_array_equal(np.asarray(several(x)), np.asarray(expected))


def test_more_than_two_to_the_31_elements():
    """Slots of more than 2^31 elements in one arena: 64-bit offsets, checked on the last tokens."""
    tokens, hidden, k = 40960, 7168, 8
    keys = iter(jax.random.split(jax.random.key(0), 5))
    x = jax.random.normal(next(keys), (tokens, hidden), jnp.bfloat16)
    wi_0, wi_1 = (jax.random.normal(next(keys), (8, hidden, 64), jnp.bfloat16) * hidden**-0.5 for _ in range(2))
    wo = jax.random.normal(next(keys), (8, 64, hidden), jnp.bfloat16) / 8
    ids = jnp.tile(jnp.arange(8, dtype=jnp.int32), (tokens, 1))
    weights = jax.random.uniform(next(keys), (tokens, k))
    assert tokens * hidden * k > 2**31
    y = jax.jit(mok_jax.moe)(x, ids, weights, wi_0, wi_1, wo)
    last = slice(tokens - 4, tokens)
    some = [np.asarray(a[last]).astype(np.float64) for a in (x, weights)]
    wide = [np.asarray(w).astype(np.float64) for w in (wi_0, wi_1, wo)]
    expected = forward_backward(some[0], np.asarray(ids[last]), some[1], *wide, some[0]).y
    assert relative_l2(np.asarray(y[last]).astype(np.float64), expected) <= TOLERANCE


def test_float32_tokens_are_refused_by_name_of_the_cast():
    inputs = make(by_name("uniform"), "float32")
    with pytest.raises(TypeError, match=r"x\.astype\(jnp\.bfloat16\)"):
        step(inputs, implementation="megakernel")


def test_no_failure_was_reported():
    mok_jax.check()
