"""Between the parameters of a layer and the tensors of a checkpoint: shapes, and parts in both directions.

A part is one expert's, or what has no experts. Everything here is NumPy.
"""

import functools
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from mok_jax.interop import mxfp4
from mok_jax.interop.files import BYTES, DTYPES, Checkpoint, Written
from mok_jax.interop.layouts import PARAMETER_AXES, Layout, Tensor
from mok_jax.layer import Parameter, Settings

type Index = tuple[slice, ...]


class Stored(NamedTuple):
    """What a checkpoint must have: the shape of a tensor, and in which dtypes."""

    shape: tuple[int, ...]
    dtypes: tuple[str, ...]


def arrays_of(settings: Settings) -> dict[str, Parameter]:
    """All that a checkpoint has of a layer: its parameters and, where it has one, ``expert_bias``."""
    selection = {"expert_bias": settings.expert_bias_parameter()} if settings.expert_bias else {}
    return settings.parameters() | selection


def sizes_of(settings: Settings) -> dict[str, dict[str, int]]:
    """Of each parameter, ``expert_bias`` included, the size of each of its :data:`PARAMETER_AXES`, without padding."""
    shapes = {name: parameter.shape for name, parameter in arrays_of(settings).items()}
    sizes = {name: dict(zip(PARAMETER_AXES[name], shape, strict=True)) for name, shape in shapes.items()}
    for axes in sizes.values():
        if "e" in axes:
            axes["e"] = settings.num_experts
    return sizes


def names_of(settings: Settings, layout: Layout) -> set[str]:
    """Behind the prefix, the names of all tensors that the layout has for the layer's parameters."""
    tensors = [layout.tensors[parameter] for parameter in sizes_of(settings) if parameter in layout.tensors]
    return {name for tensor in tensors for name in _names(tensor, settings.num_experts)}


def _names(tensor: Tensor, experts: int) -> list[str]:
    """Where each expert has a tensor, in the order of experts."""
    names = [tensor.name.format(expert=e) for e in range(experts)] if "{expert}" in tensor.name else [tensor.name]
    return [name + end for name in names for end in (("_blocks", "_scales") if tensor.mxfp4 else ("",))]


