"""The fused implementation: a ``custom_vjp`` around one JAX primitive, and one FFI call, per direction.

Primitives of our own, rather than ``jax.ffi.ffi_call``, for three reasons: abstract rules type results as varying over
the axes that the operands vary over, which gradients under ``shard_map`` need; lowering rules can see how the program
is sharded, and refuse what would be silently wrong; batching and differentiation rules say what cannot be done.

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
from jax.interpreters import ad, batching, mlir, xla

from mok_jax import native, support
from mok_jax.activation import ACTIVATIONS, Activation
from mok_jax.config import SAVE_POLICIES, MoKConfig, Save
from mok_jax.semantics import vary_alike
from mok_jax.stats import MoEStats

RESIDUALS_NAME = "mok_residuals"
OUTPUT_NAME = "mok_output"

# XLA's CPU collectives end the process after 40 s without a peer; ours must give up, with an error, before that.
HOST_TIMEOUT_LIMIT_S = 30.0
TIMEOUT_S = 30.0
GPU_ENTRY_TIMEOUT_S = 600.0

_SAVE_CODES: dict[Save, int] = {"nothing": 0, "pre_activations": 1, "pre_activations_and_rows": 2}
assert set(_SAVE_CODES) == set(SAVE_POLICIES)
_ACTIVATION_CODES: dict[Activation, int] = {"swiglu": 0, "gpt_oss": 1}
assert set(_ACTIVATION_CODES) == set(ACTIVATIONS)


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
    """What a call site fixes, apart from the shapes of its operands: the parameter of every primitive."""

    ranks: int
    ring_rows: int
    max_rows: int
    workspace_bytes: int
    activation: Activation
    activation_limit: float | None
    config: MoKConfig
    differentiated: bool = False
    weight_grad_dtype: np.dtype | None = None
    virtual_ranks: int = 1
    """Ranks that one GPU runs side by side, their arrays one after the other: more than 1 in tests alone."""

    @property
    def save(self) -> Save:
        return self.config.save if self.differentiated else "nothing"

    @property
    def ring_may_overflow(self) -> bool:
        """Whether more rows than the ring holds can arrive, so that there can be several macrobatches."""
        return self.max_rows > self.ring_rows

    def attributes(self, platform: str) -> dict[str, np.generic]:
        """As ``csrc/xla/attributes.h`` declares them; -1 leaves a choice to the handler."""
        config = self.config

        def or_unset(value: int | None) -> int:
            return -1 if value is None else value

        entry_timeout_s = config.entry_timeout_s or GPU_ENTRY_TIMEOUT_S
        timeout_s = config.timeout_s or TIMEOUT_S
        if platform == "cpu":
            entry_timeout_s, timeout_s = (min(t, HOST_TIMEOUT_LIMIT_S) for t in (entry_timeout_s, timeout_s))
        return {
            "ranks": np.int32(self.ranks),
            "save": np.int32(_SAVE_CODES[self.save]),
            "activation": np.int32(_ACTIVATION_CODES[self.activation]),
            "activation_limit": np.float32(math.inf if self.activation_limit is None else self.activation_limit),
            "ring_rows": np.int64(self.ring_rows),
            "minibatch_rows": np.int64(or_unset(config.minibatch_rows)),
            "communication_workers": np.int32(or_unset(config.host_comm_workers)),
            "compute_workers": np.int32(or_unset(config.host_compute_workers)),
            "delay_seed": np.int64(config.host_delay_seed),
            "entry_timeout_s": np.float64(entry_timeout_s),
            "timeout_s": np.float64(timeout_s),
            "communication_sms": np.int32(or_unset(config.comm_sms)),
            "reserved_sms": np.int32(or_unset(config.reserve_sms)),
            "virtual_ranks": np.int32(self.virtual_ranks),
        }


def moe(x, expert_ids, expert_weights, wi_0, wi_1, wo, *, axis_name, activation, activation_limit, config):
    """As ``mok_jax.moe``, on checked arguments. Returns ``(y, MoEStats)``."""
    ranks = 1 if axis_name is None else jax.lax.axis_size(axis_name)
    shape = ranks, x.shape[0], expert_ids.shape[1], wi_0.shape[0]
    call = make_call(*shape, activation, activation_limit, config)
    operands = x, expert_ids, expert_weights, wi_0, wi_1, wo
    varied = vary_alike(*operands, axis_name=axis_name)
    y, expert_rows, bad_tokens = _moe(call, axis_name, operands, *varied)
    return y, MoEStats(expert_rows.sum(dtype=jnp.int32), expert_rows, bad_tokens)


def make_call(ranks, tokens, top_k, local_experts, activation, activation_limit, config) -> Call:
    """The parameters of a call of these shapes, of one rank each: what sizes its buffers depends on nothing else."""
    bounds = {"ranks": ranks, "tokens": tokens, "top_k": top_k, "local_experts": local_experts}
    library = native.library()
    max_rows = library.max_rows(**bounds)
    ring_rows = min(max_rows, config.ring_rows or library.default_ring_rows(**bounds))
    workspace_bytes = library.workspace_bytes(**bounds, ring_rows=ring_rows)
    return Call(ranks, ring_rows, max_rows, workspace_bytes, activation, activation_limit, config)


def coordinates(axis_name):
    """int32 ``[2]``: this rank within its expert-parallel group, and the number of the group in the mesh."""
    if axis_name is None:
        return jnp.zeros(2, jnp.int32)
    axes = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    others = tuple(axis for axis in jax.sharding.get_abstract_mesh().manual_axes if axis not in axes)
    group = jax.lax.axis_index(others) if others else 0
    return jnp.stack([jax.lax.axis_index(axes), group]).astype(jnp.int32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _moe(call, axis_name, kept, *operands):
    """``operands`` vary alike; ``kept`` are the same as they came, of which the backward's residuals are."""
    del kept
    y, _, expert_rows, bad_tokens, *_ = _bind_forward(call, coordinates(axis_name), *operands)
    return y, expert_rows, bad_tokens


