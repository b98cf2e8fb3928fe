"""``python -m benchmarks.ranks``: what expert parallelism costs where the links cost nothing.

Several processes share one GPU, a rank and a share of its multiprocessors each; then the first one runs the same tokens
alone, on as many multiprocessors as all had. Each is given the same arguments but ``--process-id``, and the first one
writes ``ranks.json`` into ``--out``. Rates are of the GPU: of all ranks together. What ranks compute must be bit for
bit what one computes, and that is checked like any implementation.
"""

import argparse
import dataclasses
import functools
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from benchmarks import check, flops, machine, measure, report
from benchmarks.ceiling import make_ceiling
from benchmarks.implementations import mok
from benchmarks.layer import CPU_DRIFT_LIMITS, DRIFT_LIMITS, Timed, rates
from benchmarks.problem import Problem, Tokens, make_problem, make_tokens
from benchmarks.shapes import SHAPES
from mok_jax import command
from mok_jax.config import MoKConfig

RESULTS_FILE = "ranks.json"
ROUTING = "uniform"
PASSES = ("forward", "forward+backward")
BURSTS = 4


class Measured(NamedTuple):
    """A pass of some ranks: times of its launches, and this process's part of its results by name."""

    timing: measure.Timing
    results: Mapping[str, np.ndarray]


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = command.Parser("python -m benchmarks.ranks", description="What expert parallelism costs without links.")
    command.add_process_options(parser)
    parser.add_argument("--shape", choices=SHAPES, default="v3", help="of all ranks together (%(default)s)")
    parser.add_argument(
        "--reserve-sms", type=command.whole(0), default=0, metavar="N", help="multiprocessors that are not this rank's"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/bench"), metavar="FOLDER", help="(%(default)s)")
    parser.add_argument("--commit", metavar="HASH", help="to record where the checkout has no git (asked of git)")
    return parser.parse_args(arguments)


def measure_pass(problem: Problem, tokens: list[Tokens], pass_name: str, reserve_sms: int) -> Measured:
    """Several bursts of one pass."""
    program = mok.build("megakernel", problem, pass_name, MoKConfig(reserve_sms=reserve_sms))(tokens)
    timing = measure.join([measure.burst(program, overlapped=problem.platform != "cpu") for _ in range(BURSTS)])
    assert program.results is not None
    results = jax.tree.map(lambda array: np.asarray(array.addressable_data(0)), dict(program.results(0)))
    return Measured(timing, results)


def check_alike(ranks: int, of_rank: Mapping[str, np.ndarray], alone: Mapping[str, np.ndarray]) -> None:
    """Raises WrongResultError unless the first rank's results are the first part of what one rank has found."""
    for name, array in of_rank.items():
        if array.tobytes() != alone[name][: len(alone[name]) // ranks].tobytes():
            raise check.WrongResultError(f"{name} of rank 0 of {ranks} has other bits than one rank's")


def make_records(
    shape: str,
    problem: Problem,
    tokens: list[Tokens],
    alone: Mapping[str, Measured],
    several: Mapping[str, Measured],
    ranks: int,
) -> list[dict[str, Any]]:
    """A record of each pass on one rank and on all, once results are right and alike.

    What both are compared with, the ceiling, is measured after them: a record is usable if its bursts agree.

    Raises:
      WrongResultError: they are not.
    """
    here, whole, dtype = problem.mesh.devices.flat[0], problem.shape, problem.dtype
    expected = check.expect(problem, tokens[0])
    ceiling, ceiling_flops = make_ceiling(here, dtype)
    bursts = [measure.burst(ceiling, overlapped=True) for _ in range(BURSTS)]
    of_ceiling, drift = measure.join(bursts), measure.drift(bursts)
    limits = CPU_DRIFT_LIMITS if problem.platform == "cpu" else DRIFT_LIMITS
    record = functools.partial(
        report.make_record,
        shape=shape,
        data=1,
        routing=ROUTING,
        implementation="megakernel",
        protocol="burst",
        checked=True,
        drift=drift,
        usable=drift <= limits["burst"],
    )
    records = []
    for name in PASSES:
        check_alike(ranks, several[name].results, alone[name].results)
        errors = check.check(name, alone[name].results, expected, dtype)
        work = flops.flops(name, problem.rows, whole.hidden, whole.intermediate)
        for ep, measured in ((1, alone[name]), (ranks, several[name])):
            values = rates(Timed(measured.timing, of_ceiling, drift, None), work, ceiling_flops)
            records.append(record(**{"pass": name}, ep=ep, errors=errors, **values))
    return records


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    args = parse_arguments(arguments)
    command.join_processes(args)
    devices, dtype = jax.devices(), jnp.dtype(jnp.bfloat16 if jax.default_backend() != "cpu" else jnp.float32)
    whole = dataclasses.replace(SHAPES[args.shape], whole=True)
    spread = make_problem(whole, len(devices), 1, dtype, devices)
    tokens = make_tokens(spread, ROUTING)
    several = {name: measure_pass(spread, tokens, name, args.reserve_sms) for name in PASSES}
    if jax.process_index() > 0:
        return 0
    del spread, tokens  # their memory
    here = jax.local_devices()[:1]
    of_gpu = getattr(here[0], "core_count", 0) or 0
    left_over = max(0, of_gpu - len(devices) * (of_gpu - args.reserve_sms))
    problem = make_problem(whole, 1, 1, dtype, here)
    tokens = make_tokens(problem, ROUTING)
    alone = {name: measure_pass(problem, tokens, name, left_over) for name in PASSES}
    meta = machine.describe(args.commit)
    meta |= {"sharing": f"{len(devices)} ranks on one device", "reserve_sms": [left_over, args.reserve_sms]}
    results = {"meta": meta, "records": make_records(args.shape, problem, tokens, alone, several, len(devices))}
    args.out.mkdir(parents=True, exist_ok=True)
    report.write_json(results, args.out / RESULTS_FILE)
    report.print_table(results, Console(width=160))
    for name in PASSES:
        ratio = alone[name].timing.median / several[name].timing.median
        print(f"{args.shape} {name}: {len(devices)} ranks run at {ratio:.3f} of one rank's rate")
    return 0


if __name__ == "__main__":
    sys.exit(main())
