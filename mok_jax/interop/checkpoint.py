"""A layer's weights out of a checkpoint of Hugging Face's layout, shard by shard, and into one, expert by expert."""

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.typing import DTypeLike

import mok_jax.linen
import mok_jax.nnx
from mok_jax.interop import config as configuration
from mok_jax.interop import files, weights
from mok_jax.interop.files import Checkpoint
from mok_jax.interop.layouts import LAYOUTS, PARAMETER_AXES, PREFIXES, Layout, prefix_of
from mok_jax.interop.parameters import check_parameters, parameters_of
from mok_jax.layer import Parameter, Settings

type Layer = mok_jax.nnx.MoE | mok_jax.linen.MoE | Settings | Mapping[str, Any]


def load_layer(
    folder: str | Path,
    layer_number: int,
    layer: Layer | None = None,
    *,
    mesh: Mesh | None = None,
    model_type: str | None = None,
) -> dict[str, jax.Array]:
    """Reads the weights of one layer, each device's share of each parameter by itself.

    No host holds a parameter whole that is split over devices, and processes read what is on theirs. Weights may be
    bf16, f16 or f32; experts in MXFP4 (gpt-oss) are made values.

    Args:
      folder: with ``model.safetensors``, or several such files and ``model.safetensors.index.json``; and with
        ``config.json``, unless both ``layer`` and ``model_type`` are given.
      layer_number: the ``N`` of the tensors' ``layers.N``, as the model counts: dense layers included.
      layer: the layer, or its arguments; ``None`` takes those that ``config.json`` says. ``param_dtype`` is what comes
        back, and ``expert_axis`` and rules for logical axes say where it lies.
      mesh: where the parameters go; ``None`` takes the layer's mesh, or without one the default device.
      model_type: of :data:`mok_jax.interop.MODEL_TYPES`; ``None`` reads it from ``config.json``.

    Returns:
      The parameters by the names of ``Settings.parameters()``, with their shapes (experts padded with zeros where the
      mesh does not divide them), in ``param_dtype``; for a layer with a selection bias also ``expert_bias [E]``, f32.

    Raises:
      ValueError: a tensor of the layer is missing, is there without being one of its parameters, or has another shape
        or dtype; the folder has no such layer; the model type is unknown; or the mesh has no devices.
      ModuleNotFoundError: the package safetensors is not installed.
    """
    folder = Path(folder)
    settings = _settings(arguments_of(folder) if layer is None else layer, mesh)
    layouts = _layouts(_model_type(folder, model_type))
    with Checkpoint(folder) as checkpoint:
        prefix, layout = _find(checkpoint, layer_number, settings, layouts)
        return {
            name: _load(checkpoint, prefix, layout, settings, name, parameter)
            for name, parameter in weights.arrays_of(settings).items()
        }


