"""Choosing experts: from router logits to expert ids, weights, losses and load.

Pure functions on arrays of tokens, usable with or without the Flax layers. Everything is computed in f32, is
differentiable where that means anything, and works under ``jit``, ``grad`` and any sharding of the token axis.
What happens to a token after its experts are chosen is not in here: that is :func:`mok_jax.moe`.

A *token mask* is bool ``[N]``, ``True`` for real tokens. Padding is excluded from everything: it gets no experts,
counts in no loss and no load, and no value in its rows, NaN included, reaches another row or a gradient.

Published routers as arguments of :func:`top_k_routing`, most with normalised weights; :mod:`mok_jax.zoo` has all:

- DeepSeek-V3 (arXiv:2412.19437, section 2.1.2): ``"sigmoid"``, ``expert_bias``, 4 of 8 groups, scale 2.5. Kimi K2 and
  GLM: the same without groups.
- DeepSeek-V4: ``"sqrtsoftplus"``, ``expert_bias``, no groups. Its first layers take ``expert_ids`` from a table of the
  token, which is the caller's.
- Mixtral (arXiv:2401.04088), Qwen3 and Qwen3.5: ``"softmax"``. gpt-oss: ``"softmax"``, ``softmax_after_topk``, of
  logits with a bias.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

SCORE_FUNCTIONS = ("softmax", "sigmoid", "sqrtsoftplus")

# sqrt(softplus(x)) is exp(x / 2) to f32 precision below this. The square root's slope at an underflowed softplus is
# infinite, which would make NaN of the gradient.
_SQRTSOFTPLUS_TAIL = -20.0

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
    *,
    softmax_after_topk: bool = False,
    expert_bias: jax.Array | None = None,
    num_groups: int = 1,
    group_topk: int = 1,
    expert_ids: jax.Array | None = None,
) -> Routing:
    """Chooses each token's ``K`` experts with the largest scores; equal scores go to the lower id.

    With ``s = scores(logits)`` and ``b = expert_bias``: ``ids = top_k(s + b, K)`` and
    ``w[k] = routed_scaling_factor * s[ids[k]] / sum_j s[ids[j]]``, without the division if not ``norm_topk_prob``. The
    bias steers the choice, the weights do not see it and it has no gradient (Wang et al. 2024, arXiv:2408.15664).
    With ``softmax_after_topk`` the choice is by the logits, and ``w = routed_scaling_factor * softmax(logits[ids])``.

    Group-limited choice: experts are ``num_groups`` groups of consecutive ids, and a token chooses only among those of
    its ``group_topk`` best groups. A group's score is, with softmax, the largest score in it (DeepSeek-V2,
    arXiv:2405.04434, section 2.2.2), otherwise the sum of its two largest (DeepSeek-V3), in both cases bias included.
    Equal groups: the lower one.

    With ``expert_ids`` nothing is chosen, so bias and groups have no say; weights are as if those ids had been, over
    the slots of a token that are not -1.

    A row of logits that holds a NaN stays a matter of its own row: its ids are in range and distinct, its weights NaN.

    Args:
      logits: f32 ``[N, E]``; other float types are cast to f32.
      num_experts_per_tok: ``K``, from 1 to ``E``.
      score_function: see :func:`expert_scores`.
      norm_topk_prob: scale the ``K`` chosen scores of a token to sum to 1.
      routed_scaling_factor: multiplies the weights, after the normalisation.
      token_mask: bool ``[N]``, ``True`` for real tokens; ``None`` when all are.
      softmax_after_topk: take the softmax over the chosen logits only, which sums to 1 whatever ``norm_topk_prob``.
      expert_bias: f32 ``[E]``, see :func:`expert_bias_update`; ``-inf`` keeps an expert from being chosen.
      num_groups: a divisor of ``E``; 1 for no groups.
      group_topk: groups that a token may choose from; they must hold ``K`` experts.
      expert_ids: int32 ``[N, K]``, each token's experts where something else has chosen them, in that order, such as
        DeepSeek-V4's table of the token; -1 is no expert. Ids outside ``[-1, E)`` become -2: no load counts them, and
        :func:`mok_jax.moe` makes their token NaN.

    Returns:
      A :class:`Routing`.

    Raises:
      ValueError: ``num_experts_per_tok``, ``num_groups`` or ``group_topk`` is out of range, ``score_function`` is
        unknown, ``softmax_after_topk`` is asked of another than softmax, or a shape is wrong.
      TypeError: ``expert_ids`` is not int32.

    Example:
      >>> routing = top_k_routing(jnp.array([[0.0, 2.0, 2.0, 1.0]]), num_experts_per_tok=2)
      >>> routing.expert_ids.tolist(), routing.expert_weights.round(3).tolist()
      ([[1, 2]], [[0.5, 0.5]])
      >>> bias = jnp.array([0.0, 0.0, 0.0, 9.0])
      >>> top_k_routing(jnp.array([[0.0, 2.0, 2.0, 1.0]]), 1, "sigmoid", expert_bias=bias).expert_ids.tolist()
      [[3]]
    """
    num_experts = logits.shape[-1]
    check_logits(logits, token_mask)
    check_score_function(score_function, softmax_after_topk)
    check_experts_per_token(num_experts_per_tok, num_experts)
    check_groups(num_groups, group_topk, num_experts, num_experts_per_tok)
    check_expert_bias(expert_bias, num_experts)
    check_expert_ids(expert_ids, logits.shape[:1], num_experts_per_tok)
    logits = mask_rows(logits.astype(jnp.float32), token_mask)
    scores = expert_scores(logits, score_function)

    if expert_ids is None:
        order = logits if softmax_after_topk else scores
        if expert_bias is not None:
            order += expert_bias.astype(jnp.float32)[None]
        scores_per_group = 1 if score_function == "softmax" else 2
        expert_ids = _choose(order, num_experts_per_tok, num_groups, group_topk, scores_per_group)
    else:
        # One id for all that are out of range: the experts that a mesh adds as padding begin at E.
        expert_ids = jnp.where((expert_ids < -1) | (expert_ids >= num_experts), -2, expert_ids)

    if softmax_after_topk:
        chosen_logits = jnp.where(expert_ids < 0, jnp.finfo(jnp.float32).min, _select(logits, expert_ids))
        expert_weights = jnp.where(expert_ids < 0, 0, jax.nn.softmax(chosen_logits, axis=-1))
    else:
        expert_weights = _select(scores, expert_ids)
        if norm_topk_prob:
            expert_weights /= expert_weights.sum(axis=-1, keepdims=True) + _NORMALISATION_EPSILON
    if score_function != "softmax" or softmax_after_topk:
        # Softmax over all experts spreads a NaN over its row; elsewhere its expert is not chosen, which would hide it.
        broken = jnp.isnan(logits).any(axis=-1, keepdims=True)
        expert_weights = jnp.where(broken, jnp.nan, expert_weights)
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
    ``P`` only. Tokens are those of the whole batch; :func:`sequence_load_balance_loss` takes each sequence by itself.

    The same loss elsewhere, without padding and coefficients:

    - TransformerEngine, ``fused_moe_aux_loss``: equal.
    - axlearn, ``TopKDropFreeGating``: ``load_balance_loss`` equal; ``seq_load_balance_loss`` equal to the one by
      sequence. ``TopKGating`` equal to the one by sequence, its groups being the sequences. ``Top2Gating`` counts first
      choices only: the one by sequence of ``expert_ids[:, :1]``.
    - MaxText, ``load_balance_loss``: ``K`` times the one by sequence, always of softmax probabilities. Multiply a
      coefficient from there by ``K``.
    - transformers, ``load_balancing_loss_func``: ``K`` times that of the tokens of all layers as one batch, always of
      softmax probabilities: ``f`` and ``P`` are averaged over the layers before they are multiplied, and the loss is
      added once a model. To have its value, concatenate the layers' ``probs`` and ``expert_ids``. Layers that each add
      their own are not that; with ``L`` of them, its coefficient times ``K / L`` is equal where the layers are alike.
      Its attention mask leaves padding out as the token mask does; without one, padding counts there.

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
    if token_mask is not None:
        expert_ids = jnp.where(token_mask[:, None], expert_ids, -1)
    fraction = expert_load(expert_ids, num_experts).astype(jnp.float32) / tokens
    mean_prob = mask_rows(probs, token_mask).sum(axis=0) / tokens
    return num_experts / num_experts_per_tok * jnp.sum(fraction * mean_prob)


def sequence_load_balance_loss(
    probs: jax.Array, expert_ids: jax.Array, token_mask: jax.Array | None = None
) -> jax.Array:
    """The mean over sequences of each one's :func:`load_balance_loss` (DeepSeek-V3, arXiv:2412.19437, eq. 17 to 20).

    ``1 / B * sum_b E / K * sum_e f_be P_be``, with ``f`` and ``P`` over the tokens of sequence ``b``. It also holds
    experts to balance within each sequence, not only over the batch.

    Args:
      probs: f32 ``[B, S, E]``, rows that sum to 1.
      expert_ids: int32 ``[B, S, K]``; -1 entries count nowhere.
      token_mask: bool ``[B, S]``, ``True`` for real tokens; ``None`` when all are.

    Returns:
      f32 scalar, unscaled; sequences of nothing but padding are left out, and with no other it is 0.

    Example:
      >>> probs, ids = jnp.array([[[1.0, 0.0]], [[0.0, 1.0]]]), jnp.array([[[0]], [[1]]])
      >>> float(sequence_load_balance_loss(probs, ids)), float(load_balance_loss(probs[:, 0], ids[:, 0]))
      (2.0, 1.0)
    """
    losses = jax.vmap(load_balance_loss)(probs, expert_ids, token_mask)
    sequences = _token_count(probs.shape[0], None if token_mask is None else token_mask.any(axis=1))
    return losses.sum() / sequences


def expert_bias_update(load: jax.Array, rate: float) -> jax.Array:
    """What to add to ``expert_bias`` after a step so that experts come to be chosen alike often, without a loss.

    ``rate * sign(mean(load) - load[e])``: up where an expert got less than the mean, down where it got more
    (Wang et al. 2024, arXiv:2408.15664, algorithm 1; DeepSeek-V3 with ``rate = 0.001``).

    Args:
      load: int32 ``[E]``, as :func:`expert_load` counts it, over the batch of all devices.
      rate: the step.

    Returns:
      f32 ``[E]``.

    Example:
      >>> expert_bias_update(jnp.array([5, 3, 1]), rate=0.5).tolist()
      [-0.5, 0.0, 0.5]
    """
    # Compared with the mean rounded down and up, in integers: f32 would miss an exact balance of many tokens.
    total, num_experts = load.sum(), load.shape[0]
    above, below = load > total // num_experts, load < -(-total // num_experts)
    return rate * (below.astype(jnp.float32) - above.astype(jnp.float32))


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
    return jnp.sum(jax.nn.one_hot(expert_ids.reshape(-1), num_experts, dtype=bool), axis=0, dtype=jnp.int32)


def expert_scores(logits: jax.Array, score_function: str) -> jax.Array:
    """Scores of all experts, f32 ``[N, E]``, none negative.

    Args:
      logits: f32 ``[N, E]``.
      score_function: ``"softmax"``: ``exp(x) / sum(exp(x))`` over all experts. ``"sigmoid"``: ``1 / (1 + exp(-x))``.
        ``"sqrtsoftplus"``: ``sqrt(log(1 + exp(x)))`` (DeepSeek-V4).

    Returns:
      f32 ``[N, E]``.

    Raises:
      ValueError: ``score_function`` is unknown.
    """
    check_score_function(score_function)
    if score_function == "sigmoid":
        return jax.nn.sigmoid(logits)
    if score_function == "sqrtsoftplus":
        tail = jnp.exp(jnp.minimum(logits, _SQRTSOFTPLUS_TAIL) / 2)
        body = jnp.sqrt(jax.nn.softplus(jnp.maximum(logits, _SQRTSOFTPLUS_TAIL)))
        return jnp.where(logits < _SQRTSOFTPLUS_TAIL, tail, body)
    return jax.nn.softmax(logits, axis=-1)


def mask_rows(rows: jax.Array, token_mask: jax.Array | None) -> jax.Array:
    """``rows [N, ...]`` with exact zeros, and zero gradients, where the token mask is ``False``."""
    if token_mask is None:
        return rows
    return jnp.where(token_mask.reshape(token_mask.shape + (1,) * (rows.ndim - 1)), rows, 0)


def check_score_function(score_function: str, softmax_after_topk: bool = False) -> None:
    """Raises ValueError for a score function that does not exist, or not after the choice."""
    if score_function not in SCORE_FUNCTIONS:
        raise ValueError(f"score_function={score_function!r} is unknown; use one of {SCORE_FUNCTIONS}.")
    if softmax_after_topk and score_function != "softmax":
        raise ValueError(
            f"softmax_after_topk=True has no meaning with score_function={score_function!r}; "
            'use softmax_after_topk=False, or score_function="softmax".'
        )


def check_experts_per_token(num_experts_per_tok: int, num_experts: int) -> None:
    """Raises ValueError unless ``1 <= num_experts_per_tok <= num_experts``."""
    nearest = min(max(num_experts_per_tok, 1), num_experts)
    if num_experts_per_tok != nearest:
        raise ValueError(
            f"num_experts_per_tok={num_experts_per_tok} must be from 1 to the number of experts ({num_experts}); "
            f"the nearest is {nearest}."
        )


def check_groups(num_groups: int, group_topk: int, num_experts: int, num_experts_per_tok: int) -> None:
    """Raises ValueError unless ``num_groups`` divides ``E`` and ``group_topk`` of them exist and hold ``K`` experts."""
    if num_groups < 1 or num_experts % num_groups:
        divisors = (n for n in range(1, num_experts + 1) if num_experts % n == 0)
        nearest = min(divisors, key=lambda n: abs(n - num_groups))
        raise ValueError(
            f"num_groups={num_groups} must divide the number of experts ({num_experts}); the nearest is {nearest}."
        )
    group_size = num_experts // num_groups
    least = -(-num_experts_per_tok // group_size)
    if not least <= group_topk <= num_groups:
        raise ValueError(
            f"group_topk={group_topk} must be from {least} to {num_groups}: of num_groups={num_groups} groups of "
            f"{group_size} experts, enough to hold num_experts_per_tok={num_experts_per_tok}; "
            f"the nearest is {min(max(group_topk, least), num_groups)}."
        )


def check_expert_bias(expert_bias: jax.Array | None, num_experts: int) -> None:
    """Raises ValueError unless ``expert_bias`` is ``[E]`` or ``None``."""
    if expert_bias is not None and expert_bias.shape != (num_experts,):
        raise ValueError(f"expert_bias has shape {expert_bias.shape}; expected ({num_experts},), one per expert.")


def check_expert_ids(expert_ids: jax.Array | None, tokens: tuple[int, ...], num_experts_per_tok: int) -> None:
    """Raises ValueError unless ``expert_ids`` is ``[*tokens, K]`` or ``None``, TypeError unless it is int32."""
    if expert_ids is None:
        return
    if expert_ids.dtype != jnp.int32:
        raise TypeError(f"expert_ids has dtype {expert_ids.dtype}; it must be int32: expert_ids.astype(jnp.int32)")
    expected = (*tokens, num_experts_per_tok)
    if expert_ids.shape != expected:
        raise ValueError(
            f"expert_ids has shape {expert_ids.shape}; expected {expected}, num_experts_per_tok={num_experts_per_tok} "
            "for each token."
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


def _choose(
    order: jax.Array, num_experts_per_tok: int, num_groups: int, group_topk: int, scores_per_group: int
) -> jax.Array:
    """The ids, int32 ``[N, K]``, of the largest values of ``order [N, E]`` in each row's best groups; no gradient."""
    # NaN has no place in an order: without this line the ids of such a row depend on the platform's sort.
    # lax.top_k puts the lower index first among equals.
    order = jax.lax.stop_gradient(jnp.where(jnp.isnan(order), -jnp.inf, order))
    if group_topk < num_groups:
        order = _close_other_groups(order, num_groups, group_topk, scores_per_group)
    _, expert_ids = jax.lax.top_k(order, num_experts_per_tok)
    return expert_ids


