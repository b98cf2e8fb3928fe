"""The two primitives.

Primitives of our own, rather than ``jax.ffi.ffi_call``, for three reasons: abstract rules type results as varying over
the axes that the operands vary over, which gradients under ``shard_map`` need; lowering rules can see how the program
is sharded, and refuse what would be silently wrong; batching and differentiation rules say what cannot be done.
"""

import functools
import hashlib
import math

import jax
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir, xla

from mok_jax import native, support
from mok_jax.megakernel.buffers import (
    BackwardOperands,
    BackwardResults,
    ForwardOperands,
    ForwardResults,
    backward_results,
    empty_residuals,
    forward_results,
    name_backward_operands,
    name_forward_operands,
)
from mok_jax.megakernel.call import Call


def forward(call: Call, operands: ForwardOperands) -> ForwardResults:
    """One call of the forward."""
    return ForwardResults(*forward_p.bind(*operands, call=call))


def backward(call: Call, operands: BackwardOperands) -> BackwardResults:
    """One call of the backward; residuals that were not saved are None."""
    return BackwardResults(*backward_p.bind(*(o for o in operands if o is not None), call=call))


def _like(operand, results):
    """Avals that vary over the axes that ``operand`` varies over."""
    if operand.sharding.mesh.empty:
        return tuple(ShapedArray(shape, np.dtype(dtype)) for shape, dtype in results)
    sharding = jax.sharding.NamedSharding(operand.sharding.mesh, jax.sharding.PartitionSpec())
    return tuple(
        ShapedArray(shape, np.dtype(dtype), sharding=sharding, manual_axis_type=operand.manual_axis_type)
        for shape, dtype in results
    )


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


def _complete_residuals(ctx, avals, operands):
    """Puts an empty array for each residual that was not saved, since a handler's operands are fixed.

    Only here, because the compiler of jaxlib 0.11.2 crashes over an array without elements that enters a shard_map.
    """
    for name, (shape, dtype) in empty_residuals(avals).items():
        avals = avals._replace(**{name: ShapedArray(shape, dtype)})
        operands = operands._replace(**{name: mlir.ir_constant(np.zeros(shape, dtype))})
    return ctx.replace(avals_in=list(avals)), operands


def _check_place(ctx, platform, call, avals):
    """Raises what the platform that is lowered for refuses, and the program's devices where they are known."""
    place = support.place_of_program(ctx.module_context, platform)
    support.check(place, avals.x, avals.wi_0, call.ranks // call.virtual_ranks, call.activation)


def _groups(ctx, call):
    """int64: the devices of each expert-parallel group, by their places in the program, group after group.

    In the order of ranks, as a collective of JAX's over ``call.axes`` has its replica groups.
    """
    context = ctx.module_context.axis_context
    if not call.axes:
        return np.arange(call.ranks // call.virtual_ranks)
    names, sizes = context.mesh.axis_names, tuple(context.mesh.shape.values())
    others = [i for i, name in enumerate(names) if name not in call.axes]
    places = np.arange(math.prod(sizes)).reshape(sizes)
    return places.transpose(*others, *(names.index(name) for name in call.axes)).reshape(-1)


def _program(ctx):
    """int64: a hash of the program's name. Where in it a call is JAX does not tell: it lowers calls alike once."""
    name = ctx.module_context.module.operation.attributes["sym_name"]
    return np.int64(int.from_bytes(hashlib.sha256(str(name).encode()).digest()[:7]))


def _make_primitive(name, name_operands, results):
    """The primitive ``name``, lowered to the FFI target of that name.

    Args:
      name: of both.
      name_operands: from the call and the primitive's operands, or their avals, to the tuple that names them.
      results: from the call and such a tuple of avals to a ``Spec`` of each result.
    """

    def abstract(*avals, call):
        operands = name_operands(call, avals)
        return _like(operands.x, results(call, operands))

    def lower(platform, ctx, *operands, call):
        avals = name_operands(call, ctx.avals_in)
        _refuse_sharding(ctx, "moe")
        _check_place(ctx, platform, call, avals)
        if platform == "cpu":
            native.register_cpu_targets()
        else:
            native.register_cuda_targets()
        ctx, operands = _complete_residuals(ctx, avals, name_operands(call, operands))
        attributes = {"interface": np.int32(native.INTERFACE), **call.attributes(platform)}
        attributes |= {"groups": _groups(ctx, call).astype(np.int64), "program": _program(ctx)}
        return jax.ffi.ffi_lowering(name, has_side_effect=False)(ctx, *operands, **attributes)

    def lower_elsewhere(ctx, *_, call):
        platform = (ctx.platforms or ctx.module_context.platforms)[0]
        _check_place(ctx, platform, call, name_operands(call, ctx.avals_in))

    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_abstract_eval(abstract)
    primitive.def_impl(functools.partial(xla.apply_primitive, primitive))
    for platform in ("cpu", "cuda"):
        mlir.register_lowering(primitive, functools.partial(lower, platform), platform=platform)
    mlir.register_lowering(primitive, lower_elsewhere)
    batching.primitive_batchers[primitive] = _refuse_vmap
    ad.primitive_jvps[primitive] = _refuse_derivative
    return primitive


def _refuse_vmap(*_, **__):
    raise NotImplementedError(
        "mok_jax.moe does not support jax.vmap: a call already takes all tokens of its rank. Reshape leading dimensions"
        ' into the token dimension of x (a Flax layer takes any), or use implementation="reference"'
    )


def _refuse_derivative(*_, **__):
    raise NotImplementedError(
        'mok_jax.moe has first derivatives in reverse mode only; for second derivatives use implementation="reference"'
    )


forward_p = _make_primitive("mok_forward", name_forward_operands, forward_results)
backward_p = _make_primitive("mok_backward", name_backward_operands, backward_results)
