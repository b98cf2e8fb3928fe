"""The fused implementation: one JAX primitive, and one FFI call, per direction.

``moe`` is differentiable through a ``custom_vjp`` whose two halves bind the two primitives. A primitive of our own,
rather than ``jax.ffi.ffi_call``, for three reasons: its abstract rule types results as varying over the axes that the
operands vary over, which gradients under ``shard_map`` need; its lowering rule can see how the program is sharded, and
refuses what would be silently wrong; its batching and differentiation rules say what cannot be done, and why.

Names of residuals, for ``jax.checkpoint`` policies: ``mok_residuals`` and ``mok_output`` (see ``remat_policy``).
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from mok_jax import native
from mok_jax.config import SAVE_POLICIES, MoKConfig, Save
from mok_jax.stats import MoEStats

RESIDUALS_NAME = "mok_residuals"
OUTPUT_NAME = "mok_output"

# XLA's CPU collectives end the process after 40 s without a peer; ours must give up, with an error, before that.
HOST_TIMEOUT_LIMIT_S = 30.0

_SAVE_CODES: dict[Save, int] = {"nothing": 0, "pre_activations": 1, "pre_activations_and_rows": 2}
assert set(_SAVE_CODES) == set(SAVE_POLICIES)


def remat_policy(*args, **params) -> bool:
    """A policy for ``jax.checkpoint`` that keeps what the layer saved, so that its forward runs once.

    Plain ``jax.checkpoint`` runs dispatch, experts and combine again in the backward; with this policy only what
    surrounds the layer is recomputed.

    Example:
      >>> block = jax.checkpoint(lambda x: x, policy=remat_policy)
    """
    return jax.checkpoint_policies.save_only_these_names(RESIDUALS_NAME, OUTPUT_NAME)(*args, **params)


@dataclasses.dataclass(frozen=True)
class Call:
    """What a call site fixes, apart from the shapes of its operands: the parameter of both primitives."""

    ranks: int
    ring_rows: int
    max_rows: int
    activation_limit: float | None
    config: MoKConfig
    differentiated: bool = False
    weight_grad_dtype: np.dtype | None = None

    @property
    def save(self) -> Save:
        return self.config.save if self.differentiated else "nothing"

    @property
    def ring_may_overflow(self) -> bool:
        """Whether more rows than the ring holds can arrive, so that there can be several macrobatches."""
        return self.max_rows > self.ring_rows

    def attributes(self) -> dict[str, np.generic]:
        """As ``csrc/xla/attributes.h`` declares them."""
        config = self.config

        def or_unset(value: int | None) -> int:
            return -1 if value is None else value

        return {
            "ranks": np.int32(self.ranks),
            "save": np.int32(_SAVE_CODES[self.save]),
            "activation_limit": np.float32(math.inf if self.activation_limit is None else self.activation_limit),
            "ring_rows": np.int64(self.ring_rows),
            "minibatch_rows": np.int64(or_unset(config.minibatch_rows)),
            "communication_workers": np.int32(or_unset(config.host_comm_workers)),
            "compute_workers": np.int32(or_unset(config.host_compute_workers)),
            "delay_seed": np.int64(config.host_delay_seed),
            "entry_timeout_s": np.float64(min(config.entry_timeout_s or HOST_TIMEOUT_LIMIT_S, HOST_TIMEOUT_LIMIT_S)),
            "timeout_s": np.float64(min(config.timeout_s or HOST_TIMEOUT_LIMIT_S, HOST_TIMEOUT_LIMIT_S)),
        }


def moe(x, expert_ids, expert_weights, wi_0, wi_1, wo, *, axis_name, activation_limit, config):
    """As ``mok_jax.moe``, on checked arguments that vary over the same axes. Returns ``(y, MoEStats)``."""
    ranks = 1 if axis_name is None else jax.lax.axis_size(axis_name)
    bounds = {
        "ranks": ranks,
        "tokens": x.shape[0],
        "top_k": expert_ids.shape[1],
        "local_experts": wi_0.shape[0],
    }
    max_rows = native.library().max_rows(**bounds)
    ring_rows = min(max_rows, config.ring_rows or native.library().default_ring_rows(**bounds))
    call = Call(ranks, ring_rows, max_rows, activation_limit, config)
    y, expert_rows, bad_tokens = _moe(call, coordinates(axis_name), x, expert_ids, expert_weights, wi_0, wi_1, wo)
    return y, MoEStats(expert_rows.sum(dtype=jnp.int32), expert_rows, bad_tokens)


def coordinates(axis_name):
    """int32 ``[2]``: this rank within its expert-parallel group, and the number of the group in the mesh."""
    if axis_name is None:
        return jnp.zeros(2, jnp.int32)
    axes = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    others = tuple(axis for axis in jax.sharding.get_abstract_mesh().manual_axes if axis not in axes)
    group = jax.lax.axis_index(others) if others else 0
    return jnp.stack([jax.lax.axis_index(axes), group]).astype(jnp.int32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _moe(call, where, x, expert_ids, expert_weights, wi_0, wi_1, wo):
    y, _, expert_rows, bad_tokens, *_ = _bind_forward(call, where, x, expert_ids, expert_weights, wi_0, wi_1, wo)
    return y, expert_rows, bad_tokens


def _moe_forward(call, where, x, expert_ids, expert_weights, wi_0, wi_1, wo):
    call = dataclasses.replace(call, differentiated=True)
    operands = x, expert_ids, expert_weights, wi_0, wi_1, wo
    y, row_table, expert_rows, bad_tokens, pre_activations, rows, _ = _bind_forward(call, where, *operands)
    if call.save != "pre_activations_and_rows":
        rows = jnp.zeros_like(rows, shape=(0, rows.shape[1]))
    saved = checkpoint_name((row_table, expert_rows, pre_activations, rows), RESIDUALS_NAME)
    y = checkpoint_name(y, OUTPUT_NAME)
    return (y, expert_rows, bad_tokens), (where, operands, saved)


def _moe_backward(call, residuals, cotangents):
    where, (x, expert_ids, expert_weights, wi_0, wi_1, wo), saved = residuals
    dy = cotangents[0]
    call = dataclasses.replace(
        call,
        differentiated=True,
        weight_grad_dtype=np.dtype(np.float32) if wi_0.dtype == np.float32 else np.dtype(x.dtype),
    )
    weights = [w.astype(x.dtype) for w in (wi_0, wi_1, wo)]
    results = backward_p.bind(x, expert_ids, expert_weights, *weights, where, dy, *saved, call=call)
    dx, d_expert_weights, d_wi_0, d_wi_1, d_wo = results[:5]
    return None, dx, None, d_expert_weights, *(d.astype(wi_0.dtype) for d in (d_wi_0, d_wi_1, d_wo))


_moe.defvjp(_moe_forward, _moe_backward)


def _bind_forward(call, where, x, expert_ids, expert_weights, wi_0, wi_1, wo):
    weights = [w.astype(x.dtype) for w in (wi_0, wi_1, wo)]
    return forward_p.bind(x, expert_ids, expert_weights, *weights, where, call=call)


def _forward_results(call, x, wi_0):
    """Shapes and dtypes of the forward's results: what the handler in ``csrc/xla`` fills, in its order."""
    (_, hidden), (experts, _, intermediate) = x.shape, wi_0.shape
    kept = call.ring_rows if call.save != "nothing" else 0
    return [
        (x.shape, x.dtype),  # y
        ((call.max_rows, 2), np.int32),  # row table
        ((experts,), np.int32),  # rows per expert
        ((), np.int32),  # bad tokens
        ((kept, 2 * intermediate), x.dtype),  # pre-activations
        ((call.ring_rows, hidden), x.dtype),  # rows
        ((call.ring_rows, intermediate), x.dtype),  # hidden activations
    ]


