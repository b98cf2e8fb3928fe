"""Routing against NumPy: choice of experts, weights, losses, load, and what padding and NaN may not reach."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mok_jax import routing

TOKENS, EXPERTS, K = 33, 12, 3


def random_logits(seed=0, shape=(TOKENS, EXPERTS)):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def random_mask(seed=1):
    return np.random.default_rng(seed).random(TOKENS) < 0.7


def numpy_scores(logits, score_function):
    logits = logits.astype(np.float64)
    if score_function == "sigmoid":
        return 1 / (1 + np.exp(-logits))
    exponentials = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return exponentials / exponentials.sum(axis=-1, keepdims=True)


@pytest.mark.parametrize("score_function", routing.SCORE_FUNCTIONS)
@pytest.mark.parametrize("norm_topk_prob", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_matches_numpy(score_function, norm_topk_prob, masked):
    logits, mask = random_logits(), random_mask() if masked else None
    got = routing.top_k_routing(
        jnp.asarray(logits), K, score_function, norm_topk_prob, 2.5, None if mask is None else jnp.asarray(mask)
    )

    scores = numpy_scores(logits, score_function)
    ids = np.argsort(-scores, axis=-1, kind="stable")[:, :K]
    weights = np.take_along_axis(scores, ids, axis=-1)
    if norm_topk_prob:
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


@pytest.mark.parametrize("score_function", routing.SCORE_FUNCTIONS)
def test_nan_stays_in_its_row(score_function):
    logits = random_logits()
    clean = routing.top_k_routing(jnp.asarray(logits), K, score_function)
    logits[4, 7] = np.nan
    got = routing.top_k_routing(jnp.asarray(logits), K, score_function)
    others = np.arange(TOKENS) != 4
    for got_part, clean_part in zip(got, clean, strict=True):
        np.testing.assert_array_equal(np.asarray(got_part)[others], np.asarray(clean_part)[others])
    ids = np.asarray(got.expert_ids[4])
    assert len(set(ids)) == K and ids.min() >= 0 and ids.max() < EXPERTS


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


def test_losses_of_nothing_but_padding_are_zero():
    logits, mask = jnp.asarray(random_logits()), jnp.zeros(TOKENS, bool)
    routed = routing.top_k_routing(logits, K, token_mask=mask)
    assert float(routing.load_balance_loss(routed.probs, routed.expert_ids, mask)) == 0
    assert float(routing.z_loss(logits, mask)) == 0


def test_padding_with_nan_reaches_no_gradient():
    mask = jnp.asarray(random_mask())

    def loss(logits):
        routed = routing.top_k_routing(logits, K, token_mask=mask)
        balance = routing.load_balance_loss(routed.probs, routed.expert_ids, mask)
        return (routed.expert_weights**2).sum() + balance + routing.z_loss(logits, mask)

    logits = jnp.asarray(random_logits())
    gradient = jax.jit(jax.grad(loss))
    clean = gradient(logits)
    dirty = gradient(jnp.where(mask[:, None], logits, jnp.nan))
    np.testing.assert_array_equal(dirty, clean)
    np.testing.assert_array_equal(clean[~mask], 0)
    assert np.abs(clean[mask]).max() > 0


def test_gradient_of_weights_matches_differences():
    logits, direction = jnp.asarray(random_logits(shape=(3, 6))), jnp.asarray(random_logits(2, (3, 6)))
    factors = jnp.asarray(random_logits(3, (3, 2)))

    @jax.jit
    def value(logits):
        return (routing.top_k_routing(logits, 2).expert_weights * factors).sum()

    slope = (value(logits + 1e-2 * direction) - value(logits - 1e-2 * direction)) / 2e-2
    np.testing.assert_allclose((jax.grad(value)(logits) * direction).sum(), slope, rtol=1e-2)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda x: routing.top_k_routing(x, EXPERTS + 1), r"num_experts_per_tok=13 .* nearest is 12"),
        (lambda x: routing.top_k_routing(x, 0), r"num_experts_per_tok=0 .* nearest is 1"),
        (lambda x: routing.top_k_routing(x, 1, "tanh"), r"score_function='tanh' .*softmax.*sigmoid"),
        (lambda x: routing.top_k_routing(x[0], 1), r"logits has shape \(12,\)"),
        (lambda x: routing.top_k_routing(x, 1, token_mask=jnp.ones(4, bool)), r"token_mask is bool\[4\].*bool\[33\]"),
    ],
)
def test_errors_name_argument_value_and_nearest(call, text):
    with pytest.raises(ValueError, match=text):
        call(jnp.asarray(random_logits()))