def save_layer(
    folder: str | Path,
    layer_number: int,
    layer: Layer,
    parameters: Mapping[str, jax.Array] | None = None,
    *,
    model_type: str | None = None,
    dtype: DTypeLike | None = None,
    max_file_bytes: int = 5 * 10**9,
) -> None:
    """Writes the weights of one layer as :func:`load_layer` reads them, one expert in memory at a time.

    Layers of a model are saved into one folder, one after the other: each has files of its own, and they share an
    index. Padding is left out. ``config.json`` and the rest of the model are the caller's.

    Args:
      folder: made if it is not there.
      layer_number: as for :func:`load_layer`.
      layer: the layer, or its arguments.
      parameters: as :func:`load_layer` gives them, on devices of this process, with any padding; ``None`` takes those
        of an ``nnx.MoE``.
      model_type: of :data:`mok_jax.interop.MODEL_TYPES`; ``None`` reads it from ``config.json`` in the folder.
      dtype: bf16, f16 or f32, of all tensors but a selection bias, which stays f32; ``None`` takes the parameters'.
      max_file_bytes: of tensors in one file, unless one tensor has more.

    Raises:
      ValueError: a parameter is missing, has another shape, or has no place in such checkpoints; the folder has
        tensors of that layer, or a ``model.safetensors`` that an index would not be read beside; an array lies on
        other processes' devices, too.
      TypeError: ``dtype`` is another one.
    """
    folder, settings = Path(folder), _settings(layer, None)
    model_type = _model_type(folder, model_type)
    layout = _layouts(model_type)[0]
    weights.tensors_of(settings, layout)
    if parameters is None:
        if not isinstance(layer, mok_jax.nnx.MoE):
            raise ValueError(f"parameters is None; it must be given, since {type(layer).__name__} holds none.")
        parameters = parameters_of(layer)
    check_parameters(settings, parameters, any_padding=True)
    for name, array in parameters.items():
        if not array.is_fully_addressable:
            raise ValueError(f"{name} lies on devices of several processes; save_layer needs it on this one's.")
    prefix = f"{prefix_of(model_type)}layers.{layer_number}.{layout.block}"
    tensors = weights.tensors_to_write(settings, layout, prefix, parameters, dtype)
    if unknown := {str(tensor.dtype) for tensor in tensors} - {str(legal) for legal in files.DTYPES.values()}:
        raise TypeError(f"dtype is {', '.join(unknown)}; it must be bfloat16, float16 or float32.")
    _check_room(folder, {tensor.name for tensor in tensors})
    folder.mkdir(parents=True, exist_ok=True)
    split = files.in_files(tensors, max_file_bytes)
    placed: dict[str, str] = {}
    for number, those in enumerate(split, start=1):
        of = f"-{number:05d}-of-{len(split):05d}" if len(split) > 1 else ""
        name = f"model-layer-{layer_number:05d}{of}.safetensors"
        files.write_file(folder / name, those)
        placed |= {tensor.name: name for tensor in those}
    files.write_index(folder, placed, sum(tensor.nbytes for tensor in tensors))


def arguments_of(folder: str | Path) -> dict[str, Any]:
    """:func:`mok_jax.interop.arguments` of the ``config.json`` in ``folder``."""
    return configuration.arguments(_config(Path(folder)))


def _settings(layer: Layer, mesh: Mesh | None) -> Settings:
    if isinstance(layer, Settings):
        settings = layer
    elif isinstance(layer, Mapping):
        settings = Settings(**layer)
    else:
        settings = layer.settings
    return settings if mesh is None else dataclasses.replace(settings, mesh=mesh)


def _config(folder: Path) -> Mapping[str, Any]:
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} has no config.json, which says what the model is.")
    return json.loads((folder / "config.json").read_text())


def _model_type(folder: Path, model_type: str | None) -> str:
    """What was given, or what config.json says; one that is known."""
    model_type = _config(folder).get("model_type") if model_type is None else model_type
    configuration.text_model_type(model_type)
    return str(model_type)


def _layouts(model_type: str) -> tuple[Layout, ...]:
    """Those that a checkpoint of the model type comes in."""
    return LAYOUTS[configuration.text_model_type(model_type)]


def _find(checkpoint: Checkpoint, number: int, settings: Settings, layouts: tuple[Layout, ...]) -> tuple[str, Layout]:
    """The prefix and the layout of the layer's tensors, all of which are there as they must be."""
    best: tuple[int, str, Layout, set[str]] | None = None
    for layout in layouts:
        wanted = weights.names_of(settings, layout)
        for before in PREFIXES:
            prefix = f"{before}layers.{number}.{layout.block}"
            there = {name.removeprefix(prefix) for name in checkpoint.files if name.startswith(prefix)}
            if best is None or len(there & wanted) > best[0]:
                best = len(there & wanted), prefix, layout, there
    assert best is not None
    _, prefix, layout, there = best
    _check(checkpoint, number, settings, prefix, layout, there)
    return prefix, layout


