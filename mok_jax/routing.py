"""Choosing experts: from router logits to expert ids, weights, losses and load.

Pure functions on arrays of tokens, usable with or without the Flax layers. Everything is computed in f32, is
differentiable where that means anything, and works under ``jit``, ``grad`` and any sharding of the token axis.
What happens to a token after its experts are chosen is not in here: that is :func:`mok_jax.moe`.

A *token mask* is bool ``[N]``, ``True`` for real tokens. Padding is excluded from everything: it gets no experts,
counts in no loss and no load, and no value in its rows, NaN included, reaches another row or a gradient.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

SCORE_FUNCTIONS = ("softmax", "sigmoid")

# DeepSeek-V3's guard for normalised weights: below any sum that matters in f32, yet it keeps 0/0 away
# when every chosen sigmoid has underflowed.
_NORMALISATION_EPSILON = 1e-20


class Routing(NamedTuple):
    """Where each token goes.

    Attributes:
      expert_ids: int32 ``[N, K]``; best expert first, all -1 for a masked token.
      expert_weights: f32 ``[N, K]``; what each expert's output is multiplied by, 0 for a masked token.
      probs: f32 ``[N, E]``; scores of all experts, each row scaled to sum to 1 (what :func:`load_balance_loss` needs),
        0 for a masked token.
    """

    expert_ids: jax.Array
    expert_weights: jax.Array
    probs: jax.Array


def top_k_routing(
    logits: jax.Array,
    num_experts_per_tok: int,
    score_function: str = "softmax",
    norm_topk_prob: bool = True,
    routed_scaling_factor: float = 1.0,
    token_mask: jax.Array | None = None,
) -> Routing:
    """Chooses each token's ``K`` experts with the largest scores; equal scores go to the lower id.

    A row of logits that holds a NaN stays a matter of its own row: its ids are in range and distinct, its weights NaN.

    Args:
      logits: f32 ``[N, E]``; other float types are cast to f32.
      num_experts_per_tok: ``K``, from 1 to ``E``.
      score_function: ``"softmax"`` over the experts, or ``"sigmoid"`` of each logit by itself.
      norm_topk_prob: scale the ``K`` chosen scores of a token to sum to 1.
      routed_scaling_factor: multiplies the weights, after the normalisation.
      token_mask: bool ``[N]``, ``True`` for real tokens; ``None`` when all are.

    Returns:
      A :class:`Routing`.

    Raises:
      ValueError: ``num_experts_per_tok`` is outside ``[1, E]``, ``score_function`` is unknown, or a shape is wrong.

    Example:
      >>> routing = top_k_routing(jnp.array([[0.0, 2.0, 2.0, 1.0]]), num_experts_per_tok=2)
      >>> routing.expert_ids.tolist(), routing.expert_weights.round(3).tolist()
      ([[1, 2]], [[0.5, 0.5]])
    """
    check_logits(logits, token_mask)
    check_experts_per_token(num_experts_per_tok, logits.shape[-1])
    scores = expert_scores(mask_rows(logits.astype(jnp.float32), token_mask), score_function)

    # NaN has no place in an order: without this line the ids of such a row depend on the platform's sort.
    # lax.top_k puts the lower index first among equals.
    order = jnp.where(jnp.isnan(scores), -jnp.inf, scores)
    _, expert_ids = jax.lax.top_k(jax.lax.stop_gradient(order), num_experts_per_tok)
    expert_weights = _select(scores, expert_ids)
    if norm_topk_prob:
        expert_weights /= expert_weights.sum(axis=-1, keepdims=True) + _NORMALISATION_EPSILON
    probs = scores / (scores.sum(axis=-1, keepdims=True) + _NORMALISATION_EPSILON)

    if token_mask is not None:
        expert_ids = jnp.where(token_mask[:, None], expert_ids, -1)
    return Routing(
        expert_ids=expert_ids.astype(jnp.int32),
        expert_weights=mask_rows(expert_weights * routed_scaling_factor, token_mask),
        probs=mask_rows(probs, token_mask),
    )


def load_balance_loss(probs: jax.Array, expert_ids: jax.Array, token_mask: jax.Array | None = None) -> jax.Array:
    """The load-balancing loss of Switch Transformers (Fedus et al. 2021, equations 4 to 6), for ``K`` experts a token.

    ``E / K * sum_e f_e P_e``, where ``f_e`` is the fraction of tokens that chose expert ``e`` and ``P_e`` the mean of
    its probability over the tokens. It is 1 when both are uniform, whatever ``E`` and ``K``; gradients flow through
    ``P`` only.

    Args:
      probs: f32 ``[N, E]``, rows that sum to 1, as in :class:`Routing`.
      expert_ids: int32 ``[N, K]``; -1 entries count nowhere.
      token_mask: bool ``[N]``, ``True`` for real tokens; ``None`` when all are.

    Returns:
      f32 scalar, unscaled; 0 when no token is real.

    Example:
      >>> routing = top_k_routing(jnp.eye(4), num_experts_per_tok=1)
      >>> float(load_balance_loss(routing.probs, routing.expert_ids))
      1.0
    """
    num_experts, num_experts_per_tok = probs.shape[-1], expert_ids.shape[-1]
    tokens = _token_count(probs.shape[0], token_mask)
    fraction = expert_load(expert_ids, num_experts) / tokens
    mean_prob = mask_rows(probs, token_mask).sum(axis=0) / tokens
    return num_experts / num_experts_per_tok * jnp.sum(fraction * mean_prob)


def z_loss(logits: jax.Array, token_mask: jax.Array | None = None) -> jax.Array:
    """The router z-loss of ST-MoE (Zoph et al. 2022, equation 5): the mean over tokens of ``logsumexp(logits)**2``.

    It keeps logits small, where f32 scores still tell experts apart.

    Args:
      logits: f32 ``[N, E]``; other float types are cast to f32.
      token_mask: bool ``[N]``, ``True`` for real tokens; ``None`` when all are.

    Returns:
      f32 scalar, unscaled; 0 when no token is real.

    Example:
      >>> round(float(z_loss(jnp.zeros((3, 8)))), 4)  # log(8) ** 2
      4.3241
    """
    log_z = jax.nn.logsumexp(mask_rows(logits.astype(jnp.float32), token_mask), axis=-1)
    return jnp.sum(mask_rows(jnp.square(log_z), token_mask)) / _token_count(logits.shape[0], token_mask)


def expert_load(expert_ids: jax.Array, num_experts: int) -> jax.Array:
    """Counts the (token, k) pairs that go to each expert.

    Args:
      expert_ids: int32, any shape; ids outside ``[0, num_experts)``, such as -1, count nowhere.
      num_experts: ``E``.

    Returns:
      int32 ``[E]``.

    Example:
      >>> expert_load(jnp.array([[0, 2], [2, -1]]), num_experts=4).tolist()
      [1, 0, 2, 0]
    """
    return jnp.sum(expert_ids.reshape(-1, 1) == jnp.arange(num_experts), axis=0, dtype=jnp.int32)


def expert_scores(logits: jax.Array, score_function: str) -> jax.Array:
    """Scores of all experts, f32 ``[N, E]``; raises ValueError for an unknown ``score_function``."""
    check_score_function(score_function)
    return jax.nn.softmax(logits, axis=-1) if score_function == "softmax" else jax.nn.sigmoid(logits)


def mask_rows(rows: jax.Array, token_mask: jax.Array | None) -> jax.Array:
    """``rows [N, ...]`` with exact zeros, and zero gradients, where the token mask is ``False``."""
    if token_mask is None:
        return rows
    return jnp.where(token_mask.reshape(token_mask.shape + (1,) * (rows.ndim - 1)), rows, 0)


def check_score_function(score_function: str) -> None:
    """Raises ValueError for a score function that does not exist."""
    if score_function not in SCORE_FUNCTIONS:
        raise ValueError(f"score_function={score_function!r} is unknown; use one of {SCORE_FUNCTIONS}.")


def check_experts_per_token(num_experts_per_tok: int, num_experts: int) -> None:
    """Raises ValueError unless ``1 <= num_experts_per_tok <= num_experts``."""
    nearest = min(max(num_experts_per_tok, 1), num_experts)
    if num_experts_per_tok != nearest:
        raise ValueError(
            f"num_experts_per_tok={num_experts_per_tok} must be from 1 to the number of experts ({num_experts}); "
            f"the nearest is {nearest}."
        )


def check_logits(logits: jax.Array, token_mask: jax.Array | None) -> None:
    """Raises ValueError unless ``logits`` is ``[N, E]`` and ``token_mask`` a bool ``[N]`` or ``None``."""
    if logits.ndim != 2:
        raise ValueError(f"logits has shape {logits.shape}; expected [tokens, experts].")
    if token_mask is None:
        return
    if token_mask.dtype != jnp.bool_ or token_mask.shape != logits.shape[:1]:
        raise ValueError(
            f"token_mask is {token_mask.dtype}{list(token_mask.shape)}; "
            f"expected bool[{logits.shape[0]}], one per token."
        )


def _select(scores: jax.Array, expert_ids: jax.Array) -> jax.Array:
    # Not take_along_axis: its gradient is a scatter-add, which GPUs add in any order and partitioners like to gather
    # for. Summing one score and zeros is exact, fuses into one loop, and needs neither.
    chosen = expert_ids[..., None] == jnp.arange(scores.shape[-1])
    return jnp.sum(jnp.where(chosen, scores[:, None, :], 0), axis=-1)


def _token_count(tokens: int, token_mask: jax.Array | None) -> jax.Array | float:
    # At least 1: a batch of nothing but padding has losses of 0, not NaN.
    return float(max(tokens, 1)) if token_mask is None else jnp.maximum(jnp.sum(token_mask), 1).astype(jnp.float32)
