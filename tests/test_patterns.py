"""Input patterns that broke other systems, each with its right behaviour.

`PATTERNS` change the data of one shape, so that each implementation compiles once; every implementation runs them and
is compared with the oracle. What needs other shapes, several calls or dirty memory follows. Padding tokens in the
losses, and one expert per token under a normalising router, concern the layer around the call: see the end.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mok_jax
from mok_jax import routing
from mok_jax.config import SAVE_POLICIES, MoKConfig
from support.cases import Case, by_name, make, uniform
from support.compare import assert_close, assert_harm_stays, differences, relative_l2
from support.oracle import Outputs, forward_backward
from support.processes import run_python
from support.runner import run

IMPLEMENTATIONS = ("megakernel", "xla", "reference")
TOLERANCE = 1e-5
EP = 2
CASE = Case("patterns", 66, 3, 8, 72, 136, uniform)
HALF = CASE.tokens // EP  # tokens of one rank
TOKEN = 7


def fresh(case=CASE, dtype="float32", seed=0):
    """Inputs whose arrays a test may change."""
    return make(case, dtype, seed)


def oracle(inputs, **options):
    return forward_backward(*inputs.for_oracle(), **options)


# Patterns within one shape: each changes the inputs in place and returns a check of the outputs beyond the oracle's.


def expert_without_tokens(inputs):
    inputs.expert_ids[inputs.expert_ids == 3] = 4
    return lambda out: not (out.d_wi_0[3].any() or out.d_wi_1[3].any() or out.d_wo[3].any())


def rank_without_rows(inputs):
    inputs.expert_ids[:] = np.random.default_rng(0).integers(CASE.E // EP, CASE.E, inputs.expert_ids.shape)
    return lambda out: not any(d[: CASE.E // EP].any() for d in out[3:])


def rank_without_tokens(inputs):
    inputs.expert_ids[:HALF] = -1
    return lambda out: not any(a[:HALF].any() for a in out[:3])


def no_tokens_at_all(inputs):
    inputs.expert_ids[:] = -1
    return lambda out: not any(a.any() for a in out)


def one_expert(inputs):
    inputs.expert_ids[:] = 5
    return lambda out: not np.delete(out.d_wo, 5, axis=0).any()


def one_rank(inputs):
    inputs.expert_ids[:] = np.random.default_rng(0).integers(0, CASE.E // EP, inputs.expert_ids.shape)
    return lambda out: not any(d[CASE.E // EP :].any() for d in out[3:])


def absent_slots(inputs):
    inputs.expert_ids[::2, 1] = -1
    inputs.expert_weights[::2, 1] = np.nan  # nobody may look at it
    return lambda out: not out.d_expert_weights[::2, 1].any()


def duplicate_ids(inputs):
    inputs.expert_ids[:, 1] = inputs.expert_ids[:, 0]
    inputs.expert_ids[TOKEN] = 2
    # Equal experts give equal rows, so that their router gradients are equal, each on its own.
    return lambda out: (out.d_expert_weights[:, 0] == out.d_expert_weights[:, 1]).all()


def ids_out_of_range(inputs):
    for token, id_ in zip(range(3, 60, 10), (-2, CASE.E, 2**31 - 1, -(2**31), CASE.E + 1, -1000), strict=True):
        inputs.expert_ids[token, token % CASE.K] = id_
    bad = np.isin(np.arange(CASE.tokens), range(3, 60, 10))
    return lambda out: all((np.isnan(a).all(axis=1) == bad).all() and np.isfinite(a[~bad]).all() for a in out[:3])


def zero_router_weights(inputs):
    inputs.expert_weights[:, 0] = 0
    inputs.expert_weights[TOKEN] = 0
    return lambda out: not out.y[TOKEN].any() and not out.dx[TOKEN].any() and (out.d_expert_weights != 0).all()


def negative_router_weights(inputs):
    inputs.expert_weights[::3] *= -1
    return lambda out: True


def huge_router_weights(inputs):
    inputs.expert_weights[TOKEN] = 1e30
    return lambda out: np.isfinite(out.y).all() and np.isfinite(out.dx).all()


PATTERNS = (
    expert_without_tokens,
    rank_without_rows,
    rank_without_tokens,
    no_tokens_at_all,
    one_expert,
    one_rank,
    absent_slots,
    duplicate_ids,
    ids_out_of_range,
    zero_router_weights,
    negative_router_weights,
    huge_router_weights,
)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda p: p.__name__)
def test_pattern(pattern, implementation):
    inputs = fresh()
    check = pattern(inputs)
    actual = run(inputs, EP, implementation=implementation)
    assert_close(actual, oracle(inputs), TOLERANCE)
    assert check(actual)


@pytest.mark.parametrize("save", SAVE_POLICIES)
@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda p: p.__name__)
def test_pattern_in_the_smallest_ring(pattern, save):
    inputs = fresh()
    check = pattern(inputs)
    actual = run(inputs, EP, implementation="megakernel", config=MoKConfig(ring_rows=128, save=save))
    assert_close(actual, oracle(inputs), TOLERANCE)
    assert check(actual)


# Values that are not finite


@pytest.mark.parametrize("poisoned", ("x", "expert_weights", "dy"))
@pytest.mark.parametrize("value", (np.nan, np.inf, -np.inf))
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_non_finite_token(implementation, value, poisoned):
    inputs = fresh()
    getattr(inputs, poisoned)[TOKEN, 0] = value
    assert_harm_stays(run(inputs, EP, implementation=implementation), inputs, TOKEN, TOLERANCE)


# XLA's grouped product on a CPU multiplies every row with every expert's matrix, so that it cannot keep this promise.
@pytest.mark.parametrize("implementation", ("megakernel", "reference"))
@pytest.mark.parametrize("name", ("wi_0", "wi_1", "wo"))
def test_non_finite_expert(name, implementation):
    """An infinite weight reaches the tokens of its expert, and nothing else."""
    inputs = fresh()
    expected = oracle(inputs)
    getattr(inputs, name)[3] = np.inf
    actual = run(inputs, EP, implementation=implementation)
    others, experts = (inputs.expert_ids != 3).all(axis=1), np.arange(CASE.E) != 3
    for i in (0, 1):
        assert relative_l2(actual[i][others], expected[i][others]) <= TOLERANCE
        assert not np.isfinite(actual[i][~others]).all()
    slots = inputs.expert_ids != 3
    assert relative_l2(actual.d_expert_weights[slots], expected.d_expert_weights[slots]) <= TOLERANCE
    for i in (3, 4, 5):
        assert relative_l2(actual[i][experts], expected[i][experts]) <= TOLERANCE


# Shapes


@pytest.mark.parametrize("ep", (1, 2, 4))
@pytest.mark.parametrize("tokens", (1, 2, 5, 65, 672))
def test_token_counts(tokens, ep):
    """One token, counts that ranks cannot share evenly, counts around a row block. (The runner pads with id -1.)"""
    inputs = make(Case(f"{tokens} tokens", tokens, 2, 8, 24, 40, uniform), "float32")
    assert_close(run(inputs, ep, implementation="megakernel"), oracle(inputs), TOLERANCE)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_one_token_in_all(implementation):
    inputs = make(by_name("one_token"), "float32")
    assert_close(run(inputs, 1, implementation=implementation), oracle(inputs), TOLERANCE)


@pytest.mark.parametrize(
    ("hidden", "intermediate"), ((8, 8), (120, 128), (128, 120), (136, 264), (264, 136), (256, 256))
)
@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
def test_widths_around_a_tile(hidden, intermediate, dtype):
    inputs = make(Case("widths", 40, 2, 4, hidden, intermediate, uniform), dtype)
    actual = run(inputs, EP, implementation="megakernel", config=MoKConfig(ring_rows=128))
    assert_close(actual, oracle(inputs), {"float32": TOLERANCE, "bfloat16": 1e-2}[dtype])


@pytest.mark.parametrize("ep", (1, 4))
def test_more_than_256_experts_are_all_reached(ep):
    def each_once(rng, case):
        return rng.permutation(case.E).reshape(case.tokens, case.K).astype(np.int32)

    inputs = make(Case("many experts", 66, 8, 528, 16, 24, each_once), "float32")
    actual = run(inputs, ep, implementation="megakernel")
    assert_close(actual, oracle(inputs), TOLERANCE)
    assert all(d.reshape(528, -1).any(axis=1).all() for d in actual[3:])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_activation_limit_is_not_ignored(implementation):
    inputs = fresh()
    actual = run(inputs, EP, implementation=implementation, activation_limit=0.5)
    assert_close(actual, oracle(inputs, activation_limit=0.5), TOLERANCE)
    assert relative_l2(actual.y, oracle(inputs).y) > 0.1


def test_sizes_beyond_31_bits_are_traced():
    """`T*K*H` of 2^36: shapes of results and scratch are right; nothing is allocated. `test_core` tests the offsets."""
    like = jax.ShapeDtypeStruct
    tokens, hidden, intermediate, experts = 2**20, 8192, 2048, 8
    weights = (
        like(shape, jnp.bfloat16)
        for shape in ((experts, hidden, intermediate),) * 2 + ((experts, intermediate, hidden),)
    )

    def total(*operands):
        return mok_jax.moe(*operands, implementation="megakernel").sum(dtype=jnp.float32)

    tokens_and_routing = (
        like((tokens, hidden), jnp.bfloat16),
        like((tokens, 8), jnp.int32),
        like((tokens, 8), jnp.float32),
    )
    dx, d_weights = jax.eval_shape(jax.grad(total, argnums=(0, 2)), *tokens_and_routing, *weights)
    assert (dx.shape, d_weights.shape) == ((tokens, hidden), (tokens, 8))


# Memory


POISONED = (MoKConfig(), *(MoKConfig(ring_rows=rows, save=save) for rows in (128, 256) for save in SAVE_POLICIES))


@pytest.mark.parametrize("config", POISONED, ids=lambda c: f"{c.ring_rows}-{c.save}")
@pytest.mark.parametrize("routing_of", ("zipf", "empty_experts", "some_absent", "bad_ids"))
def test_dirty_memory(routing_of, config):
    """A step over NaN leaves them in every buffer that the next one gets; that one's bits do not change."""
    inputs = fresh(by_name(routing_of))
    nan = inputs._replace(**{n: np.full_like(getattr(inputs, n), np.nan) for n in inputs._fields if n != "expert_ids"})
    step = functools.partial(run, ep=EP, implementation="megakernel", config=config)
    first = step(inputs)
    for _ in range(2):
        assert np.isnan(step(nan).d_wo).any()
        assert not any(differences(step(inputs), first).values())
    assert_close(first, oracle(inputs), TOLERANCE)