def _moe_forward(call, axis_name, kept, *operands):
    """The forward that saves. Residuals are the operands as they came, and what ``call.save`` names.

    Cast to vary like the others, weights that are replicated over a data axis would no longer be the arrays that a
    scan over layers already holds, and it would keep a second copy of all.
    """
    call = dataclasses.replace(call, differentiated=True)
    where = coordinates(axis_name)
    y, row_table, expert_rows, bad_tokens, pre_activations, rows, *_ = _bind_forward(call, where, *operands)
    saved = checkpoint_name((row_table, expert_rows, *what_is_kept(call, pre_activations, rows)), RESIDUALS_NAME)
    y = checkpoint_name(y, OUTPUT_NAME)
    return (y, expert_rows, bad_tokens), (kept, saved)


def _moe_backward(call, axis_name, residuals, cotangents):
    kept, saved = residuals
    where = coordinates(axis_name)  # no residual: it varies over axes of a shard_map around, which JAX does not lower
    dy, x, expert_ids, expert_weights, *weights = vary_alike(cotangents[0], *kept, axis_name=None)
    grad_dtype = weight_grad_dtype(x, weights[0])
    call = dataclasses.replace(call, differentiated=True, weight_grad_dtype=grad_dtype)
    rounded = [w.astype(x.dtype) for w in weights]
    results = backward_p.bind(x, expert_ids, expert_weights, *rounded, where, dy, *saved, call=call)
    dx, d_expert_weights, *d_weights = results[:5]
    return None, dx, None, d_expert_weights, *(d.astype(weights[0].dtype) for d in d_weights)


_moe.defvjp(_moe_forward, _moe_backward)


def what_is_kept(call, pre_activations, rows):
    """Those results of the forward that the ``save`` policy hands to the backward, besides the row table."""
    return {
        "nothing": (),
        "pre_activations": (pre_activations,),
        "pre_activations_and_rows": (pre_activations, rows),
    }[call.save]


def weight_grad_dtype(x, weight):
    """What the kernels write weight gradients in: float32 for float32 weights, not rounded in between."""
    return np.dtype(np.float32) if weight.dtype == np.float32 else np.dtype(x.dtype)


def _bind_forward(call, where, x, expert_ids, expert_weights, wi_0, wi_1, wo):
    weights = [w.astype(x.dtype) for w in (wi_0, wi_1, wo)]
    return forward_p.bind(x, expert_ids, expert_weights, *weights, where, call=call)


def _forward_results(call, x, wi_0):
    """Shapes and dtypes of the forward's results: what the handlers in ``csrc/xla`` fill, in their order."""
    (_, hidden), (experts, _, intermediate), n = x.shape, wi_0.shape, call.virtual_ranks
    ring, bits = n * call.ring_rows, _bits(x.dtype)
    return [
        (x.shape, x.dtype),  # y
        ((n * call.max_rows, 2), np.int32),  # row table
        ((experts,), np.int32),  # rows per expert
        ((n,) if n > 1 else (), np.int32),  # bad tokens
        ((ring if call.save != "nothing" else 0, native.library().pre_activation_width(intermediate)), bits),
        ((ring, hidden), bits),  # rows
        ((ring, intermediate), bits),  # hidden activations
        ((n * call.workspace_bytes,), np.uint8),
    ]