def _backward_results(call, x, expert_weights, wi_0, wo):
    """Likewise of the backward: five gradients, then rings and scratch."""
    (_, hidden), (_, _, intermediate) = x.shape, wi_0.shape
    ring, overflow = call.ring_rows, call.ring_may_overflow
    pulled = ring if overflow or call.save != "pre_activations_and_rows" else 0
    replayed = ring if overflow or call.save == "nothing" else 0
    return [
        (x.shape, x.dtype),
        (expert_weights.shape, np.float32),
        (wi_0.shape, call.weight_grad_dtype),
        (wi_0.shape, call.weight_grad_dtype),
        (wo.shape, call.weight_grad_dtype),
        ((pulled, hidden), x.dtype),  # rows of x
        ((ring, hidden), x.dtype),  # rows of dy
        ((replayed, 2 * intermediate), x.dtype),  # pre-activations
        ((ring, intermediate), x.dtype),  # hidden activations times router weight
        ((ring, 2 * intermediate), x.dtype),  # gradients of gate and up
        ((ring,), np.float32),  # router weights
        ((ring, -(-intermediate // native.ROW_BLOCK)), np.float32),  # parts of the router gradient
        ((3 * hidden * intermediate if overflow else 0,), np.float32),  # accumulators of a straddling expert
    ]


def _like(operand, results):
    """Avals that vary over the axes that ``operand`` varies over."""
    if operand.sharding.mesh.empty:
        return tuple(ShapedArray(shape, np.dtype(dtype)) for shape, dtype in results)
    sharding = jax.sharding.NamedSharding(operand.sharding.mesh, jax.sharding.PartitionSpec())
    return tuple(
        ShapedArray(shape, np.dtype(dtype), sharding=sharding, manual_axis_type=operand.manual_axis_type)
        for shape, dtype in results
    )


def _forward_abstract(x, _ids, _weights, wi_0, _wi_1, _wo, _where, *, call):
    return _like(x, _forward_results(call, x, wi_0))


def _backward_abstract(x, _ids, expert_weights, wi_0, _wi_1, wo, _where, *_, call):
    return _like(x, _backward_results(call, x, expert_weights, wi_0, wo))


def _refuse_sharding(ctx, name):
    """Raises unless every device runs this call on arrays of its own; only lowering sees how a program is sharded."""
    context = ctx.module_context.axis_context
    if hasattr(context, "manual_axes"):
        automatic = [a for a in context.mesh.axis_names if a not in context.manual_axes and context.mesh.shape[a] > 1]
        if automatic:
            raise ValueError(
                f"mok_jax.{name} inside a shard_map that is not manual over mesh axes {automatic}: its arguments would "
                f"be gathered silently. Use shard_map over all axes, axis_names={set(context.mesh.axis_names)}"
            )
    elif context.num_devices > 1:
        raise ValueError(
            f"mok_jax.{name} outside jax.shard_map in a program for {context.num_devices} devices: its arguments would "
            "be gathered silently. Call it inside jax.shard_map over all mesh axes, or use mok_jax.nnx.MoE"
        )


def _lower_on_cpu(target, ctx, *operands, call):
    _refuse_sharding(ctx, "moe")
    native.register_cpu_targets()
    return jax.ffi.ffi_lowering(target, has_side_effect=False)(ctx, *operands, **call.attributes())


def _lower_elsewhere(ctx, *operands, call):
    raise NotImplementedError(
        f'implementation="megakernel" has no kernel for platform {ctx.module_context.platforms[0]!r} yet; '
        'use implementation="xla" there, or None to choose what the platform has'
    )


def _refuse_vmap(*_, **__):
    raise NotImplementedError(
        "mok_jax.moe does not support jax.vmap: a call already takes all tokens of its rank. Reshape leading dimensions "
        'into the token dimension of x, or use implementation="reference"'
    )


def _refuse_derivative(*_, **__):
    raise NotImplementedError(
        "mok_jax.moe has first derivatives in reverse mode only; for forward mode or second derivatives use "
        'implementation="reference"'
    )


def _make_primitive(name, abstract_rule):
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_abstract_eval(abstract_rule)
    compiled = jax.jit(primitive.bind, static_argnames="call")
    primitive.def_impl(lambda *operands, call: compiled(*operands, call=call))
    mlir.register_lowering(primitive, functools.partial(_lower_on_cpu, name), platform="cpu")
    mlir.register_lowering(primitive, _lower_elsewhere)
    batching.primitive_batchers[primitive] = _refuse_vmap
    ad.primitive_jvps[primitive] = _refuse_derivative
    return primitive


forward_p = _make_primitive("mok_forward", _forward_abstract)
backward_p = _make_primitive("mok_backward", _backward_abstract)