def test_dirty_memory_and_a_fresh_process(tmp_path):
    """The same bits as where nothing has run before."""
    inputs = fresh(by_name("zipf"))
    run(inputs._replace(x=np.full_like(inputs.x, np.nan)), EP, implementation="megakernel")
    here = run(inputs, EP, implementation="megakernel")
    run_python(f"""
from support.cases import by_name, make
from support.runner import run
np.savez({str(tmp_path / "results.npz")!r}, *run(make(by_name("zipf"), "float32"), {EP}, implementation="megakernel"))
""")
    there = Outputs(*np.load(tmp_path / "results.npz").values())
    assert not any(differences(there, here).values())


def test_two_layers_share_what_there_is():
    """Layers of different shapes, one after the other in one program, again and again: each as if it were alone."""
    first, second = (make(Case("layer", 16, 2, 8, 24, width, uniform), "float32", seed=width) for width in (40, 136))
    moe = functools.partial(mok_jax.moe, implementation="megakernel")

    def both(x):
        x = moe(x, *first[1:6])
        return moe(x, *second[1:6])

    alone = jax.jit(moe)(jax.jit(moe)(first.x, *first[1:6]), *second[1:6])
    together = jax.jit(both)
    for _ in range(5):
        np.testing.assert_array_equal(together(first.x), alone)


# Around the call


def test_one_normalised_expert_gives_the_router_no_gradient():
    """K = 1 and weights that sum to 1: the weight is 1 whatever the logits are. (Documented; no error of the call.)"""
    inputs = make(Case("one of many", 16, 1, 8, 24, 40, uniform), "float32")
    logits = np.random.default_rng(0).standard_normal((16, 8)).astype(np.float32)

    def loss(logits, normalised):
        routed = routing.top_k_routing(logits, 1, "softmax", normalised, 1.0, None)
        y = mok_jax.moe(inputs.x, routed.expert_ids, routed.expert_weights, *inputs[3:6], implementation="megakernel")
        return jnp.sum(y * inputs.dy)

    gradient = jax.jit(jax.grad(loss), static_argnums=1)
    assert np.abs(gradient(logits, True)).max() < 1e-5
    assert np.abs(gradient(logits, False)).max() > 1e-2
