"""Bytes to train on: real text that every machine has, or the user's own.

By default the Python standard library's own sources, read from the running interpreter, so that the demonstration
downloads nothing. Held-out text comes from other *files* than training text, where there are enough of them.
"""

import itertools
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

# Tests repeat each other, and what pip installed differs from machine to machine.
_EXCLUDED_FOLDERS = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})

# One file in 20 is held out, starting inside the alphabet.
_HELD_OUT_EVERY, _HELD_OUT_FIRST = 20, 10


class Corpus(NamedTuple):
    """Attributes:
    train: uint8 ``[bytes]``.
    held_out: uint8 ``[bytes]``, of other files.
    source: where it came from, for people.
    """

    train: np.ndarray
    held_out: np.ndarray
    source: str


def load_corpus(path: str | os.PathLike | None = None) -> Corpus:
    """Reads a corpus, always in the same order.

    Args:
      path: a text file, or a folder of text files (searched to any depth, without folders of tests; files that are
        not UTF-8 are skipped). ``None`` is the Python standard library. Of fewer than 20 files the last tenth of
        the bytes is held out.

    Returns:
      A :class:`Corpus`.

    Raises:
      OSError: ``path`` does not exist or cannot be read.
      ValueError: it is no text in UTF-8, or there is none in it.

    Example:
      >>> corpus = load_corpus()
      >>> corpus.train.size > 5 * corpus.held_out.size > 0
      True
    """
    if path is None:
        root = Path(sysconfig.get_path("stdlib"))
        texts, source = _read_folder(root, "*.py"), "Python standard library"
    else:
        root = Path(path)
        if not root.exists():
            raise FileNotFoundError(f"data={str(path)!r} does not exist; name a text file or a folder of them.")
        texts, source = (_read_folder(root, "*") if root.is_dir() else [_read_file(root)]), str(path)
    if not sum(map(len, texts)):
        raise ValueError(f"data={source!r} holds no text.")
    if len(texts) < _HELD_OUT_EVERY:
        joined = b"\n".join(texts)
        cut = len(joined) - len(joined) // 10
        return Corpus(_as_array([joined[:cut]]), _as_array([joined[cut:]]), source)
    held_out = texts[_HELD_OUT_FIRST::_HELD_OUT_EVERY]
    train = [text for index, text in enumerate(texts) if index % _HELD_OUT_EVERY != _HELD_OUT_FIRST]
    return Corpus(_as_array(train), _as_array(held_out), source)


def random_crops(text: np.ndarray, batch_size: int, length: int, seed: int, first: int = 0) -> Iterator[np.ndarray]:
    """Yields int32 ``[batch_size, length]`` without end, from step ``first`` on.

    A step's crops depend on seed and step alone, so that a run which is resumed sees what it would have seen.

    Raises:
      ValueError: the text is shorter than one crop.
    """
    check_long_enough(text, length)
    for step in itertools.count(first):
        starts = np.random.default_rng([seed, step]).integers(0, text.size - length + 1, size=batch_size)
        yield text[starts[:, None] + np.arange(length)].astype(np.int32)


def spread_crops(text: np.ndarray, batch_size: int, length: int, batches: int) -> Iterator[np.ndarray]:
    """Yields ``batches`` times int32 ``[batch_size, length]``, spread evenly over the text: for evaluation.

    Raises:
      ValueError: the text is shorter than one crop.
    """
    check_long_enough(text, length)
    starts = np.linspace(0, text.size - length, num=batch_size * batches, dtype=np.int64)
    for batch in starts.reshape(batches, batch_size):
        yield text[batch[:, None] + np.arange(length)].astype(np.int32)


def check_long_enough(text: np.ndarray, length: int, name: str = "text") -> None:
    """Raises ValueError unless a crop of ``length`` bytes can be cut from ``text``."""
    if text.size < length:
        raise ValueError(
            f"the {name} has {text.size} bytes; a crop takes {length}. Use more text or shorter sequences."
        )


def _read_file(path: Path) -> bytes:
    text = path.read_bytes() if path.is_file() else b"\0"  # A pipe or a device may have no end.
    if not _is_text(text):
        raise ValueError(f"data={str(path)!r} is not text in UTF-8; name a text file or a folder of them.")
    return text


def _read_folder(root: Path, pattern: str) -> list[bytes]:
    texts = []
    for file in sorted(root.rglob(pattern)):
        # Only what lies below the root counts: the root itself may well be inside a folder called "test".
        if _EXCLUDED_FOLDERS.isdisjoint(file.relative_to(root).parts[:-1]) and file.is_file():
            text = file.read_bytes()
            if _is_text(text):
                texts.append(text)
    return texts


def _is_text(text: bytes) -> bool:
    try:
        return "\0" not in text.decode("utf-8")
    except UnicodeDecodeError:
        return False


def _as_array(texts: list[bytes]) -> np.ndarray:
    return np.frombuffer(b"\n".join(texts), dtype=np.uint8)
