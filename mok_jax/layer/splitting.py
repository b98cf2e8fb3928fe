"""A layer's tokens over the devices of its mesh: each device's share of them, and what is computed on shares.

Where the layer is called decides over which axes: over all of its mesh, or, inside somebody's ``shard_map``, over those
that are not manual there.
"""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mok_jax.semantics import axis_names


class Split(NamedTuple):
    """Where tokens are split.

    Attributes:
      mesh: with automatic axes, or ``None`` for the mesh that the caller is under.
      axes: of that mesh; tokens are split over all of them.
      size: devices along those axes.
    """

    mesh: Mesh | AbstractMesh | None
    axes: tuple[str, ...]
    size: int


def split_over(mesh: Mesh | AbstractMesh | None, expert_axis: str | tuple[str, ...]) -> Split | None:
    """How a layer with this mesh splits tokens where it is called; ``None`` where there is one device.

    Raises:
      ValueError: the caller is under a mesh without the layer's axes, or inside a ``shard_map`` over ``expert_axis``.
    """
    if mesh is None:
        return None
    around = jax.sharding.get_abstract_mesh()
    if around.empty:
        check_has_devices(mesh)
        shape, axes = mesh.shape, mesh.axis_names
        of_its_own = mesh.update(axis_types=(AxisType.Auto,) * len(axes))
    else:
        _check_mesh_around(mesh, expert_axis, around)
        shape, of_its_own = around.shape, None
        axes = tuple(axis for axis in around.axis_names if axis not in around.manual_axes)
    size = math.prod(shape[axis] for axis in axes)
    return None if size == 1 else Split(of_its_own, axes, size)


def explicit_axes(mesh: Mesh | AbstractMesh | None) -> tuple[str, ...]:
    """The axes whose shardings are part of the types where the caller is.

    Raises:
      ValueError: they would have to be, but the caller is not under a mesh.
    """
    around = jax.sharding.get_abstract_mesh()
    if mesh is None:
        spread = [axis for axis in around.explicit_axes if around.shape[axis] > 1]
        if spread:
            raise ValueError(
                f"mesh is None, but the layer is called under a mesh with explicit axes {spread} of several devices: "
                "give the layer that mesh, and as expert_axis one of its axes."
            )
        return ()
    if around.empty and AxisType.Explicit in mesh.axis_types:
        raise ValueError(
            f"mesh has explicit axes {mesh.axis_names}: call the layer inside `with jax.set_mesh(mesh)`, "
            "or use a mesh with automatic axes, such as mok_jax.sharding.make_mesh makes."
        )
    return around.explicit_axes


def map_shares[T](
    split: Split | None,
    step: Callable[..., T],
    rows: tuple[jax.Array | None, ...],
    others: Sequence[jax.Array | None],
    along: P,
) -> T:
    """``step(*rows, *others)`` of each device's share of ``rows [N, ...]``; ``others`` lie ``along`` axes of a mesh."""
    if split is None:
        return step(*rows, *others)
    by_token = P(split.axes)
    in_specs = (by_token,) * len(rows) + (along,) * len(others)
    step = jax.shard_map(step, mesh=split.mesh, in_specs=in_specs, out_specs=by_token, axis_names=set(split.axes))
    results = step(*jax.tree.map(functools.partial(_pad, split), rows), *others)
    if any(jax.typeof(array).manual_axis_type.varying for array in jax.tree.leaves(results)):
        results = _refuse_gradient(results)
    tokens = jax.tree.leaves(rows)[0].shape[0]
    return jax.tree.map(lambda a: a[:tokens], results)


def share(split: Split | None, rows: jax.Array) -> jax.Array:
    """``rows [N, ...]``, padded to what the devices can share, each device having its share of them."""
    if split is None:
        return rows
    # Said here, padding included: of tokens that the mesh does not divide, XLA would compute some on every device.
    by_token = P(split.axes) if split.mesh is None else NamedSharding(split.mesh, P(split.axes))
    return jax.lax.with_sharding_constraint(_pad(split, rows), by_token)


def _pad(split: Split, rows: jax.Array) -> jax.Array:
    """``rows [N, ...]`` with as many more as the devices need to share them evenly: zeros, or ids of no expert."""
    padding = [(0, -rows.shape[0] % split.size)] + [(0, 0)] * (rows.ndim - 1)
    return jnp.pad(rows, padding, constant_values=-1 if jnp.issubdtype(rows.dtype, jnp.integer) else 0)


@jax.custom_vjp
def _refuse_gradient(results):
    """What a ``shard_map`` inside one that checks types computed: JAX cannot differentiate it (0.11.2 to 0.12)."""
    return results


def _gradient_is_refused(_):
    axes = jax.sharding.get_abstract_mesh().manual_axes
    raise NotImplementedError(
        f"the gradient of a mok_jax layer inside a jax.shard_map over {axes} with check_vma=True: JAX cannot lower "
        "that of one shard_map in another. Give yours check_vma=False; a gradient taken outside it stays the same."
    )


_refuse_gradient.defvjp(_gradient_is_refused, lambda *_: ())


def check_types(arrays: Iterable[jax.Array]) -> None:
    """Raises ValueError for an array that comes from a mesh with explicit axes, under one with automatic axes."""
    around = jax.sharding.get_abstract_mesh()
    if around.empty or AxisType.Explicit in around.axis_types:
        return
    for array in arrays:
        theirs = jax.typeof(array).sharding.mesh
        if AxisType.Explicit in theirs.axis_types:
            raise ValueError(
                f"an array of shape {array.shape} lies on a mesh with explicit axes {theirs.explicit_axes}, but the "
                f"layer is called under one with axes {around.axis_names} of types {around.axis_types}: make the layer "
                "and its input on the mesh that jax.set_mesh gets."
            )


def check_has_devices(mesh: Mesh | AbstractMesh | None) -> None:
    """Raises ValueError for an ``AbstractMesh`` where no mesh with devices is around."""
    if isinstance(mesh, AbstractMesh) and jax.sharding.get_abstract_mesh().empty:
        raise ValueError(
            f"mesh is an AbstractMesh of {dict(mesh.shape)}, which has no devices: make and call the layer inside "
            "`with jax.set_mesh(...)` of a jax.sharding.Mesh, or give it that mesh."
        )


def _check_mesh_around(mesh: Mesh | AbstractMesh, expert_axis: str | tuple[str, ...], around: AbstractMesh) -> None:
    if any(around.shape.get(axis) != size for axis, size in mesh.shape.items()):
        raise ValueError(
            f"mesh has axes {dict(mesh.shape)}, but the layer is called under a mesh of {dict(around.shape)} "
            "(jax.set_mesh or jax.shard_map). Give the layer that mesh, and as expert_axis one of its axes."
        )
    axes = axis_names(expert_axis)
    if any(axis in around.manual_axes and around.shape[axis] > 1 for axis in axes):
        raise ValueError(
            f"expert_axis={expert_axis!r}: the layer is called inside a jax.shard_map over it, and makes one of its "
            f"own there. Leave it out of the axis_names of yours, such as axis_names={set(around.axis_names) - {*axes}}"
            f", or call mok_jax.moe(..., axis_name={expert_axis!r}) with this rank's tokens and experts."
        )