def _backward_results(call, x, expert_weights, wi_0, wo):
    """Likewise of the backward: five gradients, then rings and scratch."""
    (_, hidden), (_, _, intermediate), n = x.shape, wi_0.shape, call.virtual_ranks
    ring, overflow = n * call.ring_rows, call.ring_may_overflow
    pulled = ring if overflow or call.save != "pre_activations_and_rows" else 0
    replayed = ring if overflow or call.save == "nothing" else 0
    library = native.library()
    straddle = n * library.straddle_elements(hidden=hidden, intermediate=intermediate) if overflow else 0
    bits, wide = _bits(x.dtype), _bits(np.float32)
    return [
        (x.shape, x.dtype),
        (expert_weights.shape, np.float32),
        (wi_0.shape, call.weight_grad_dtype),
        (wi_0.shape, call.weight_grad_dtype),
        (wo.shape, call.weight_grad_dtype),
        ((pulled, hidden), bits),  # rows of x
        ((ring, hidden), bits),  # rows of dy
        ((replayed, library.pre_activation_width(intermediate)), bits),
        ((ring, intermediate), bits),  # hidden activations times router weight
        ((ring, 2 * intermediate), bits),  # gradients of gate and up
        ((ring,), wide),  # router weights
        ((ring, library.router_parts_width(intermediate)), wide),  # parts of the router gradient
        ((straddle,), wide),  # accumulators of a straddling expert
        ((n * call.workspace_bytes,), np.uint8),
    ]


def _bits(dtype):
    """Unsigned integers as wide as ``dtype``: the type of results that may hold bytes which nobody wrote.

    JAX's debug modes look for NaN and infinity in floats, and would find what memory held before.
    """
    return np.dtype(f"u{np.dtype(dtype).itemsize}")


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
            names = ", ".join(map(repr, context.mesh.axis_names))
            raise ValueError(
                f"mok_jax.{name} inside a shard_map that is not manual over mesh axes {automatic}: its arguments would "
                f"be gathered silently. Use shard_map over all axes, axis_names={{{names}}}; or "
                "mok_jax.nnx.MoE(mesh=...), which has one of its own"
            )
    elif context.num_devices > 1:
        raise ValueError(
            f"mok_jax.{name} outside jax.shard_map in a program for {context.num_devices} devices: its arguments would "
            "be gathered silently. Call it inside jax.shard_map over all mesh axes, or give a Flax layer its mesh: "
            "mok_jax.nnx.MoE(mesh=...)"
        )


def _complete_residuals(ctx, operands):
    """Adds an empty array for each of the two residuals that were not saved, since a handler's operands are fixed.

    Only here, because the compiler of jaxlib 0.11.2 crashes over an array without elements that enters a shard_map.
    """
    x, wi_0 = ctx.avals_in[0], ctx.avals_in[3]
    saved = len(operands) - 10
    widths = native.library().pre_activation_width(wi_0.shape[2]), x.shape[1]
    empty = [ShapedArray((0, width), _bits(x.dtype)) for width in widths[saved:]]
    constants = [mlir.ir_constant(np.zeros(aval.shape, aval.dtype)) for aval in empty]
    return ctx.replace(avals_in=[*ctx.avals_in, *empty]), [*operands, *constants]


def _check_place(ctx, platform, call):
    """Raises what the platform that is lowered for refuses, and the program's devices where they are known."""
    place = support.place_of_program(ctx.module_context, platform)
    support.check(place, ctx.avals_in[0], ctx.avals_in[3], call.ranks // call.virtual_ranks, call.activation)


def _lower(target, platform, ctx, *operands, call):
    _refuse_sharding(ctx, "moe")
    _check_place(ctx, platform, call)
    if platform == "cpu":
        native.register_cpu_targets()
    else:
        native.register_cuda_targets()
    if target == "mok_backward":
        ctx, operands = _complete_residuals(ctx, operands)
    return jax.ffi.ffi_lowering(target, has_side_effect=False)(ctx, *operands, **call.attributes(platform))


def _lower_elsewhere(ctx, *operands, call):
    _check_place(ctx, (ctx.platforms or ctx.module_context.platforms)[0], call)


def _refuse_vmap(*_, **__):
    raise NotImplementedError(
        "mok_jax.moe does not support jax.vmap: a call already takes all tokens of its rank. Reshape leading dimensions"
        ' into the token dimension of x (a Flax layer takes any), or use implementation="reference"'
    )


def _refuse_derivative(*_, **__):
    raise NotImplementedError(
        'mok_jax.moe has first derivatives in reverse mode only; for second derivatives use implementation="reference"'
    )


def _make_primitive(name, abstract_rule):
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_abstract_eval(abstract_rule)
    primitive.def_impl(functools.partial(xla.apply_primitive, primitive))
    for platform in ("cpu", "cuda"):
        mlir.register_lowering(primitive, functools.partial(_lower, name, platform), platform=platform)
    mlir.register_lowering(primitive, _lower_elsewhere)
    batching.primitive_batchers[primitive] = _refuse_vmap
    ad.primitive_jvps[primitive] = _refuse_derivative
    return primitive


forward_p = _make_primitive("mok_forward", _forward_abstract)
backward_p = _make_primitive("mok_backward", _backward_abstract)
