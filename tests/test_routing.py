"""Routing against NumPy: choice of experts, weights, losses, load, and what padding and NaN may not reach.

Each published model's rule is in ``support/published_layers.py``, token by token, from the model's own code.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mok_jax import routing
from mok_jax.zoo import LAYERS
from support.layers import random_bias
from support.published_layers import MODELS

TOKENS, EXPERTS, K = 33, 12, 3

# Score functions with whether softmax comes last.
KINDS = [*((name, False) for name in routing.SCORE_FUNCTIONS), ("softmax", True)]


def random_logits(seed=0, shape=(TOKENS, EXPERTS)):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def random_mask(seed=1):
    return np.random.default_rng(seed).random(TOKENS) < 0.7


@pytest.mark.parametrize("name", LAYERS)
def test_published_routers(name):
    """With all experts of the model."""
    published = LAYERS[name]
    logits = random_logits(shape=(TOKENS, published.num_experts))
    bias = random_bias(published.num_experts) if published.selection_bias else None
    got = routing.top_k_routing(
        jnp.asarray(logits),
        published.num_experts_per_tok,
        published.score_function,
        published.norm_topk_prob,
        published.routed_scaling_factor,
        softmax_after_topk=bool(published.softmax_after_topk),
        expert_bias=None if bias is None else jnp.asarray(bias),
        num_groups=published.num_groups or 1,
        group_topk=published.group_topk or 1,
    )
    for token, row in enumerate(logits.astype(np.float64)):
        ids, weights = MODELS[name].router(row, 0 if bias is None else bias)
        np.testing.assert_array_equal(got.expert_ids[token], ids)
        np.testing.assert_allclose(got.expert_weights[token], weights, rtol=1e-5)
    np.testing.assert_allclose(got.probs.sum(axis=1), 1, rtol=1e-5)


@pytest.mark.parametrize(("score_function", "after"), KINDS)
@pytest.mark.parametrize("norm_topk_prob", [False, True])
def test_given_experts(score_function, after, norm_topk_prob):
    """Those that a router has chosen are routed as it does, bias or not; -1 is no expert, others are out of range."""
    logits, bias = jnp.asarray(random_logits()), jnp.asarray(random_bias(EXPERTS))
    route = functools.partial(
        routing.top_k_routing, logits, 3, score_function, norm_topk_prob, 2.0, softmax_after_topk=after
    )
    chosen = route(expert_bias=bias)
    for got, want in zip(route(expert_ids=chosen.expert_ids), chosen, strict=True):
        np.testing.assert_array_equal(got, want)

    ids = chosen.expert_ids.at[0, 1].set(-1).at[1].set(-1).at[2, 0].set(EXPERTS).at[3, 0].set(-7)
    got = route(expert_ids=ids)
    np.testing.assert_array_equal(got.expert_ids, np.where((ids < -1) | (ids >= EXPERTS), -2, ids))
    np.testing.assert_array_equal(got.expert_weights == 0, got.expert_ids < 0)
    np.testing.assert_array_equal(got.expert_weights[4:], chosen.expert_weights[4:])
    two = routing.top_k_routing(
        logits, 2, score_function, norm_topk_prob, 2.0, softmax_after_topk=after, expert_ids=ids[:, jnp.array([0, 2])]
    )
    np.testing.assert_allclose(got.expert_weights[0, jnp.array([0, 2])], two.expert_weights[0], rtol=1e-6)
    gradient = jax.grad(
        lambda logits: (
            routing.top_k_routing(logits, 3, score_function, norm_topk_prob, softmax_after_topk=after, expert_ids=ids)
            .expert_weights[:, 0]
            .sum()
        )
    )(logits)
    assert np.isfinite(gradient).all() and not gradient[1].any() and np.abs(gradient[4]).max() > 0
    masked = route(expert_ids=ids, token_mask=jnp.arange(TOKENS) > 0)
    assert (masked.expert_ids[0] == -1).all() and not masked.expert_weights[0].any()


def numpy_scores(logits, score_function):
    logits = logits.astype(np.float64)
    if score_function == "sigmoid":
        return 1 / (1 + np.exp(-logits))
    if score_function == "sqrtsoftplus":
        return np.sqrt(np.log1p(np.exp(logits)))
    exponentials = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return exponentials / exponentials.sum(axis=-1, keepdims=True)


@pytest.mark.parametrize(("score_function", "after"), KINDS)
@pytest.mark.parametrize("norm_topk_prob", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_matches_numpy(score_function, after, norm_topk_prob, masked):
    logits, mask = random_logits(), random_mask() if masked else None
    got = routing.top_k_routing(
        jnp.asarray(logits),
        K,
        score_function,
        norm_topk_prob,
        2.5,
        None if mask is None else jnp.asarray(mask),
        softmax_after_topk=after,
    )

    scores = numpy_scores(logits, score_function)
    ids = np.argsort(-scores, axis=-1, kind="stable")[:, :K]
    weights = np.take_along_axis(scores, ids, axis=-1)
    if norm_topk_prob or after:
        weights /= weights.sum(axis=-1, keepdims=True)
    weights *= 2.5
    probs = scores / scores.sum(axis=-1, keepdims=True)
    if masked:
        ids[~mask], weights[~mask], probs[~mask] = -1, 0, 0
    assert got.expert_ids.dtype == jnp.int32 and got.expert_weights.dtype == jnp.float32
    np.testing.assert_array_equal(got.expert_ids, ids)
    np.testing.assert_allclose(got.expert_weights, weights, rtol=1e-5)
    np.testing.assert_allclose(got.probs, probs, rtol=1e-5)


def test_ties_go_to_the_lower_id():
    logits = jnp.array([[1.0, 3.0, 3.0, 3.0], [0.0, 0.0, 0.0, 0.0], [-jnp.inf, -jnp.inf, 5.0, -jnp.inf]])
    ids = routing.top_k_routing(logits, 2).expert_ids
    np.testing.assert_array_equal(ids, [[1, 2], [0, 1], [2, 0]])


@pytest.mark.parametrize(("score_function", "after"), KINDS)
def test_nan_stays_in_its_row(score_function, after):
    logits = random_logits()
    clean = routing.top_k_routing(jnp.asarray(logits), K, score_function, softmax_after_topk=after)
    logits[4, 7] = np.nan
    got = routing.top_k_routing(jnp.asarray(logits), K, score_function, softmax_after_topk=after)
    others = np.arange(TOKENS) != 4
    for got_part, clean_part in zip(got, clean, strict=True):
        np.testing.assert_array_equal(np.asarray(got_part)[others], np.asarray(clean_part)[others])
    ids = np.asarray(got.expert_ids[4])
    assert len(set(ids)) == K and ids.min() >= 0 and ids.max() < EXPERTS
    assert np.isnan(got.expert_weights[4]).all()


@pytest.mark.parametrize(("score_function", "after"), KINDS)
@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
def test_rows_without_numbers_get_ids_with_groups_and_bias(score_function, after, broken):
    logits = random_logits()
    logits[0], logits[1, 3:9] = broken, broken
    bias = jnp.asarray(random_bias(EXPERTS))
    choice = {"softmax_after_topk": after, "expert_bias": bias, "num_groups": 4, "group_topk": 2}
    got = routing.top_k_routing(jnp.asarray(logits), K, score_function, **choice)
    for ids in np.asarray(got.expert_ids):
        assert len(set(ids)) == K and ids.min() >= 0 and ids.max() < EXPERTS
    assert np.isfinite(got.expert_weights[2:]).all()


def test_equal_groups_go_to_the_lower_one():
    ids = routing.top_k_routing(jnp.zeros((1, 8)), 3, "sigmoid", num_groups=4, group_topk=2).expert_ids
    np.testing.assert_array_equal(ids, [[0, 1, 2]])


def test_groups_of_sigmoid_scores_count_two_and_of_softmax_one():
    # Group 0 has the single best expert, group 1 the two that are better together.
    logits = jnp.array([[4.0, -4.0, 3.0, 3.0]])
    for score_function, after in KINDS:
        routed = routing.top_k_routing(logits, 2, score_function, softmax_after_topk=after, num_groups=2, group_topk=1)
        assert routed.expert_ids.tolist() == ([[0, 1]] if score_function == "softmax" else [[2, 3]])


@pytest.mark.parametrize(("score_function", "after"), KINDS)
def test_bias_steers_the_choice_and_not_the_weights(score_function, after):
    logits = jnp.asarray(random_logits())
    bias = jnp.zeros(EXPERTS).at[2].set(100.0).at[5].set(-jnp.inf)

    def route(bias, k=K):
        return routing.top_k_routing(logits, k, score_function, False, softmax_after_topk=after, expert_bias=bias)

    got, plain = route(bias), route(None, EXPERTS)
    np.testing.assert_array_equal(got.expert_ids[:, 0], 2)
    assert 5 not in np.asarray(got.expert_ids)
    np.testing.assert_array_equal(got.probs, plain.probs)
    if not after:
        want = [dict(zip(*pair, strict=True)) for pair in zip(*map(np.asarray, plain[:2]), strict=True)]
        want = [[row[expert] for expert in ids] for row, ids in zip(want, np.asarray(got.expert_ids), strict=True)]
        np.testing.assert_array_equal(got.expert_weights, want)
    gradient = jax.grad(lambda bias: jnp.sum(route(bias).expert_weights ** 2))(random_bias(EXPERTS))
    np.testing.assert_array_equal(gradient, 0)


def test_sqrtsoftplus_far_from_zero():
    x = np.array([-300, -150, -103, -90, -20.5, -19.5, -1, 0, 1, 30, 300], np.float32)
    wide = x.astype(np.float64)
    softplus = np.logaddexp(0, wide)
    scores, slopes = jax.vmap(jax.value_and_grad(lambda v: routing.expert_scores(v, "sqrtsoftplus")))(x)
    np.testing.assert_allclose(scores, np.sqrt(softplus), rtol=1e-6, atol=1e-38)
    np.testing.assert_allclose(slopes, np.exp(wide - softplus) / (2 * np.sqrt(softplus)), rtol=1e-5, atol=1e-38)
    assert float(routing.expert_scores(jnp.float32(-jnp.inf), "sqrtsoftplus")) == 0


def test_underflowing_sigmoids_give_finite_weights():
    got = routing.top_k_routing(jnp.full((1, 4), -200.0), 2, "sigmoid")
    np.testing.assert_array_equal(got.expert_weights, [[0, 0]])
    assert np.isfinite(got.probs).all()


@pytest.mark.parametrize("masked", [False, True])
def test_losses_and_load_match_numpy(masked):
    logits, mask = random_logits(), random_mask() if masked else np.ones(TOKENS, bool)
    token_mask = jnp.asarray(mask) if masked else None
    routed = routing.top_k_routing(jnp.asarray(logits), K, token_mask=token_mask)

    scores = numpy_scores(logits, "softmax")[mask]
    ids = np.argsort(-scores, axis=-1, kind="stable")[:, :K]
    load = np.bincount(ids.ravel(), minlength=EXPERTS)
    balance = EXPERTS / K * np.sum(load / mask.sum() * scores.mean(axis=0))
    log_z = np.log(np.exp(logits[mask].astype(np.float64)).sum(axis=-1))
    np.testing.assert_array_equal(routing.expert_load(routed.expert_ids, EXPERTS), load)
    np.testing.assert_allclose(
        routing.load_balance_loss(routed.probs, routed.expert_ids, token_mask), balance, rtol=1e-5
    )
    np.testing.assert_allclose(routing.z_loss(jnp.asarray(logits), token_mask), np.mean(log_z**2), rtol=1e-5)


def test_load_balance_loss_of_uniform_and_of_collapsed_routing():
    uniform = routing.Routing(jnp.arange(8).reshape(4, 2), None, jnp.full((4, 8), 1 / 8))
    assert float(routing.load_balance_loss(uniform.probs, uniform.expert_ids)) == pytest.approx(1)
    collapsed = routing.top_k_routing(jnp.array([[50.0, 0, 0, 0]] * 5), 1)
    assert float(routing.load_balance_loss(collapsed.probs, collapsed.expert_ids)) == pytest.approx(4)


def by_sequence(sequences=3):
    """A batch of sequences: softmax probabilities ``[B, S, E]``, ids ``[B, S, K]`` and a mask ``[B, S]``."""
    routed = routing.top_k_routing(jnp.asarray(random_logits()), K)
    mask = random_mask().reshape(sequences, -1)
    mask[-1] = False
    return routed.probs.reshape(sequences, -1, EXPERTS), routed.expert_ids.reshape(sequences, -1, K), mask


def test_sequence_loss_is_the_mean_of_its_sequences():
    probs, ids, mask = by_sequence()
    each = [routing.load_balance_loss(p, i) for p, i in zip(probs, ids, strict=True)]
    np.testing.assert_allclose(routing.sequence_load_balance_loss(probs, ids), np.mean(each), rtol=1e-6)
    # With a mask: as if padding, and the sequence of nothing else, were not there.
    each = [routing.load_balance_loss(probs[b, mask[b]], ids[b, mask[b]]) for b in range(2)]
    got = routing.sequence_load_balance_loss(probs, ids, jnp.asarray(mask))
    np.testing.assert_allclose(got, np.mean(each), rtol=1e-6)
    assert float(routing.sequence_load_balance_loss(probs, ids, jnp.zeros_like(mask))) == 0


def test_losses_convert_to_those_of_other_libraries():
    probs, ids, _ = by_sequence()
    batch = float(routing.load_balance_loss(probs.reshape(-1, EXPERTS), ids.reshape(-1, K)))
    sequence = float(routing.sequence_load_balance_loss(probs, ids))
    first = float(routing.sequence_load_balance_loss(probs, ids[..., :1]))

    p, hot = np.asarray(probs, np.float64), np.eye(EXPERTS)[np.asarray(ids)]  # [B, S, E], [B, S, K, E]
    tokens = p.shape[0] * p.shape[1]
    transformer_engine = EXPERTS / (K * tokens**2) * np.sum(p.sum((0, 1)) * hot.sum((0, 1, 2)))
    maxtext = np.mean(hot.sum(2).mean(1) * p.mean(1)) * EXPERTS**2
    drop_free = np.mean(hot.sum((0, 1, 2)) / (tokens * K) * p.mean((0, 1))) * EXPERTS**2
    drop_free_seq = np.mean(np.sum(hot.sum((1, 2)) * EXPERTS / (p.shape[1] * K) * p.mean(1), axis=1))
    top_k = np.mean(hot.max(2).mean(1) * p.mean(1)) * EXPERTS**2 / K
    top_2 = np.mean(hot[:, :, 0].mean(1) * p.mean(1)) * EXPERTS**2

    np.testing.assert_allclose([transformer_engine, drop_free], batch, rtol=1e-5)
    np.testing.assert_allclose([maxtext / K, drop_free_seq, top_k], sequence, rtol=1e-5)
    np.testing.assert_allclose(top_2, first, rtol=1e-5)


def test_loss_of_transformers_is_of_all_layers_as_one_batch():
    """Its ``load_balancing_loss_func``: counts and probabilities of all layers are summed before they meet."""
    layers, mask = [random_logits(seed) for seed in range(3)], random_mask()

    def transformers(mask):
        counts, probs = np.zeros(EXPERTS), np.zeros(EXPERTS)
        for logits in layers:
            scores = numpy_scores(logits, "softmax")
            chosen = np.eye(EXPERTS)[np.argsort(-scores, axis=-1, kind="stable")[:, :K]].sum(axis=1)
            counts, probs = counts + mask @ chosen, probs + mask @ scores
        total = len(layers) * mask.sum()
        return EXPERTS * np.sum(counts / total * probs / total)

    routed = [routing.top_k_routing(jnp.asarray(logits), K) for logits in layers]
    probs, ids = (jnp.concatenate([getattr(r, name) for r in routed]) for name in ("probs", "expert_ids"))
    for kept in mask, np.ones_like(mask):
        ours = routing.load_balance_loss(probs, ids, jnp.tile(jnp.asarray(kept), len(layers)))
        np.testing.assert_allclose(transformers(kept), K * ours, rtol=1e-5)
    # Layers that are alike have the mean of their losses, and others do not.
    each = [float(routing.load_balance_loss(r.probs, r.expert_ids)) for r in routed]
    assert abs(K * np.mean(each) / transformers(np.ones_like(mask)) - 1) > 1e-3
    layers[:] = layers[:1] * 3
    np.testing.assert_allclose(transformers(np.ones_like(mask)), K * each[0], rtol=1e-5)


def test_bias_update_is_the_sign_of_what_is_missing():
    load = np.array([7, 3, 5, 5], np.int32)
    np.testing.assert_array_equal(routing.expert_bias_update(jnp.asarray(load), 0.25), [-0.25, 0.25, 0, 0])
    # A mean between two integers, and counts that f32 cannot tell apart.
    np.testing.assert_array_equal(routing.expert_bias_update(jnp.array([1, 0, 0]), 1.0), [-1, 1, 1])
    large = jnp.array([2**28 + 1, 2**28, 2**28 - 1], jnp.int32)
    np.testing.assert_array_equal(routing.expert_bias_update(large, 1.0), [-1, 0, 1])


def test_bias_updates_balance_a_skewed_router():
    logits = jnp.asarray(random_logits(shape=(512, EXPERTS)) + np.linspace(0, 2, EXPERTS, dtype=np.float32))

    def load(bias):
        return routing.expert_load(routing.top_k_routing(logits, K, "sigmoid", expert_bias=bias).expert_ids, EXPERTS)

    @jax.jit
    def balance(bias):
        return jax.lax.fori_loop(0, 200, lambda _, b: b + routing.expert_bias_update(load(b), 0.005), bias)

    before, after = np.asarray(load(jnp.zeros(EXPERTS))), np.asarray(load(balance(jnp.zeros(EXPERTS))))
    assert before.max() > 2 * before.mean() and after.max() < 1.1 * after.mean()


def test_losses_of_nothing_but_padding_are_zero():
    logits, mask = jnp.asarray(random_logits()), jnp.zeros(TOKENS, bool)
    routed = routing.top_k_routing(logits, K, token_mask=mask)
    assert float(routing.load_balance_loss(routed.probs, routed.expert_ids, mask)) == 0
    assert float(routing.z_loss(logits, mask)) == 0


@pytest.mark.parametrize(("score_function", "after"), KINDS)
@pytest.mark.parametrize("limited", [False, True])
def test_padding_with_nan_reaches_no_gradient(score_function, after, limited):
    mask = jnp.asarray(random_mask())
    choice = {"expert_bias": jnp.asarray(random_bias(EXPERTS)), "num_groups": 4, "group_topk": 2} if limited else {}

    def loss(logits):
        routed = routing.top_k_routing(logits, K, score_function, token_mask=mask, softmax_after_topk=after, **choice)
        balance = routing.load_balance_loss(routed.probs, routed.expert_ids, mask)
        return (routed.expert_weights**2).sum() + balance + routing.z_loss(logits, mask)

    logits = jnp.asarray(random_logits())
    gradient = jax.jit(jax.grad(loss))
    clean = gradient(logits)
    dirty = gradient(jnp.where(mask[:, None], logits, jnp.nan))
    np.testing.assert_array_equal(dirty, clean)
    np.testing.assert_array_equal(clean[~mask], 0)
    assert np.abs(clean[mask]).max() > 0


@pytest.mark.parametrize(("score_function", "after"), KINDS)
def test_gradient_of_weights_matches_differences(score_function, after):
    logits, direction = jnp.asarray(random_logits(shape=(3, 6))), jnp.asarray(random_logits(2, (3, 6)))
    factors = jnp.asarray(random_logits(3, (3, 2)))

    @jax.jit
    def value(logits):
        routed = routing.top_k_routing(logits, 2, score_function, softmax_after_topk=after)
        return (routed.expert_weights * factors).sum()

    slope = (value(logits + 1e-2 * direction) - value(logits - 1e-2 * direction)) / 2e-2
    np.testing.assert_allclose((jax.grad(value)(logits) * direction).sum(), slope, rtol=1e-2)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda x: routing.top_k_routing(x, EXPERTS + 1), r"num_experts_per_tok=13 .* nearest is 12"),
        (lambda x: routing.top_k_routing(x, 0), r"num_experts_per_tok=0 .* nearest is 1"),
        (lambda x: routing.top_k_routing(x, 1, "tanh"), r"score_function='tanh' .*softmax.*sigmoid"),
        (
            lambda x: routing.top_k_routing(x, 1, "sigmoid", softmax_after_topk=True),
            r"softmax_after_topk=True .*score_function='sigmoid'; use softmax_after_topk=False",
        ),
        (lambda x: routing.top_k_routing(x[0], 1), r"logits has shape \(12,\)"),
        (lambda x: routing.top_k_routing(x, 1, num_groups=5), r"num_groups=5 must divide .*\(12\); the nearest is 4"),
        (lambda x: routing.top_k_routing(x, 1, num_groups=0), r"num_groups=0 .* nearest is 1"),
        (lambda x: routing.top_k_routing(x, 4, num_groups=6), r"group_topk=1 must be from 2 to 6: .* nearest is 2"),
        (lambda x: routing.top_k_routing(x, 1, num_groups=2, group_topk=3), r"group_topk=3 .* nearest is 2"),
        (lambda x: routing.top_k_routing(x, 1, expert_bias=jnp.ones(3)), r"expert_bias has shape \(3,\).*\(12,\)"),
        (
            lambda x: routing.top_k_routing(x, 2, expert_ids=jnp.zeros((33, 1), jnp.int32)),
            r"expert_ids has shape \(33, 1\); expected \(33, 2\), num_experts_per_tok=2 for each token",
        ),
        (lambda x: routing.top_k_routing(x, 1, token_mask=jnp.ones(4, bool)), r"token_mask is bool\[4\].*bool\[33\]"),
    ],
)
def test_errors_name_argument_value_and_nearest(call, text):
    with pytest.raises(ValueError, match=text):
        call(jnp.asarray(random_logits()))


def test_given_experts_are_int32():
    with pytest.raises(TypeError, match=r"expert_ids has dtype float32; it must be int32: expert_ids\.astype"):
        routing.top_k_routing(jnp.asarray(random_logits()), 1, expert_ids=jnp.zeros((TOKENS, 1)))
