"""What the command lines of this repository share: refusals of one line, checked numbers, and folders of results."""

import argparse
import json
import math
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NoReturn

_EARLIER = "earlier-"


class Parser(argparse.ArgumentParser):
    """Refuses a command line in one line on stderr, with exit code 2.

    Example:
      >>> Parser("shown").parse_args([])
      Namespace()
    """

    def error(self, message: str) -> NoReturn:
        """Says what is wrong, without the usage that ``--help`` shows."""
        self.exit(2, f"{self.prog.removeprefix('python -m ')}: {message}\n")


def say_refused(refusal: Exception, *, as_json: bool) -> None:
    """Says why a command does not do what it was asked for: on stderr or, for machines, as JSON on stdout.

    Example:
      >>> say_refused(ValueError("gpus=0 must be at least 1"), as_json=True)
      {"refused": "gpus=0 must be at least 1"}
    """
    if as_json:
        print(json.dumps({"refused": str(refusal)}))
    else:
        print(f"refused: {refusal}", file=sys.stderr)


def whole(least: int, most: int | None = None) -> Callable[[str], int]:
    """The type of an option that is a whole number within bounds.

    Example:
      >>> whole(1)("12")
      12
    """

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} must be a whole number, such as {least}") from None
        nearest = max(least, value if most is None else min(value, most))
        if nearest != value:
            bounds = f"at least {least}" if most is None else f"from {least} to {most}"
            raise argparse.ArgumentTypeError(f"{value} must be {bounds}; the nearest is {nearest}")
        return value

    return parse


def positive(text: str) -> float:
    """The type of an option that is a finite number above 0.

    Example:
      >>> positive("1e-3")
      0.001
    """
    return _finite(text, lambda value: value > 0, "above 0")


def not_negative(text: str) -> float:
    """The type of an option that is a finite number of at least 0.

    Example:
      >>> not_negative("0")
      0.0
    """
    return _finite(text, lambda value: value >= 0, "of at least 0")


def add_process_options(parser: Any) -> None:
    """Adds ``--coordinator``, ``--processes`` and ``--process-id``, for :func:`join_processes`."""
    parser.add_argument(
        "--coordinator", metavar="HOST:PORT", help="where several processes meet, each of which runs this (one runs)"
    )
    parser.add_argument("--processes", type=whole(1), metavar="N", help="how many there are (1)")
    parser.add_argument("--process-id", type=whole(0), metavar="N", help="which one this is (0)")


def join_processes(arguments: argparse.Namespace) -> None:
    """Makes this process one of several, where the command line says so; before JAX is asked for devices."""
    if arguments.coordinator:
        import jax

        jax.distributed.initialize(arguments.coordinator, arguments.processes, arguments.process_id)


def _finite(text: str, is_legal: Callable[[float], bool], bounds: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number, such as 0.5") from None
    if not math.isfinite(value) or not is_legal(value):
        raise argparse.ArgumentTypeError(f"{text} must be a finite number {bounds}")
    return value


def check_folder(folder: Path) -> None:
    """Raises OSError where ``folder`` is none, or cannot be made or written into; makes nothing."""
    existing = folder.absolute()
    while not os.path.lexists(existing):
        existing = existing.parent
    if not existing.is_dir():
        raise NotADirectoryError(f"{folder} cannot be a folder: {existing} is not one.")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise PermissionError(f"{folder} cannot be written into: {existing} does not permit it.")


def make_folder(folder: Path, files: Iterable[str]) -> Path | None:
    """Makes ``folder``, ready for results of these names.

    Where an earlier run has left such files they are moved into a folder inside, ``earlier-1`` for the first.

    Returns:
      The folder that earlier results were moved into, or ``None``: there were none.

    Raises:
      OSError: as :func:`check_folder`.

    Example:
      >>> import tempfile
      >>> folder = Path(tempfile.mkdtemp())
      >>> _ = (folder / "metrics").write_text("3.1")
      >>> make_folder(folder, ["metrics"]).name, (folder / "metrics").exists()
      ('earlier-1', False)
    """
    check_folder(folder)
    folder.mkdir(parents=True, exist_ok=True)
    there = [folder / name for name in files if os.path.lexists(folder / name)]
    if not there:
        return None
    numbers = (path.name.removeprefix(_EARLIER) for path in folder.glob(f"{_EARLIER}*"))
    earlier = folder / f"{_EARLIER}{1 + max((int(n) for n in numbers if n.isdecimal()), default=0)}"
    earlier.mkdir()
    for path in there:
        path.rename(earlier / path.name)
    return earlier
