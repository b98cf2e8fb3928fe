"""The data of a measurement: weights of one shape, and several sets of tokens that launches take in turn.

Values are random, because zeros run faster than data, and there are enough sets that none is still in the L2 cache
when its turn comes again.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import routing
from benchmarks.shapes import Shape
from mok_jax.sharding import make_mesh

TOKEN_SETS = 3


class Tokens(NamedTuple):
    """One set: ``x, dy [N, H]``, ``expert_ids, expert_weights [N, K]``."""

    x: jax.Array
    expert_ids: jax.Array
    expert_weights: jax.Array
    dy: jax.Array


class Weights(NamedTuple):
    """``wi_0, wi_1 [E, H, I]`` and ``wo [E, I, H]``."""

    wi_0: jax.Array
    wi_1: jax.Array
    wo: jax.Array


@dataclasses.dataclass(frozen=True)
class Problem:
    """A shape laid out over devices, with its weights."""

    shape: Shape
    ep: int
    data: int
    dtype: jnp.dtype
    mesh: Mesh
    weights: Weights

    @property
    def platform(self) -> str:
        return self.mesh.devices.flat[0].platform

    @property
    def ranks(self) -> int:
        return self.ep * self.data

    @property
    def rows(self) -> int:
        """(token, expert) pairs of all ranks."""
        return self.shape.over(self.ep, self.data).tokens * self.shape.top_k


def make_problem(shape: Shape, ep: int, data: int, dtype: jnp.dtype, devices: Sequence[jax.Device]) -> Problem:
    """Weights with the usual initial scale, expert-sharded over the first ``ep * data`` devices."""
    mesh = make_mesh(expert_parallelism=ep, devices=devices[: ep * data])
    experts, hidden, intermediate = shape.over(ep, data).experts, shape.hidden, shape.intermediate
    shapes = ((experts, hidden, intermediate),) * 2 + ((experts, intermediate, hidden),)
    keys = jax.random.split(jax.random.key(0), len(shapes))
    by_expert = NamedSharding(mesh, P("expert"))
    weights = Weights(*(_sampler(s, s[1] ** -0.5, dtype, by_expert)(k) for k, s in zip(keys, shapes, strict=True)))
    return Problem(shape, ep, data, dtype, mesh, weights)


def make_tokens(problem: Problem, routing_name: str) -> list[Tokens]:
    """``TOKEN_SETS`` sets, each routed afresh."""
    return [_make_set(problem, routing_name, seed) for seed in range(1, 1 + TOKEN_SETS)]


def _make_set(problem: Problem, routing_name: str, seed: int) -> Tokens:
    sizes, shape = problem.shape.over(problem.ep, problem.data), problem.shape
    random = np.random.default_rng(seed)
    by_token = NamedSharding(problem.mesh, P(("data", "expert")))
    key_x, key_dy = jax.random.split(jax.random.key(seed))
    sample = _sampler((sizes.tokens, shape.hidden), 1.0, problem.dtype, by_token)
    ids = routing.ROUTINGS[routing_name](random, sizes.tokens, sizes.experts, shape.top_k)
    return Tokens(
        x=sample(key_x),
        expert_ids=jax.device_put(ids, by_token),
        expert_weights=jax.device_put(routing.router_weights(random, sizes.tokens, shape.top_k), by_token),
        dy=sample(key_dy),
    )


@functools.cache
def _sampler(shape, scale, dtype, sharding):
    """Compiles ``key -> [..., A, B]``, normal values times ``scale``."""

    def matrix(key):
        return (scale * jax.random.normal(key, shape[-2:])).astype(dtype)

    def sample(key):
        # One matrix at a time: the random bits of all of a layer's weights at once take several times their memory.
        return matrix(key) if len(shape) == 2 else jax.lax.map(matrix, jax.random.split(key, shape[0]))

    return jax.jit(sample, out_shardings=sharding)
