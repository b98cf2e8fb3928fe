"""``mok_jax.moe``: the fused kernel, and the unfused layer of XLA's own operations."""

import functools

import jax
from jax.sharding import PartitionSpec as P

import mok_jax
from benchmarks.implementations import compiled
from benchmarks.implementations.base import Bind, Implementation
from benchmarks.problem import Problem
from mok_jax.api import Implementation as Name


def _build(name: Name, problem: Problem, pass_name: str) -> Bind:
    moe: compiled.Layer = functools.partial(mok_jax.moe, implementation=name)
    if problem.ranks > 1:
        by_token, by_expert = P(("data", "expert")), P("expert")
        moe = jax.shard_map(
            functools.partial(moe, axis_name="expert"),
            mesh=problem.mesh,
            in_specs=(by_token,) * 3 + (by_expert,) * 3,
            out_specs=by_token,
        )
    return compiled.build(moe, problem.weights, pass_name)


MEGAKERNEL = Implementation("megakernel", lambda _: None, functools.partial(_build, "megakernel"))
XLA = Implementation("xla", lambda _: None, functools.partial(_build, "xla"))
