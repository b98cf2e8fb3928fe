"""The Pallas Mosaic-GPU ragged dot that ships inside jax, and its transposed form for weight gradients.

Tile sizes are chosen by a sweep over a few candidates for each product of a shape, on balanced groups, and kept for
the passes and routings that follow. The kernels are written for Hopper.
"""

import concurrent.futures
import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import measure
from benchmarks.implementations import compiled, grouped
from benchmarks.implementations.base import Bind, Implementation, Program
from benchmarks.problem import Problem

_MODULE = "jax.experimental.pallas.ops.gpu.ragged_dot_mgpu"
_COMPILING_THREADS = 8
_LAUNCHES = 4

# (block_m, block_n, block_k, max_concurrent_steps, grid_block_n): what one warpgroup's registers and a multiprocessor's
# shared memory have room for, from the kernels' own sweeps.
_DOT_TILES = (
    (128, 128, 64, 4, 8),
    (128, 128, 64, 6, 8),
    (128, 128, 64, 5, 2),
    (128, 128, 64, 4, 16),
    (64, 256, 64, 4, 4),
)
_GRADIENT_TILES = (
    (128, 128, 64, 4, 8),
    (128, 128, 64, 6, 4),
    (128, 128, 64, 2, 8),
    (128, 128, 128, 2, 8),
    (64, 128, 64, 4, 8),
)
_TILE_NAMES = ("block_m", "block_n", "block_k", "max_concurrent_steps", "grid_block_n")

_best_tiles: dict[tuple, dict[str, int]] = {}


class PallasProducts:
    """``grouped.Products`` with tuned tiles."""

    def dot(self, lhs, rhs, sizes):
        """Rows times their group's matrix."""
        return _dot(_tiles_for("dot", lhs, rhs, sizes), lhs, rhs, sizes)

    def dot_transposed(self, lhs, rhs, sizes):
        """Rows times the transpose of their group's matrix."""
        return _dot_transposed(_tiles_for("dot_transposed", lhs, rhs, sizes), lhs, rhs, sizes)

    def weight_gradient(self, lhs, rhs, sizes):
        """Each group's rows, transposed, times its rows."""
        return _weight_gradient(_tiles_for("weight_gradient", lhs, rhs, sizes), lhs, rhs, sizes)


def _dot(tiles, lhs, rhs, sizes):
    from jax.experimental.pallas.ops.gpu import ragged_dot_mgpu

    return ragged_dot_mgpu.ragged_dot(lhs, rhs, group_sizes=sizes, **tiles)


def _dot_transposed(tiles, lhs, rhs, sizes):
    from jax.experimental.pallas.ops.gpu import ragged_dot_mgpu

    return ragged_dot_mgpu.ragged_dot(lhs, rhs, group_sizes=sizes, transpose_rhs=True, **tiles)


def _weight_gradient(tiles, lhs, rhs, sizes):
    from jax.experimental.pallas.ops.gpu import transposed_ragged_dot_mgpu

    return transposed_ragged_dot_mgpu.transposed_ragged_dot(lhs, rhs, group_sizes=sizes, **tiles)


_PRODUCTS: dict[str, Callable] = {
    "dot": _dot,
    "dot_transposed": _dot_transposed,
    "weight_gradient": _weight_gradient,
}


def _tiles_for(kind, lhs, rhs, sizes) -> dict[str, int]:
    """What ``_tune`` found for operands of these shapes."""
    return _best_tiles[kind, lhs.shape, rhs.shape, sizes.shape[0]]


def _tune(kind: str, lhs: jax.Array, rhs: jax.Array, groups: int) -> None:
    """Measures the candidates, unless that was done for these shapes."""
    key = (kind, lhs.shape, rhs.shape, groups)
    if key in _best_tiles:
        return
    rows = lhs.shape[0]
    sizes = jnp.diff(jnp.arange(groups + 1, dtype=jnp.int32) * rows // groups)
    candidates = [
        dict(zip(_TILE_NAMES, tiles, strict=True))
        for tiles in (_GRADIENT_TILES if kind == "weight_gradient" else _DOT_TILES)
    ]

    lowered: list[tuple[dict[str, int], Any]] = []
    results: dict[float, dict[str, int]] = {}
    failures: list[Exception] = []
    for tiles in candidates:
        try:
            lowered.append((tiles, jax.jit(functools.partial(_PRODUCTS[kind], tiles)).lower(lhs, rhs, sizes)))
        except Exception as error:  # A candidate may need more shared memory than there is.
            failures.append(error)
    with concurrent.futures.ThreadPoolExecutor(_COMPILING_THREADS) as pool:
        for tiles, future in [(tiles, pool.submit(candidate.compile)) for tiles, candidate in lowered]:
            try:
                program = _program(future.result(), lhs, rhs, sizes)
                taken = measure.time_launches([program] * (1 + _LAUNCHES), overlapped=True)
                results[min(launch.device_s for launch in taken if launch.device_s is not None)] = tiles
            except Exception as error:
                failures.append(error)
    if not results:
        raise failures[0]
    _best_tiles[key] = results[min(results)]


def _program(run, *arguments) -> Program:
    return Program(lambda _: run(*arguments), compiled.wait)


def _tune_layer(problem: Problem, pass_name: str, wi: jax.Array, wo: jax.Array) -> None:
    keys = jax.random.split(jax.random.key(5), 3)
    hidden, intermediate, groups = problem.shape.hidden, problem.shape.intermediate, wi.shape[0]
    rows, gate_up, activated = (
        jax.random.normal(key, (problem.rows, width), problem.dtype)
        for key, width in zip(keys, (hidden, 2 * intermediate, intermediate), strict=True)
    )
    _tune("dot", rows, wi, groups)
    _tune("dot", activated, wo, groups)
    if "backward" in pass_name:
        _tune("dot_transposed", rows, wo, groups)
        _tune("dot_transposed", gate_up, wi, groups)
        _tune("weight_gradient", activated, rows, groups)
        _tune("weight_gradient", rows, gate_up, groups)


def _build(problem: Problem, pass_name: str) -> Bind:
    parameters = grouped.side_by_side(problem.weights)
    _tune_layer(problem, pass_name, *parameters)
    return compiled.build(grouped.make_layer(PallasProducts()), parameters, pass_name, grouped.split_gradients)


def _why_not(problem: Problem) -> str | None:
    if problem.platform != "gpu":
        return "its kernels exist for GPUs only"
    if problem.ranks > 1:
        return "it is a layer of one device"
    if importlib.util.find_spec(_MODULE) is None:
        return "this jax does not ship it"
    return None


PALLAS_MGPU = Implementation("pallas-mgpu", _why_not, _build)
