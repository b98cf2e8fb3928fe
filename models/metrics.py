"""What a training run writes into its folder: the names of the files, and the lines of ``metrics.jsonl``."""

import json
import math
import time
from pathlib import Path
from typing import Any, BinaryIO

import jax
import numpy as np
import optax

import mok_jax

METRICS_FILE = "metrics.jsonl"
CONFIG_FILE = "config.json"
SAMPLE_FILE = "sample.txt"
LOSS_PICTURE = "loss.png"
LOAD_PICTURE = "expert_load.png"
BOARD_FOLDER, PROFILE_FOLDER = "tensorboard", "profile"
FILES = METRICS_FILE, CONFIG_FILE, SAMPLE_FILE, LOSS_PICTURE, LOAD_PICTURE, BOARD_FOLDER, PROFILE_FOLDER


def write_line(log: BinaryIO, values: dict[str, Any]) -> None:
    """Writes one line of JSON; numbers that it does not know, NaN and infinity, are ``null``.

    Example:
      >>> import io
      >>> log = io.BytesIO()
      >>> write_line(log, {"step": 3, "loss": math.nan})
      >>> log.getvalue()
      b'{"step": 3, "loss": null}\\n'
    """
    known = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
    # By one call, so that a process that is ended leaves whole lines: the log has no buffer.
    log.write(json.dumps(known, allow_nan=False).encode() + b"\n")


def read_metrics(path: Path) -> tuple[list[dict], dict]:
    """Reads ``metrics.jsonl``: the intervals in order, and the results at the end (empty if the run did not get there).

    Example:
      >>> import tempfile
      >>> path = Path(tempfile.mkdtemp()) / "metrics.jsonl"
      >>> with path.open("wb", buffering=0) as log:
      ...     write_line(log, {"step": 10, "loss": math.nan})
      ...     write_line(log, {"held_out_loss": 2.9})
      >>> read_metrics(path)
      ([{'step': 10, 'loss': None}], {'held_out_loss': 2.9})
    """
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    intervals = [line for line in lines if "loss" in line]
    results = {key: value for line in lines if "step" not in line for key, value in line.items()}
    return intervals, results


def keep_until(path: Path, step: int) -> None:
    """Drops what a run has written of steps after ``step``, and of its end, to write it again.

    Example:
      >>> import tempfile
      >>> path = Path(tempfile.mkdtemp()) / "metrics.jsonl"
      >>> _ = path.write_text('{"step": 10, "loss": 3.0}\\n{"step": 20, "loss": 2.0}\\n{"held_out_loss": 2.1}\\n')
      >>> keep_until(path, 15)
      >>> path.read_text()
      '{"step": 10, "loss": 3.0}\\n'
    """
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    kept = [line for line in lines if line.endswith("\n") and json.loads(line).get("step", math.inf) <= step]
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text("".join(kept))
    unfinished.replace(path)


class Board:
    """The same numbers for TensorBoard, as event files in a folder."""

    def __init__(self, folder: Path):
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(str(folder))

    def add(self, line: dict[str, Any]) -> None:
        """A line of the metrics with its ``step``; of what is no number, nothing."""
        for name, value in line.items():
            if isinstance(value, float):
                self._writer.add_scalar(name, value, line["step"])

    def close(self) -> None:
        """Writes what is left."""
        self._writer.close()


def record(log: BinaryIO, board: Board | None, line: dict[str, Any]) -> None:
    """Writes a line with a ``step``, for TensorBoard too where there is a board."""
    write_line(log, line)
    if board:
        board.add(line)


class Intervals:
    """Gathers the steps' metrics and writes one JSON line an interval.

    A step's values are read when the next step has been given to the devices, so that they never wait for Python. So
    one more step is computed before a loss that is no number is noticed: ``add`` and ``finish`` then write the interval
    as far as it has come, and raise FloatingPointError. Where a GPU has reported a failure they write nothing, and
    raise what ``mok_jax.check`` does.
    """

    def __init__(
        self,
        log: BinaryIO,
        schedule: optax.Schedule,
        tokens_per_step: int,
        length: int,
        first: int = 0,
        flops_per_step: int = 0,
        board: Board | None = None,
    ):
        self._log, self._schedule, self._tokens, self._length = log, schedule, tokens_per_step, length
        self._flops, self._board = flops_per_step, board
        self._unread: dict | None = None
        self._steps: list[dict] = []
        self._count = first
        self._started = time.perf_counter()

    def add(self, metrics: dict) -> dict | None:
        """Takes a step's metrics, still being computed; returns the interval that the step before completed, if one."""
        unread, self._unread = self._unread, metrics
        return None if unread is None else self._read(unread)

    def read(self) -> dict | None:
        """Waits for the last step; returns the interval that it completed, if one."""
        unread, self._unread = self._unread, None
        return None if unread is None else self._read(unread)

    def finish(self) -> None:
        """Reads the last step and writes what is left, be it a whole interval or less."""
        self.read()
        if self._steps:
            self._write()

    def _read(self, metrics: dict) -> dict | None:
        self._steps.append(jax.tree.map(np.asarray, metrics))
        self._count += 1
        loss = float(self._steps[-1]["loss"])
        if not math.isfinite(loss):
            self._write()
            raise FloatingPointError(f"the loss is {loss} at step {self._count}")
        return self._write() if self._count % self._length == 0 else None

    def _write(self) -> dict:
        mok_jax.check()  # what a call that ended early has left are no metrics
        seconds = time.perf_counter() - self._started
        load = np.sum([step["expert_load"] for step in self._steps], axis=0)
        even = np.maximum(load.mean(axis=-1), 1 / load.shape[-1])  # Of a run that diverged there may be no tokens.
        line = {
            "step": self._count,
            "loss": float(np.mean([step["loss"] for step in self._steps])),
            "router_loss": float(np.mean([step["router_loss"] for step in self._steps])),
            "learning_rate": float(self._schedule(self._count - 1)),
            "tokens_per_s": self._tokens * len(self._steps) / seconds,
            "model_tflops_per_s": self._flops * len(self._steps) / seconds / 1e12,
            # The busiest expert's tokens as a multiple of an even share, worst layer: 1 is balanced, E / K all to K.
            "load_imbalance": float((load.max(axis=-1) / even).max()),
            "expert_load": load.tolist(),
        }
        record(self._log, self._board, line)
        self._steps, self._started = [], time.perf_counter()
        return line
