"""Bytes that ``implementation="xla"`` holds on a device, for :mod:`mok_jax.plan`. Nothing is allocated or compiled."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from mok_jax import xla
from mok_jax.activation import Activation
from mok_jax.semantics import accumulator_dtype


class Shape(NamedTuple):
    """A call of one rank, with tokens ``x [T, H]`` of ``dtype`` and weights ``[E_local, H, I]`` of ``param_dtype``."""

    ranks: int
    tokens: int
    top_k: int
    local_experts: int
    hidden: int
    intermediate: int
    dtype: np.dtype
    param_dtype: np.dtype
    activation: Activation
    activation_limit: float | None

    @property
    def rows(self) -> int:
        """Of the all-to-all: room for all slots of every rank, whatever is in use."""
        return self.ranks * self.tokens * self.top_k


class XlaBytes(NamedTuple):
    """Of one device.

    Attributes:
      kept: from a layer's forward to its backward, besides parameters and inputs.
      forward: of the forward of one layer, at most at once.
      backward: of the backward of one layer, at most at once.
    """

    kept: int
    forward: int
    backward: int


def count(shape: Shape) -> XlaBytes:
    """What a training step of layers under ``jax.lax.scan`` holds.

    ``kept`` is what a trace of such a step keeps. The others are the largest of what comes and goes, with ``R`` rows in
    the all-to-all: in the forward ``E_local R max(H, I)`` values in the dtype of ``x``, beside ``2 R H`` (as received;
    sorted) and ``R I`` in float32; in the backward ``3 E_local R (H + I)`` in float32. For XLA has no grouped product
    on CPUs, nor (0.11.2) on an H200: it masks a copy of all rows for each local expert. Its backward does so with ``x``
    and the hidden activations, with the gradients of gate, up and output, and again with the last in another layout.
    """
    wide = accumulator_dtype(shape.dtype).itemsize
    rows, masked = shape.rows, shape.local_experts * shape.rows
    widest = max(shape.hidden, shape.intermediate)
    return XlaBytes(
        kept=_kept(shape),
        forward=(masked * widest + 2 * rows * shape.hidden) * shape.dtype.itemsize + rows * shape.intermediate * wide,
        backward=3 * masked * (shape.hidden + shape.intermediate) * wide,
    )


@functools.cache
def _kept(shape: Shape) -> int:
    """Bytes of the residuals of one layer in a scan over layers."""
    axis_name = None if shape.ranks == 1 else "expert"
    options = {"activation": shape.activation, "activation_limit": shape.activation_limit}

    def loss(x, layers):
        y, _ = jax.lax.scan(lambda x, layer: (xla.moe(x, *layer, axis_name=axis_name, **options)[0], None), x, layers)
        return y.astype(jnp.float32).sum()

    def residuals(x, layers):
        jaxpr = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1), allow_int=True))(x, layers)
        forward = next(equation for equation in jaxpr.eqns if equation.primitive.name == "scan")
        kept: list[Any] = [variable.aval for variable in forward.outvars[1:]]  # 0: the carry
        return [jnp.zeros(aval.shape, aval.dtype) for aval in kept]

    mesh = AbstractMesh((shape.ranks,), ("expert",), axis_types=(AxisType.Auto,))
    step = jax.shard_map(residuals, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    kept = jax.eval_shape(step, *_one_layer(shape))
    return sum(math.prod(array.shape) * array.dtype.itemsize for array in kept)


def _one_layer(shape: Shape):
    """``x``, and all other arrays of a call with a dimension in front: one layer."""
    like, slots = jax.ShapeDtypeStruct, (1, shape.tokens, shape.top_k)
    wi = like((1, shape.local_experts, shape.hidden, shape.intermediate), shape.param_dtype)
    wo = like((1, shape.local_experts, shape.intermediate, shape.hidden), shape.param_dtype)
    x = like((shape.tokens, shape.hidden), shape.dtype)
    return x, (like(slots, jnp.int32), like(slots, jnp.float32), wi, wi, wo)
