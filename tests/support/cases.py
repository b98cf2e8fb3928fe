"""Inputs of all tests: shapes and routings that have broken such layers before, made from a seed.

Data are scaled so that ``y`` and every gradient are of order one to ten and nowhere zero by accident: a tolerance means
something, and a result that was not written does not pass. Widths are multiples of 8 that straddle a tile of 128.
"""

import dataclasses
import itertools
from collections.abc import Callable
from typing import NamedTuple

import ml_dtypes
import numpy as np


class Inputs(NamedTuple):
    """Global arrays of one call, and the cotangent of its output.

    ``x, dy [N, H]`` have the dtype of the case; ``expert_ids [N, K]`` is int32, ``expert_weights [N, K]`` float32
    (float64 if ``x`` is); ``wi_0, wi_1 [E, H, I]`` and ``wo [E, I, H]`` may have another dtype than ``x``.
    """

    x: np.ndarray
    expert_ids: np.ndarray
    expert_weights: np.ndarray
    wi_0: np.ndarray
    wi_1: np.ndarray
    wo: np.ndarray
    dy: np.ndarray

    def for_oracle(self):
        """The same values as float64, weights rounded to the dtype of ``x`` as the layer rounds them."""
        rounded = (w.astype(self.x.dtype).astype(np.float64) for w in (self.wi_0, self.wi_1, self.wo))
        return (
            self.x.astype(np.float64),
            self.expert_ids,
            self.expert_weights.astype(np.float64),
            *rounded,
            self.dy.astype(np.float64),
        )


@dataclasses.dataclass(frozen=True)
class Case:
    """A shape and a routing.

    Attributes:
      name: shown in test ids.
      tokens: global number of tokens.
      K: experts per token.
      E: experts in all; a multiple of every EP size that the case is run with.
      H: hidden size.
      I: intermediate size of an expert.
      routing: ``(rng, case) -> int32 [tokens, K]``, one of the functions below.
      edit_weights: ``(rng, float64 [tokens, K]) -> None``, changes router weights in place; None leaves them positive.
    """

    name: str
    tokens: int
    K: int
    E: int
    H: int
    I: int  # noqa: E741  (the letter that the design uses)
    routing: Callable
    edit_weights: Callable | None = None

    def __str__(self):
        return self.name


def uniform(rng, case):
    """K different experts, all equally likely."""
    return _top_k(rng.random((case.tokens, case.E)), case.K)


def zipf(rng, case):
    """K different experts; the r-th most popular one is drawn with a weight of 1 / r."""
    popularity = -np.log(1.0 + rng.permutation(case.E))
    return _top_k(popularity + rng.gumbel(size=(case.tokens, case.E)), case.K)


def one_expert(rng, case):
    """Every slot names the same expert, which is not the first: its neighbours and most ranks get nothing."""
    return np.full((case.tokens, case.K), case.E // 2 + 1, np.int32)


def one_rank(rng, case):
    """Every token stays within the last eighth of the experts: one rank, for EP up to 8."""
    share = case.E // 8
    return (case.E - share + _top_k(rng.random((case.tokens, share)), case.K)).astype(np.int32)


def some_absent(rng, case):
    """A third of the slots, and every seventh token as a whole, have id -1."""
    ids = uniform(rng, case)
    ids[rng.random(ids.shape) < 1 / 3] = -1
    ids[::7] = -1
    return ids


def all_absent(rng, case):
    """No slot names an expert: ``y`` and every gradient are exactly zero."""
    return np.full((case.tokens, case.K), -1, np.int32)


def duplicates(rng, case):
    """Independent draws, so that tokens name an expert twice; the first token names one K times."""
    ids = rng.integers(0, case.E, (case.tokens, case.K), dtype=np.int32)
    ids[0] = ids[0, 0]
    return ids


def empty_experts(rng, case):
    """Every third expert, the first and the last of them included, is chosen by no token."""
    scores = rng.random((case.tokens, case.E))
    scores[:, ::3] = -1
    scores[:, -1] = -1
    return _top_k(scores, case.K)


def bad_ids(rng, case):
    """Some -1, and a few tokens with an id below -1, of E, or far beyond, among good ones."""
    ids = some_absent(rng, case)
    wrong = itertools.cycle((-2, case.E, 2**31 - 1, -(2**31)))
    for token in range(1, case.tokens, 9):
        ids[token, token % case.K] = next(wrong)
    return ids


def zero_and_negative(rng, weights):
    """A third of the router weights is exactly zero and a third negative; token 0 has only zeros."""
    kind = rng.integers(0, 3, weights.shape)
    weights[kind == 0] = 0
    weights[kind == 1] *= -1
    weights[0] = 0


def _top_k(scores, k):
    return np.argsort(-scores, axis=1, kind="stable")[:, :k].astype(np.int32)


# The first of them is the one to use where any ordinary case will do.
CASES = (
    Case("uniform", 136, 4, 16, 72, 136, uniform),
    Case("zipf", 201, 3, 8, 136, 72, zipf),
    Case("one_expert", 67, 2, 8, 72, 136, one_expert),
    Case("one_rank", 96, 2, 16, 136, 72, one_rank),
    Case("some_absent", 65, 4, 16, 200, 136, some_absent),
    Case("all_absent", 24, 2, 8, 72, 72, all_absent),
    Case("duplicates", 66, 4, 8, 72, 200, duplicates),
    Case("empty_experts", 80, 2, 16, 136, 136, empty_experts),
    Case("bad_ids", 61, 3, 8, 72, 72, bad_ids),
    Case("zero_weights", 77, 3, 8, 136, 72, uniform, zero_and_negative),
    Case("one_token", 1, 1, 8, 72, 136, uniform),
    Case("five_tokens", 5, 6, 8, 8, 8, uniform),
    Case("wide", 672, 2, 8, 264, 200, zipf),
    Case("rack", 150, 4, 72, 72, 136, uniform),
)


def by_name(name) -> Case:
    """The case of that name."""
    return next(case for case in CASES if case.name == name)


def make(case, dtype, seed=0, weight_dtype=None) -> Inputs:
    """Random inputs of ``case``; ``dtype`` is "float32", "bfloat16" or "float64", for the weights ``weight_dtype``."""
    rng = np.random.default_rng([seed, sum(case.name.encode())])
    dtype = _numpy_dtype(dtype)
    weight_dtype = dtype if weight_dtype is None else _numpy_dtype(weight_dtype)
    ids = case.routing(rng, case)
    router = rng.uniform(0.2, 1.0, ids.shape)
    if case.edit_weights is not None:
        case.edit_weights(rng, router)

    def normal(shape, fan_in, kind):
        return (rng.standard_normal(shape) / np.sqrt(fan_in)).astype(kind)

    return Inputs(
        x=normal((case.tokens, case.H), 1, dtype),
        expert_ids=ids,
        expert_weights=router.astype(np.float64 if dtype == np.float64 else np.float32),
        wi_0=normal((case.E, case.H, case.I), case.H / 2, weight_dtype),
        wi_1=normal((case.E, case.H, case.I), case.H / 2, weight_dtype),
        wo=normal((case.E, case.I, case.H), case.I, weight_dtype),
        dy=normal((case.tokens, case.H), 1, dtype),
    )


def _numpy_dtype(name):
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)