def _close_other_groups(order: jax.Array, num_groups: int, group_topk: int, scores_per_group: int) -> jax.Array:
    """``order [N, E]`` with ``-inf`` outside each row's best groups: those of the largest sums of their best scores."""
    num_experts = order.shape[-1]
    groups = order.reshape(order.shape[0], num_groups, num_experts // num_groups)
    best, _ = jax.lax.top_k(groups, min(scores_per_group, groups.shape[-1]))
    _, group_ids = jax.lax.top_k(best.sum(axis=-1), group_topk)
    is_open = jax.nn.one_hot(group_ids, num_groups, dtype=bool).any(axis=-2)
    return jnp.where(is_open[..., None], groups, -jnp.inf).reshape(order.shape)


def _select(scores: jax.Array, expert_ids: jax.Array) -> jax.Array:
    # Not take_along_axis: its gradient is a scatter-add, which GPUs add in any order and partitioners like to gather
    # for. Summing one score and zeros is exact, fuses into one loop, and needs neither.
    chosen = jax.nn.one_hot(expert_ids, scores.shape[-1], dtype=bool)
    return jnp.sum(jnp.where(chosen, scores[:, None, :], 0), axis=-1)


def _token_count(tokens: int, token_mask: jax.Array | None) -> jax.Array | float:
    # At least 1: a batch of nothing but padding has losses of 0, not NaN.
    return float(max(tokens, 1)) if token_mask is None else jnp.maximum(jnp.sum(token_mask), 1).astype(jnp.float32)
