"""The layer and its gradients in float64 NumPy, on global arrays, with the derivatives written out by hand.

Independent of JAX, of automatic differentiation and of everything in ``mok_jax``: an error shared by all
implementations still shows against it. Ranks do not exist here, except in `stats`.
"""

from typing import NamedTuple

import numpy as np


class Outputs(NamedTuple):
    """What one step of the layer computes, as global arrays: ``y [N, H]`` and the gradients of ``sum(y * dy)``."""

    y: np.ndarray
    dx: np.ndarray
    d_expert_weights: np.ndarray
    d_wi_0: np.ndarray
    d_wi_1: np.ndarray
    d_wo: np.ndarray


def forward_backward(
    x,
    ids,
    weights,
    wi_0,
    wi_1,
    wo,
    dy,
    activation="swiglu",
    activation_limit=None,
    pre_activation_dtype=np.float64,
) -> Outputs:
    """All six outputs in float64.

    Args:
      x: ``[N, H]`` tokens.
      ids: int ``[N, K]``; -1 selects nothing, any other id outside ``[0, E)`` makes its token bad.
      weights: ``[N, K]`` router weights.
      wi_0: ``[E, H, I]`` gate projections.
      wi_1: ``[E, H, I]`` up projections.
      wo: ``[E, I, H]`` down projections.
      dy: ``[N, H]`` cotangent of ``y``.
      activation: one of `ACTIVATIONS`.
      activation_limit: clamp of the gate (above) and of the up projection (both sides), or None.
      pre_activation_dtype: gradients are taken at gate and up rounded to it. It matters with a clamp only: whether a
        gradient passes is then decided for the rounded value, and rounding moves some values onto the limit.
    """
    x, weights, wi_0, wi_1, wo, dy = (np.asarray(a, np.float64) for a in (x, weights, wi_0, wi_1, wo, dy))
    ids = np.asarray(ids)
    bad = ((ids < -1) | (ids >= wi_0.shape[0])).any(axis=1)
    ids = np.where(bad[:, None], -1, ids)
    out = Outputs(*(np.zeros_like(a) for a in (x, x, weights, wi_0, wi_1, wo)))
    with np.errstate(invalid="ignore", over="ignore"):
        for e in range(wi_0.shape[0]):
            # One row per (token, k) pair: a token that names the expert twice has two rows.
            token, k = np.nonzero(ids == e)
            rows, weight, d_rows = x[token], weights[token, k][:, None], dy[token]
            gate, up = rows @ wi_0[e], rows @ wi_1[e]
            hidden = _activate(activation, gate, up, activation_limit)[0]
            np.add.at(out.y, token, weight * (hidden @ wo[e]))

            gate, up = (a.astype(pre_activation_dtype).astype(np.float64) for a in (gate, up))
            hidden, hidden_by_gate, hidden_by_up = _activate(activation, gate, up, activation_limit)
            out.d_expert_weights[token, k] = (d_rows * (hidden @ wo[e])).sum(axis=1)
            d_down = weight * d_rows
            d_hidden = d_down @ wo[e].T
            d_gate, d_up = d_hidden * hidden_by_gate, d_hidden * hidden_by_up
            np.add.at(out.dx, token, d_gate @ wi_0[e].T + d_up @ wi_1[e].T)
            out.d_wi_0[e], out.d_wi_1[e], out.d_wo[e] = rows.T @ d_gate, rows.T @ d_up, hidden.T @ d_down
    for per_token in (out.y, out.dx, out.d_expert_weights):
        per_token[bad] = np.nan
    return out


# ``(a, b)`` of ``gate * sigmoid(a * gate) * (up + b)``.
ACTIVATIONS = {"swiglu": (1, 0), "gpt_oss": (1.702, 1)}


def _activate(activation, gate, up, limit):
    """The activation of the clamped arguments, and its derivatives by both, zero where clamped."""
    a, b = ACTIVATIONS[activation]
    limit = np.inf if limit is None else limit
    gate_passes, up_passes = ~(gate > limit), ~(np.abs(up) > limit)
    gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    sigmoid = 1 / (1 + np.exp(-a * gate))
    by_gate = (up + b) * sigmoid * (1 + a * gate * (1 - sigmoid))
    by_up = gate * sigmoid
    return by_up * (up + b), np.where(gate_passes, by_gate, 0), np.where(up_passes, by_up, 0)


def stats(ids, experts, ep):
    """Rows of each of ``ep`` ranks, rows of each of ``experts``, and bad tokens of each rank, of ``ids [N, K]``."""
    bad = ((ids < -1) | (ids >= experts)).any(axis=1)
    used = ids[~bad]
    per_expert = np.bincount(used[used >= 0], minlength=experts)
    bad_per_rank = np.pad(bad, (0, -len(bad) % ep)).reshape(ep, -1).sum(axis=1)
    return per_expert.reshape(ep, -1).sum(axis=1), per_expert, bad_per_rank
