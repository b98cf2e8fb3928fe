"""Every output and gradient of every implementation against the float64 oracle, over the inputs of `cases`.

The megakernel gets the whole table. The two implementations made of XLA operations compile slowly and share most of
their code between shapes, so a handful of cases covers them.
"""

import itertools

import numpy as np
import pytest

from mok_jax.activation import ACTIVATIONS
from mok_jax.config import SAVE_POLICIES, MoKConfig
from support.cases import CASES, by_name, make
from support.compare import assert_close, assert_dtypes
from support.oracle import forward_backward, stats
from support.runner import run, run_stats

TOLERANCE = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 1e-2}
IMPLEMENTATIONS = ("megakernel", "xla", "reference")

UNFUSED = (
    ("uniform", "bfloat16", 4),
    ("zipf", "float32", 2),
    ("one_expert", "float32", 2),
    ("one_rank", "float32", 8),
    ("some_absent", "float32", 2),
    ("all_absent", "bfloat16", 2),
    ("duplicates", "float32", 4),
    ("empty_experts", "bfloat16", 1),
    ("bad_ids", "float32", 2),
    ("zero_weights", "float32", 1),
    ("five_tokens", "float32", 4),
    ("rack", "float32", 72),
)
MEGAKERNEL = (
    *((case.name, "float32", ep) for case in CASES for ep in (1, 2, 4, 8)),
    *((case.name, "bfloat16", 2) for case in CASES),
    ("rack", "float32", 72),
    ("rack", "bfloat16", 72),
)
ALL = (
    *(("megakernel", *row) for row in MEGAKERNEL),
    *((name, *row) for name in ("xla", "reference") for row in UNFUSED),
)


def check(inputs, ep, tolerance, *, activation="swiglu", activation_limit=None, **options):
    """Runs the layer, and compares each output and its dtype with what it has to be."""
    actual = run(inputs, ep, activation=activation, activation_limit=activation_limit, **options)
    # The megakernel's rule, the same for what it saves and what it recomputes. Clamped cases of others are float32.
    pre_activation_dtype = inputs.x.dtype if options["implementation"] == "megakernel" else np.float64
    expected = forward_backward(*inputs.for_oracle(), activation, activation_limit, pre_activation_dtype)
    assert_close(actual, expected, tolerance)
    assert_dtypes(actual, inputs)


@pytest.mark.parametrize(("implementation", "case", "dtype", "ep"), ALL)
def test_case(implementation, case, dtype, ep):
    check(make(by_name(case), dtype), ep, TOLERANCE[dtype], implementation=implementation)


@pytest.mark.parametrize("ep", (1, 2))
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_reference_in_float64(activation, ep):
    """Nothing in the definition is narrower than its inputs."""
    inputs = make(by_name("uniform"), "float64")
    check(inputs, ep, TOLERANCE["float64"], implementation="reference", activation=activation)


@pytest.mark.parametrize("ep", (1, 4))
@pytest.mark.parametrize("save", SAVE_POLICIES)
@pytest.mark.parametrize(("case", "ring_rows"), (("wide", 128), ("wide", 256), ("duplicates", 128), ("bad_ids", 128)))
def test_small_ring(case, ring_rows, save, ep):
    """Several macrobatches, so that experts straddle them and the backward replays most of the forward."""
    config = MoKConfig(ring_rows=ring_rows, minibatch_rows=128, save=save)
    check(make(by_name(case), "float32"), ep, TOLERANCE["float32"], implementation="megakernel", config=config)


@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
@pytest.mark.parametrize("save", SAVE_POLICIES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_small_ring_with_activation_limit(activation, save, dtype):
    """The clamp's gradient is right where pre-activations are recomputed, and rounded like saved ones."""
    config = MoKConfig(ring_rows=128, minibatch_rows=128, save=save)
    inputs = make(by_name("zipf"), dtype)
    options = {"config": config, "activation": activation, "activation_limit": 0.75}
    check(inputs, 2, TOLERANCE[dtype], implementation="megakernel", **options)


GPT_OSS = (
    *(("megakernel", dtype, limit, ep) for dtype in ("float32", "bfloat16") for limit in (None, 0.75) for ep in (1, 4)),
    *((name, "float32", 0.75, 2) for name in ("xla", "reference")),
    *((name, "bfloat16", None, 1) for name in ("xla", "reference")),
)


@pytest.mark.parametrize(("implementation", "dtype", "limit", "ep"), GPT_OSS)
def test_gpt_oss(implementation, dtype, limit, ep):
    """Its one is added to up after the clamp, and also for empty slots and padding, which must stay zero."""
    inputs, options = make(by_name("some_absent"), dtype), {"activation": "gpt_oss", "activation_limit": limit}
    check(inputs, ep, TOLERANCE[dtype], implementation=implementation, **options)


@pytest.mark.parametrize(("dtype", "weight_dtype"), (("bfloat16", "float32"), ("float32", "bfloat16")))
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_weights_of_another_dtype_than_tokens(implementation, dtype, weight_dtype):
    """Master weights under bfloat16 tokens, and the reverse; `check` demands a gradient of the weights' dtype."""
    inputs = make(by_name("uniform"), dtype, weight_dtype=weight_dtype)
    check(inputs, 2, TOLERANCE["bfloat16"], implementation=implementation)


AXES, CHECK_VMA, GRAD = ("expert", ("outer", "inner")), (True, False), ("outside", "inside")
WAYS = (
    *(("megakernel", *way) for way in itertools.product(AXES, CHECK_VMA, GRAD)),
    # Every pair of options once: these are slow to compile, and nothing in them depends on three options at a time.
    *((name, AXES[i], CHECK_VMA[j], GRAD[i ^ j]) for name in ("xla", "reference") for i in (0, 1) for j in (0, 1)),
)


@pytest.mark.parametrize(("implementation", "axis", "check_vma", "grad"), WAYS)
def test_ways_to_differentiate(implementation, axis, check_vma, grad):
    """In and outside `shard_map`, with and without its types, over one axis and two: the same gradients."""
    inputs = make(by_name("five_tokens"), "float32")
    options = {"axis": axis, "check_vma": check_vma, "grad": grad}
    check(inputs, 4, TOLERANCE["float32"], implementation=implementation, **options)


@pytest.mark.parametrize("grad", GRAD)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_replicated_weights(implementation, grad):
    """Weights shared by two groups of ranks with their own tokens: the gradient is the sum over both groups."""
    inputs = make(by_name("five_tokens"), "float32")
    check(inputs, 2, TOLERANCE["float32"], implementation=implementation, replicas=2, grad=grad)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_slots_without_expert_are_not_looked_at(implementation):
    """Whatever stands in a token or a router weight that has no expert, its outputs and gradients are exactly zero."""
    inputs = make(by_name("some_absent"), "float32")
    absent = inputs.expert_ids < 0
    lonely = absent.all(axis=1)
    inputs.expert_weights[absent] = np.nan
    inputs.x[lonely], inputs.dy[lonely] = np.inf, np.nan
    actual = run(inputs, 2, implementation=implementation)
    assert not actual.y[lonely].any()
    assert not actual.dx[lonely].any()
    assert not actual.d_expert_weights[absent].any()
    assert all(np.isfinite(output).all() for output in actual)


@pytest.mark.parametrize("ep", (1, 4))
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_stats(implementation, ep):
    inputs = make(by_name("bad_ids"), "float32")
    actual = run_stats(inputs, ep, implementation=implementation)
    for got, expected in zip(actual, stats(inputs.expert_ids, by_name("bad_ids").E, ep), strict=True):
        np.testing.assert_array_equal(got, expected)
        assert got.dtype == np.int32