def tensors_of(settings: Settings, layout: Layout) -> dict[str, Stored]:
    """All tensors that the layer's parameters are, by their names behind the prefix.

    Raises:
      ValueError: the layer has a parameter that the layout has no place for, or sizes that MXFP4 cannot have.
    """
    found: dict[str, Stored] = {}
    for parameter, sizes in sizes_of(settings).items():
        if parameter not in layout.tensors:
            raise ValueError(
                f"the layer has {parameter}, for which such checkpoints have no tensor; they have "
                f"{', '.join(layout.tensors)}."
            )
        tensor = layout.tensors[parameter]
        shape = _stored_shape(tensor, sizes)
        stored = _packed(parameter, shape) if tensor.mxfp4 else [Stored(shape, tuple(DTYPES))]
        names = _names(tensor, settings.num_experts)
        found |= dict(zip(names, stored * (len(names) // len(stored)), strict=True))
    return found


def _packed(parameter: str, shape: tuple[int, ...]) -> list[Stored]:
    """Blocks and scales."""
    if shape[-1] % mxfp4.BLOCK:
        raise ValueError(f"{parameter} is stored in runs of {mxfp4.BLOCK} values, which {shape[-1]} does not have.")
    scales = (*shape[:-1], shape[-1] // mxfp4.BLOCK)
    return [Stored((*scales, mxfp4.BYTES), (BYTES,)), Stored(scales, (BYTES,))]


def _stored_shape(tensor: Tensor, sizes: Mapping[str, int]) -> tuple[int, ...]:
    width = {"o": 2 * sizes["o"]} if tensor.part else {}
    return tuple({"1": 1, **sizes, **width}[axis] for axis in tensor.axes)


def read_part(
    checkpoint: Checkpoint, prefix: str, tensor: Tensor, parameter: str, sizes: Mapping[str, int], index: Index
) -> np.ndarray:
    """What a checkpoint has of ``parameter[index]``, of one expert where it has experts, and without their dimension.

    Args:
      checkpoint: with the tensors of :func:`tensors_of`.
      prefix: before their names.
      tensor: where the parameter is.
      parameter: its name.
      sizes: of its axes.
      index: a range for each dimension.
    """
    axes = PARAMETER_AXES[parameter]
    ranges = dict(zip(axes, index, strict=True))
    name = prefix + tensor.name.format(expert=ranges["e"].start if "e" in ranges else None)
    ranges["o"] = _stored_columns(tensor, ranges["o"], sizes["o"])
    wanted = tuple({"1": slice(0, 1), **ranges}[axis] for axis in tensor.axes)
    stored = (_dequantize if tensor.mxfp4 else _read)(checkpoint, name, wanted)
    own = _own_columns(tensor, sizes["o"]) if tensor.part in ("even", "odd") else slice(None)
    return _as_parameter(stored, tensor, axes, own)


def _stored_columns(tensor: Tensor, wanted: slice, width: int) -> slice:
    """The run of stored columns that has the parameter's columns ``wanted``, and others where the two alternate."""
    if tensor.part in ("even", "odd"):
        return slice(2 * wanted.start, 2 * wanted.stop)
    return slice(wanted.start + width, wanted.stop + width) if tensor.part == "second half" else wanted


def _own_columns(tensor: Tensor, width: int) -> slice:
    """Which stored columns are the parameter's."""
    return {
        None: slice(None),
        "first half": slice(0, width),
        "second half": slice(width, None),
        "even": slice(0, None, 2),
        "odd": slice(1, None, 2),
    }[tensor.part]


def _read(checkpoint: Checkpoint, name: str, index: Index) -> np.ndarray:
    return checkpoint.slice_of(name)[index]


def _dequantize(checkpoint: Checkpoint, name: str, index: Index) -> np.ndarray:
    *before, last = index
    groups = slice(last.start // mxfp4.BLOCK, -(-last.stop // mxfp4.BLOCK))
    scales = checkpoint.slice_of(f"{name}_scales")[(*before, groups)]
    blocks = checkpoint.slice_of(f"{name}_blocks")[(*before, groups, slice(0, mxfp4.BYTES))]
    first = groups.start * mxfp4.BLOCK
    return mxfp4.dequantize(blocks, scales)[..., last.start - first : last.stop - first]


def _as_parameter(stored: np.ndarray, tensor: Tensor, axes: str, columns: slice) -> np.ndarray:
    """A view of one expert's part of a tensor as the parameter has it: its axes without ``e``, its columns alone."""
    kept = [axis for axis in tensor.axes if axis not in "e1"]
    stored = stored.reshape([size for axis, size in zip(tensor.axes, stored.shape, strict=True) if axis not in "e1"])
    wanted = axes.replace("e", "")
    part = stored.transpose([kept.index(axis) for axis in wanted])
    return part[tuple(columns if axis == "o" else slice(None) for axis in wanted)]


def tensors_to_write(
    settings: Settings, layout: Layout, prefix: str, parameters: Mapping[str, jax.Array], dtype: DTypeLike | None
) -> list[Written]:
    """The tensors of a layer, each expert of which is fetched from the devices when its bytes are asked for.

    Args:
      settings: of the layer.
      layout: one that :func:`tensors_of` has accepted, without MXFP4.
      prefix: before all names.
      parameters: of the layer, padding included.
      dtype: of all tensors but ``expert_bias``, which stays f32; ``None`` takes the parameters'.
    """
    sizes = sizes_of(settings)
    sharing: dict[str, list[str]] = {}  # by a tensor's name, the parameters in it
    for parameter in sizes:
        sharing.setdefault(layout.tensors[parameter].name, []).append(parameter)
    tensors = []
    for name, those in sharing.items():
        shape = _stored_shape(layout.tensors[those[0]], sizes[those[0]])
        stored_in = np.dtype(jnp.float32 if those == ["expert_bias"] else dtype or parameters[those[0]].dtype)
        places = tuple((layout.tensors[p], PARAMETER_AXES[p], sizes[p]["o"], parameters[p]) for p in those)
        experts: tuple[int | None, ...] = (None,)
        if "e" in sizes[those[0]]:
            experts = tuple(range(settings.num_experts))
        for together in [(e,) for e in experts] if "{expert}" in name else [experts]:
            pieces = functools.partial(_pieces, places, together, shape, stored_in)
            tensors.append(Written(prefix + name.format(expert=together[0]), stored_in, shape, pieces))
    return tensors


def _pieces(places, experts: tuple[int | None, ...], shape: tuple[int, ...], dtype: np.dtype) -> Iterator[np.ndarray]:
    """A tensor as it is stored, an expert at a time."""
    for expert in experts:
        stacked = places[0][0].axes.startswith("e")
        piece = np.empty((1, *shape[1:]) if stacked else shape, dtype)
        for tensor, axes, width, array in places:
            _as_parameter(piece, tensor, axes, _own_columns(tensor, width))[...] = _fetch(array, expert)
        yield piece


def _fetch(array: jax.Array, expert: int | None) -> np.ndarray:
    """An array, or one expert of it, from the devices that hold it: no other device is asked, and none computes."""
    fetched = np.empty(array.shape if expert is None else array.shape[1:], array.dtype)
    for shard in array.addressable_shards:
        if expert is None:
            fetched[shard.index] = np.asarray(shard.data)
            continue
        start, stop, _ = shard.index[0].indices(array.shape[0])
        if start <= expert < stop and shard.replica_id == 0:
            fetched[shard.index[1:]] = np.asarray(shard.data[expert - start])
    return fetched
