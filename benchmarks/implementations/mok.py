"""``mok_jax.moe``: the fused kernel, and the layer of XLA's own operations.

The kernel also in a ring too small for its rows, and with float32 weights: these are rounded before it, and their
gradients are not.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import mok_jax
from benchmarks.implementations import compiled
from benchmarks.implementations.base import Bind, Implementation, Program
from benchmarks.problem import Problem, Tokens
from mok_jax import native
from mok_jax.api import Implementation as Name
from mok_jax.config import ROW_BLOCK, MoKConfig


def build(
    name: Name, problem: Problem, pass_name: str, config: MoKConfig | None = None, f32_weights: bool = False
) -> Bind:
    """Programs of the layer, as :func:`compiled.build`; on one rank of a GPU the kernel counts its cycles."""
    config = MoKConfig() if config is None else config
    moe: compiled.Layer = functools.partial(mok_jax.moe, implementation=name, config=config)
    if problem.ranks > 1:
        by_token, by_expert = P(("data", "expert")), P("expert")
        moe = jax.shard_map(
            functools.partial(moe, axis_name="expert"),
            mesh=problem.mesh,
            in_specs=(by_token,) * 3 + (by_expert,) * 3,
            out_specs=by_token,
        )
    weights = [w.astype(jnp.float32) for w in problem.weights] if f32_weights else problem.weights
    bind = compiled.build(moe, weights, pass_name)
    if name != "megakernel" or problem.platform == "cpu" or problem.ranks > 1:
        return bind

    def bind_counted(token_sets: Sequence[Tokens]) -> Program:
        calls = 2 if pass_name == "forward+backward" else 1
        return dataclasses.replace(bind(token_sets), cycles=native.library().gpu_cycles, calls=calls)

    return bind_counted


def _build_quarter_ring(problem: Problem, pass_name: str) -> Bind:
    blocks = problem.rows // problem.ranks // 4 // ROW_BLOCK
    return build("megakernel", problem, pass_name, MoKConfig(ring_rows=max(1, blocks) * ROW_BLOCK))


MEGAKERNEL = Implementation("megakernel", lambda _: None, functools.partial(build, "megakernel"))
QUARTER_RING = Implementation("megakernel-quarter-ring", lambda _: None, _build_quarter_ring)
F32_WEIGHTS = Implementation(
    "megakernel-f32-weights",
    lambda problem: "the weights are float32 anyway" if problem.dtype == jnp.float32 else None,
    functools.partial(build, "megakernel", f32_weights=True),
)
XLA = Implementation("xla", lambda _: None, functools.partial(build, "xla"))
