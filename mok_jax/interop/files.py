"""Safetensors files: which tensors a folder holds, parts of them, and writing one piece by piece.

Reading is the package safetensors'. Its writer wants a file's tensors whole in memory, so that writing is here: a file
is the length of its header (8 bytes), the header (JSON) and the tensors' bytes.
"""

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"

DTYPES = {"BF16": np.dtype(jnp.bfloat16), "F16": np.dtype(np.float16), "F32": np.dtype(np.float32)}
"""What weights may be stored in."""

BYTES = "U8"
"""What MXFP4 is stored in."""


class Checkpoint:
    """The tensors of a folder, by name; a context manager, which keeps files open.

    Raises:
      ValueError: the folder has no safetensors, or its index names a file or a tensor that is not there.
    """

    def __init__(self, folder: Path):
        self.folder, self._stack = folder, contextlib.ExitStack()
        self._open: dict[str, tuple[Any, set[str]]] = {}
        self.files = files_of(folder)
        if not self.files:
            raise ValueError(f"{folder} has neither {INDEX} nor {SINGLE}, with tensors in it.")

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *error) -> None:
        self._stack.close()

    def slice_of(self, name: str) -> Any:
        """The tensor ``name``, of which indexing reads a part; it has ``get_shape()`` and ``get_dtype()``."""
        file = self.files[name]
        if file not in self._open:
            if not (self.folder / file).is_file():
                raise ValueError(f"{INDEX} says that {name} is in {file}, which {self.folder} does not have.")
            opened = self._stack.enter_context(safe_open(self.folder / file))
            self._open[file] = opened, set(opened.keys())
        opened, names = self._open[file]
        if name not in names:
            raise ValueError(f"{INDEX} says that {name} is in {file}, which does not have it.")
        return opened.get_slice(name)


def safe_open(path: Path) -> Any:
    """``safetensors.safe_open`` for NumPy, or what to install."""
    try:
        import safetensors
    except ModuleNotFoundError:
        text = "Weights are read by the package safetensors, which is not installed: pip install safetensors"
        raise ModuleNotFoundError(text) from None
    return safetensors.safe_open(path, framework="numpy")


def files_of(folder: Path) -> dict[str, str]:
    """By tensor, the name of its file; empty where the folder has none."""
    if (folder / INDEX).is_file():
        return dict(json.loads((folder / INDEX).read_text())["weight_map"])
    if (folder / SINGLE).is_file():
        with safe_open(folder / SINGLE) as file:
            return dict.fromkeys(file.keys(), SINGLE)
    return {}


class Written(NamedTuple):
    """A tensor to write.

    Attributes:
      name: in the file.
      dtype: one of :data:`DTYPES`.
      shape: whole.
      pieces: makes its bytes, a piece at a time along the first dimension.
    """

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    pieces: Callable[[], Iterator[np.ndarray]]

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * int(np.prod(self.shape, dtype=np.int64))


def in_files(tensors: Iterable[Written], limit: int) -> list[list[Written]]:
    """``tensors`` in files of at most ``limit`` bytes each, or of one tensor."""
    files: list[list[Written]] = []
    room = -1
    for tensor in tensors:
        if tensor.nbytes > room:
            files.append([])
            room = limit
        files[-1].append(tensor)
        room -= tensor.nbytes
    return files


def write_file(path: Path, tensors: Iterable[Written]) -> None:
    """Writes one file, holding a piece of one tensor at a time; nobody sees it before it is whole."""
    # Larger elements first, so that all are aligned: the order of the package safetensors.
    ordered = sorted(tensors, key=lambda tensor: (-tensor.dtype.itemsize, tensor.name))
    names = {dtype: name for name, dtype in DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # without which transformers refuses a file
    end = 0
    for tensor in ordered:
        start, end = end, end + tensor.nbytes
        header[tensor.name] = {
            "dtype": names[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    beside = path.with_name(path.name + ".writing")
    with open(beside, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in ordered:
            for piece in tensor.pieces():
                file.write(np.ascontiguousarray(piece).tobytes())
    os.replace(beside, path)


def write_index(folder: Path, files: Mapping[str, str], nbytes: int) -> None:
    """Writes the index, or adds to it: ``files`` by tensor, which have ``nbytes`` together."""
    index = folder / INDEX
    there = json.loads(index.read_text()) if index.is_file() else {}
    total = there.get("metadata", {}).get("total_size", 0) + nbytes
    weight_map = dict(sorted((there.get("weight_map", {}) | dict(files)).items()))
    beside = folder / (INDEX + ".writing")
    beside.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2) + "\n")
    os.replace(beside, index)