def _check(
    checkpoint: Checkpoint, number: int, settings: Settings, prefix: str, layout: Layout, there: set[str]
) -> None:
    """Raises ValueError unless the tensors ``there``, behind the prefix, are all that the layer has, and no others."""
    wanted = weights.tensors_of(settings, layout)
    surplus = sorted(there - wanted.keys() - set(layout.ignored))
    if missing := [name for name in wanted if name not in there]:
        besides = f", but {_first(prefix, surplus)}" if surplus else ""
        others = _others(checkpoint, layout, number)
        raise ValueError(f"{checkpoint.folder} has no {_first(prefix, missing)}{besides}{others}.")
    if surplus:
        raise ValueError(
            f"{checkpoint.folder} has {_first(prefix, surplus)}, of which the layer has no parameter: give the layer "
            "that config.json describes, and weights that are not quantised."
        )
    for name, (shape, dtypes) in wanted.items():
        tensor = checkpoint.slice_of(prefix + name)
        if tuple(tensor.get_shape()) != shape:
            raise ValueError(f"{prefix}{name} has shape {tuple(tensor.get_shape())}; it must have shape {shape}.")
        if tensor.get_dtype() not in dtypes:
            raise ValueError(f"{prefix}{name} is {tensor.get_dtype()}; it must be {' or '.join(dtypes)}.")


def _first(prefix: str, names: list[str]) -> str:
    return prefix + names[0] + (f" (and {len(names) - 1} more)" if len(names) > 1 else "")


def _others(checkpoint: Checkpoint, layout: Layout, number: int) -> str:
    """Which layers have a router, where this one has none."""
    router = re.compile(r"\.?layers\.(\d+)\." + re.escape(layout.block + layout.tensors["gate"].name))
    numbers = sorted(int(match[1]) for name in checkpoint.files if (match := router.search(name)))
    if not numbers or number in numbers:
        return ""
    return f"; layers with experts are {numbers[0]} to {numbers[-1]}"


def _load(
    checkpoint: Checkpoint, prefix: str, layout: Layout, settings: Settings, name: str, parameter: Parameter
) -> jax.Array:
    sizes, tensor = weights.sizes_of(settings)[name], layout.tensors[name]
    dtype = np.dtype(jnp.float32 if name == "expert_bias" else settings.param_dtype)

    def share(index) -> np.ndarray:
        ranges = tuple(slice(*part.indices(size)[:2]) for part, size in zip(index, parameter.shape, strict=True))
        values = np.zeros([part.stop - part.start for part in ranges], dtype)
        if "e" not in PARAMETER_AXES[name]:
            values[...] = weights.read_part(checkpoint, prefix, tensor, name, sizes, ranges)
            return values
        experts, *inner = ranges
        for expert in range(experts.start, min(experts.stop, sizes["e"])):  # what is beyond stays zero
            one = (slice(expert, expert + 1), *inner)
            values[expert - experts.start] = weights.read_part(checkpoint, prefix, tensor, name, sizes, one)
        return values

    if settings.mesh is None:
        return jnp.asarray(share((slice(None),) * len(parameter.shape)))
    if isinstance(settings.mesh, AbstractMesh):
        raise ValueError(f"mesh is an AbstractMesh of {dict(settings.mesh.shape)}, which has no devices; give a Mesh.")
    along = NamedSharding(settings.mesh, settings.partition_spec(parameter.axes))
    return jax.make_array_from_callback(parameter.shape, along, share)


def _check_room(folder: Path, names: set[str]) -> None:
    if (folder / files.SINGLE).is_file() and not (folder / files.INDEX).is_file():
        raise ValueError(f"{folder} has a {files.SINGLE}, beside which no index is read; save into another folder.")
    there = sorted(names & files.files_of(folder).keys()) if folder.is_dir() else []
    if there:
        raise ValueError(f"{folder} has {_first('', there)} already; save into another folder.")
