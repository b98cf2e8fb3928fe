"""`MoKConfig`: how a call is scheduled and what it keeps in memory, never what it computes.

Whatever is set here, the results have the same bits; only time and memory change.
"""

import dataclasses
import difflib
from typing import Any, Literal

ROW_BLOCK = 128
"""Rows are counted, padded and scheduled in blocks of this many (as in ``csrc/moe/shape.h``)."""

# What the executors can hold (int32), as a whole number of row blocks.
_MOST = 2**31 - ROW_BLOCK

Save = Literal["pre_activations", "pre_activations_and_rows", "nothing"]
SAVE_POLICIES: tuple[Save, ...] = ("pre_activations", "pre_activations_and_rows", "nothing")


@dataclasses.dataclass(frozen=True)
class MoKConfig:
    """Schedule and memory of the megakernel. Hashable; every ``None`` is chosen from shape and device.

    Attributes:
      ring_rows: rows (a multiple of 128) that the ring buffers hold. Default: with one rank, all rows
        that can arrive (at most ``T*K + 127*E_local``); with more, ``1.25*T*K + 128*E_local`` if that is
        less. Memory grows by about ``(2*H + 7*I) * itemsize`` bytes a row in the backward. With fewer
        rows than arrive, the backward recomputes part of the forward; no token is ever dropped.
      minibatch_rows: rows (a multiple of 128) that are scheduled as one group. Default: 8192 on a GPU, on CPUs two
        tiles a worker. No effect on memory.
      comm_sms: GPU multiprocessors that only communicate; 0 puts a communication warp in every one.
        No effect on memory. GPU only.
      reserve_sms: GPU multiprocessors left free for other kernels (NCCL); one more where an odd number would be left,
        since they work in pairs. Default 0. GPU only.
      save: what the forward keeps for the backward of the rows that fit the ring:
        ``"pre_activations"`` (default; ``2*I`` values a row),
        ``"pre_activations_and_rows"`` (``2*I + H``; the rows are not fetched again) or
        ``"nothing"`` (no activations; the backward fetches and recomputes).
      entry_timeout_s: seconds to wait for a peer to start this call. Default 600 on a GPU; on CPUs at
        most 30, below the limit at which XLA ends the process.
      timeout_s: seconds that any wait inside the call may take. Default 30; at most 30 on CPUs.
      host_comm_workers: communication threads a rank. Default 1. CPU only.
      host_compute_workers: compute threads a rank. Default: the machine's cores divided by EP, at
        least 1. CPU only.
      host_delay_seed: not 0: every worker sleeps for random times (up to 0.1 ms) before its tasks. A
        test tool. CPU only.

    Raises:
      ValueError: a field has no legal value; the text names the nearest legal one.

    Example:
      >>> MoKConfig(ring_rows=4096, save="nothing").ring_rows
      4096
    """

    ring_rows: int | None = None
    minibatch_rows: int | None = None
    comm_sms: int | None = None
    reserve_sms: int | None = None
    save: Save = "pre_activations"
    entry_timeout_s: float | None = None
    timeout_s: float | None = None
    host_comm_workers: int | None = None
    host_compute_workers: int | None = None
    host_delay_seed: int = 0

    def __post_init__(self) -> None:
        for name in ("ring_rows", "minibatch_rows"):
            _require_row_blocks(name, getattr(self, name))
        for name, least in (
            ("comm_sms", 0),
            ("reserve_sms", 0),
            ("host_comm_workers", 1),
            ("host_compute_workers", 1),
            ("host_delay_seed", 0),
        ):
            _require_int(name, getattr(self, name), least)
        for name in ("entry_timeout_s", "timeout_s"):
            _require_seconds(name, getattr(self, name))
        if self.host_delay_seed is None:
            raise TypeError("MoKConfig.host_delay_seed is None; it must be an int, 0 for no delays")
        require_choice("MoKConfig.save", self.save, SAVE_POLICIES)


def require_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    """Raises ValueError unless ``value`` is one of ``choices``."""
    if value in choices:
        return
    nearest = difflib.get_close_matches(str(value), choices, n=1, cutoff=0.0)[0]
    legal = f"one of {', '.join(map(repr, choices))}; the nearest is {nearest!r}" if len(choices) > 1 else repr(nearest)
    raise ValueError(f"{name} is {value!r}; it must be {legal}")


def _require_seconds(name: str, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"MoKConfig.{name} is {value!r}; it must be a number of seconds, such as 1.0")
    if not value > 0:
        raise ValueError(f"MoKConfig.{name} is {value!r}; it must be a positive number of seconds, such as 1.0")


def _require_int(name: str, value: Any, least: int) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"MoKConfig.{name} is {value!r}; it must be an int, at least {least}")
    nearest = min(max(value, least), _MOST)
    if value != nearest:
        raise ValueError(f"MoKConfig.{name} is {value}; the nearest legal value is {nearest}")


def _require_row_blocks(name: str, value: Any) -> None:
    _require_int(name, value, ROW_BLOCK)
    if value is not None and value % ROW_BLOCK:
        nearest = max(ROW_BLOCK, round(value / ROW_BLOCK) * ROW_BLOCK)
        raise ValueError(
            f"MoKConfig.{name} is {value}; it must be a multiple of {ROW_BLOCK}; the nearest legal value is {nearest}"
        )
