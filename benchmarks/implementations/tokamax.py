"""tokamax's grouped product, where it is installed, with its own heuristics and derivatives, in the unfused layer."""

import functools
import importlib.util

import jax
import jax.numpy as jnp

from benchmarks.implementations import compiled, grouped
from benchmarks.implementations.base import Bind, Implementation
from benchmarks.problem import Problem


class TokamaxProducts:
    """``grouped.Products``; the two transposed ones are what differentiating ``tokamax.ragged_dot`` gives."""

    def __init__(self, implementation: str | None):
        import tokamax

        self._ragged_dot = functools.partial(tokamax.ragged_dot, implementation=implementation)

    def dot(self, lhs, rhs, sizes):
        """Rows times their group's matrix."""
        return self._ragged_dot(lhs, rhs, sizes).astype(lhs.dtype)

    def dot_transposed(self, lhs, rhs, sizes):
        """Rows times the transpose of their group's matrix."""
        # The product that is differentiated is not needed, and XLA drops it.
        operand = jnp.zeros((lhs.shape[0], rhs.shape[1]), lhs.dtype)
        return jax.vjp(lambda operand: self.dot(operand, rhs, sizes), operand)[1](lhs)[0]

    def weight_gradient(self, lhs, rhs, sizes):
        """Each group's rows, transposed, times its rows."""
        weights = jnp.zeros((sizes.shape[0], lhs.shape[1], rhs.shape[1]), lhs.dtype)
        return jax.vjp(lambda weights: self.dot(lhs, weights, sizes), weights)[1](rhs)[0]


def _build(problem: Problem, pass_name: str) -> Bind:
    products = TokamaxProducts("mosaic" if problem.platform == "gpu" else "xla")
    parameters = grouped.side_by_side(problem.weights)
    return compiled.build(grouped.make_layer(products), parameters, pass_name, grouped.split_gradients)


def _why_not(problem: Problem) -> str | None:
    if importlib.util.find_spec("tokamax") is None:
        return "not installed"
    if problem.ranks > 1:
        return "it is a layer of one device"
    return None


TOKAMAX = Implementation("tokamax", _why_not, _build)
