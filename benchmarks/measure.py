"""How time is taken: launches back to back or one by one, in two states of the machine, beside its ceiling.

A GPU that was idle has power to spare and runs some percent faster than one that has been busy, and the two states
differ more for one kernel than for another. So there are three protocols, and a rate is only ever compared with a
ceiling that was measured in the same state, interleaved:

* *burst*: idle, a few launches that are discarded, then the ones that count;
* *matched*: the same, but the ceiling's burst lasts as long as the program's. What a GPU has to spare is gone within
  tens of milliseconds, so that in as many launches the longer ones see less of it;
* *sustained*: load first, then ceiling and program alternate.
"""

import dataclasses
import itertools
import math
import statistics
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from benchmarks.implementations.base import Program

IDLE_S = 0.3
DISCARDED, COUNTED = 3, 6
LOAD_S = 1.5
RELOAD_S = 0.25  # After each other program, so that all start from the same state.
SUSTAINED_S = 0.5
LEAST_ROUNDS, MOST_ROUNDS = 4, 30
LAUNCHES_AHEAD = 4
OTHER_QUEUE_LAUNCHES = 4  # The first of them counts for nothing.


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds of launches, and how long the host took to start each."""

    device_s: tuple[float, ...]
    host_s: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.device_s)

    @property
    def mean(self) -> float:
        """Of a burst, all that it took, shared out: a host that wakes up late, so that one launch looks longer by what
        the next looks shorter, does not change it.
        """
        return statistics.fmean(self.device_s)

    @property
    def least(self) -> float:
        return min(self.device_s)

    @property
    def most(self) -> float:
        return max(self.device_s)

    @property
    def host_us(self) -> float:
        """Median microseconds of the host for one launch."""
        return 1e6 * statistics.median(self.host_s)


class Launch(NamedTuple):
    """What one launch took: seconds on the device, None if that cannot be told, and seconds of the host to start it."""

    program: Program
    device_s: float | None
    host_s: float


def time_launches(programs: Sequence[Program], *, overlapped: bool) -> list[Launch]:
    """Launches the programs in order.

    ``overlapped``: a few launches are queued ahead, so that the device never waits for the host, and a launch takes
    from the end of the one before it to its own end. That is not known of the first one, nor where the queue changes:
    what was queued is completed there, since two queues would share the device. Otherwise, as on a CPU, where launches
    would run beside each other, each is alone.
    """
    ahead = LAUNCHES_AHEAD if overlapped else 1
    running: list[tuple[Program, Any, float, float]] = []
    done: list[Launch] = []
    last_end: float | None = None

    def finish_oldest() -> None:
        nonlocal last_end
        program, handle, started, host_s = running.pop(0)
        program.wait(handle)
        now = time.perf_counter()
        start = last_end if overlapped else started
        done.append(Launch(program, None if start is None else now - start, host_s))
        last_end = now

    for number, program in enumerate(programs):
        if running and running[-1][0].queue != program.queue:
            while running:
                finish_oldest()
            last_end = None
        started = time.perf_counter()
        handle = program.launch(number)
        running.append((program, handle, started, time.perf_counter() - started))
        if len(running) == ahead:
            finish_oldest()
    while running:
        finish_oldest()
    return done


def burst(program: Program, *, overlapped: bool) -> Timing:
    """Six launches of a machine that was idle until three launches ago."""
    time.sleep(IDLE_S)
    return _timing(time_launches([program] * (DISCARDED + COUNTED), overlapped=overlapped)[DISCARDED:])


def burst_between(program: Program, begin_s: float, end_s: float, launches: int, *, overlapped: bool) -> Timing:
    """Of a burst of so many launches those that end within a time, in seconds from its begin; at least six."""
    time.sleep(IDLE_S)
    taken = time_launches([program] * max(launches, DISCARDED + COUNTED), overlapped=overlapped)
    ends = itertools.accumulate(launch.device_s or 0.0 for launch in taken)
    counted = [launch for launch, end in zip(taken, ends, strict=True) if begin_s < end <= end_s]
    return _timing(counted if len(counted) >= COUNTED else taken[DISCARDED : DISCARDED + COUNTED])


def matched(program: Program, ceiling: Program, *, overlapped: bool) -> tuple[Timing, list[Timing]]:
    """A burst of the program, and before and after it one of the ceiling that lasts as long."""
    own_s = burst(program, overlapped=overlapped).mean
    launches = math.ceil((DISCARDED + COUNTED) * own_s / burst(ceiling, overlapped=overlapped).mean)

    def burst_ceiling() -> Timing:
        return burst_between(ceiling, DISCARDED * own_s, (DISCARDED + COUNTED) * own_s, launches, overlapped=overlapped)

    before = burst_ceiling()
    own = burst(program, overlapped=overlapped)
    return own, [before, burst_ceiling()]


def load(program: Program, seconds: float, *, overlapped: bool) -> None:
    """Keeps the machine busy."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        time_launches([program] * LAUNCHES_AHEAD, overlapped=overlapped)


def sustained(program: Program, ceiling: Program, *, overlapped: bool) -> tuple[Timing, Timing]:
    """The program and the ceiling in turn, on a machine that is loaded already; returns their timings.

    They take turns launch by launch, or by a few launches if they run on different queues.
    """
    load(ceiling, RELOAD_S, overlapped=overlapped)
    turn = 1 if program.queue == ceiling.queue else OTHER_QUEUE_LAUNCHES
    one_round = [ceiling] * turn + [program] * turn
    started = time.perf_counter()
    time_launches(one_round, overlapped=overlapped)
    round_s = time.perf_counter() - started
    rounds = min(max(LEAST_ROUNDS, round(SUSTAINED_S / round_s)), MOST_ROUNDS)
    taken = time_launches(one_round * (1 + rounds), overlapped=overlapped)[len(one_round) :]
    own, of_ceiling = ([launch for launch in taken if launch.program is p] for p in (program, ceiling))
    return _timing(own), _timing(of_ceiling)


def join(timings: Sequence[Timing]) -> Timing:
    """All launches of several timings as one."""
    return Timing(
        tuple(s for timing in timings for s in timing.device_s), tuple(s for timing in timings for s in timing.host_s)
    )


def drift(ceilings: Sequence[Timing]) -> float:
    """How much the ceiling moved between bursts: largest over smallest of their means, minus 1.

    Example:
      >>> round(drift([Timing((1.0, 1.2), (0, 0)), Timing((1.1, 1.32), (0, 0))]), 3)
      0.1
    """
    means = [timing.mean for timing in ceilings]
    return max(means) / min(means) - 1


def trend(ceiling: Timing) -> float:
    """How much the ceiling moved while it alternated with a program: the ratio of its halves' medians, minus 1.

    It is not compared between programs: one that draws less power leaves the ceiling more.
    """
    middle = len(ceiling.device_s) // 2
    halves = statistics.median(ceiling.device_s[:middle]), statistics.median(ceiling.device_s[middle:])
    return max(halves) / min(halves) - 1


def _timing(launches: Sequence[Launch]) -> Timing:
    known = [launch.device_s for launch in launches if launch.device_s is not None]
    return Timing(tuple(known), tuple(launch.host_s for launch in launches))
