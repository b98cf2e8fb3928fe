"""Whether an implementation is right: sampled rows of its results against float64. Nothing that fails here is timed.

The definition is written out once more, for one expert at a time over dense rows, in float64 and differentiated by
JAX; it shares no code with what is measured. All tokens of a weight gradient's expert count, but only some rows of
the gradient are compared; a few tokens of everything else.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.problem import Problem, Tokens, Weights

SAMPLED_TOKENS, SAMPLED_EXPERTS, SAMPLED_ROWS = 32, 2, 64

# Of the largest error of a row over the root mean square norm of the sampled rows.
TOLERANCES = {"bfloat16": 3e-2, "float32": 1e-4}


class WrongResultError(Exception):
    """An implementation computes something else than the layer."""


class Expected(NamedTuple):
    """Where to look, and what must be there, by the result's name: index arrays and float64 rows."""

    where: dict[str, Any]
    rows: dict[str, np.ndarray]


def expect(problem: Problem, tokens: Tokens, seed: int = 0) -> Expected:
    """Computes what all implementations must find for these tokens."""
    random = np.random.default_rng(seed)
    shape = problem.shape
    ids = np.asarray(tokens.expert_ids)
    sampled = _sample(random, len(ids), SAMPLED_TOKENS)
    load = np.bincount(ids.reshape(-1), minlength=problem.weights.wo.shape[0])
    experts = _busiest_and_another(random, load)
    hidden_rows = _sample(random, shape.hidden, SAMPLED_ROWS)
    intermediate_rows = _sample(random, shape.intermediate, SAMPLED_ROWS)
    with jax.enable_x64(True):
        y, dx, d_expert_weights = _token_rows(*_pick(tokens, sampled), problem.weights)
        gradients = [_weight_gradients(*tokens, *(w[e] for w in problem.weights), e) for e in experts]
    d_wi_0, d_wi_1, d_wo = (np.stack([np.asarray(g) for g in group]) for group in zip(*gradients, strict=True))
    where_wi, where_wo = np.ix_(experts, hidden_rows), np.ix_(experts, intermediate_rows)
    return Expected(
        where={
            **dict.fromkeys(("y", "dx", "d_expert_weights"), (sampled,)),
            **dict.fromkeys(("d_wi_0", "d_wi_1"), where_wi),
            "d_wo": where_wo,
        },
        rows={
            "y": np.asarray(y),
            "dx": np.asarray(dx),
            "d_expert_weights": np.asarray(d_expert_weights),
            "d_wi_0": d_wi_0[:, hidden_rows],
            "d_wi_1": d_wi_1[:, hidden_rows],
            "d_wo": d_wo[:, intermediate_rows],
        },
    )


def check(name: str, results: Mapping[str, Any], expected: Expected, dtype: jnp.dtype) -> dict[str, float]:
    """Errors of the results by name; raises ``WrongResultError`` if one is beyond the dtype's tolerance."""
    errors = {
        result: error_of(_take(array, expected.where[result]), expected.rows[result])
        for result, array in results.items()
    }
    tolerance = TOLERANCES[jnp.dtype(dtype).name]
    wrong = {result: error for result, error in errors.items() if not error <= tolerance}
    if wrong:
        listed = ", ".join(f"{result} by {error:.2g}" for result, error in wrong.items())
        raise WrongResultError(f"{name}: wrong {listed}; {tolerance:g} is allowed")
    return errors


def error_of(actual: np.ndarray, expected: np.ndarray) -> float:
    """The largest error of a row over the root mean square norm of the expected rows; NaN if anything is.

    Example:
      >>> error_of(np.array([[3.0, 4.0], [0.0, 1.0]]), np.array([[3.0, 4.0], [0.0, 5.0]]))
      0.8
    """
    if actual.shape != expected.shape:
        return float("inf")
    error = np.linalg.norm(actual - expected, axis=-1).max()
    return float(error / np.sqrt(np.mean(np.linalg.norm(expected, axis=-1) ** 2)))


def _take(array: Any, where: Any) -> np.ndarray:
    """Rows of a JAX, NumPy or torch array, as float64."""
    if hasattr(array, "detach"):
        import torch

        index = tuple(torch.as_tensor(i, device=array.device) for i in where)
        return array.detach()[index].double().cpu().numpy()
    return np.asarray(array[where]).astype(np.float64)


def _sample(random: np.random.Generator, size: int, count: int) -> np.ndarray:
    """``count`` sorted indices below ``size``, the first and the last among them; all, if there are no more."""
    if size <= count:
        return np.arange(size)
    middle = 1 + random.choice(size - 2, count - 2, replace=False)
    return np.sort(np.concatenate([[0], middle, [size - 1]]))


def _busiest_and_another(random: np.random.Generator, load: np.ndarray) -> np.ndarray:
    busiest = int(load.argmax())
    others = np.delete(np.arange(len(load)), busiest)
    return np.sort(np.append(random.choice(others, min(SAMPLED_EXPERTS - 1, len(others)), replace=False), busiest))


def _pick(tokens: Tokens, sampled: np.ndarray) -> Tokens:
    return Tokens(*(array[sampled] for array in tokens))


@jax.jit
def _token_rows(x, expert_ids, expert_weights, dy, weights: Weights):
    """``y``, ``dx`` and the router weights' gradient of a few tokens, in float64."""

    def layer(x, expert_weights):
        def add_expert(y, expert):
            number, *matrices = expert
            share = jnp.where(expert_ids == number, expert_weights, 0).sum(axis=1)[:, None]
            return y + share * _expert(x, *matrices), None

        # Remembering every expert's matrices in float64 would take more memory than there may be.
        return jax.lax.scan(jax.checkpoint(add_expert), jnp.zeros_like(x), (jnp.arange(weights.wo.shape[0]), *weights))[
            0
        ]

    y, vjp = jax.vjp(layer, x.astype(jnp.float64), expert_weights.astype(jnp.float64))
    return y, *vjp(dy.astype(jnp.float64))


@jax.jit
def _weight_gradients(x, expert_ids, expert_weights, dy, wi_0, wi_1, wo, number):
    """Of one expert, from all tokens, in float64; those of other experts have a share of 0."""
    x, dy = x.astype(jnp.float64), dy.astype(jnp.float64)
    share = jnp.where(expert_ids == number, expert_weights.astype(jnp.float64), 0).sum(axis=1)[:, None]
    matrices = tuple(w.astype(jnp.float64) for w in (wi_0, wi_1, wo))
    return jax.vjp(lambda *matrices: share * _expert(x, *matrices), *matrices)[1](dy)


def _expert(x, wi_0, wi_1, wo):
    gate, up = (jnp.dot(x, w.astype(x.dtype), precision="highest") for w in (wi_0, wi_1))
    return jnp.dot(gate / (1 + jnp.exp(-gate)) * up, wo.astype(x.dtype), precision="highest")
