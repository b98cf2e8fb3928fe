"""``python -m benchmarks.layer``: the layer, its peers, and the machine's ceiling, in one run.

Writes ``layer.json`` and ``layer.png`` into ``--out`` and prints a table. The file is rewritten after every group of
measurements, so that what an interrupted run has measured is kept. Rates count real rows only and are per GPU; on a
CPU, where all ranks share the machine, they are of all ranks together. ``host_us`` is the time of the call that
starts a launch; on a CPU a part of the work may happen in it. ``cycle_efficiency`` is the least number of clock cycles
that the products of real rows take on the tensor cores, over those that the kernel's CTAs took, whatever the clock.

Ends with 1 if a result is wrong (at once, or at the end with ``--keep-going``) or a shape does not fit the device.
"""

import argparse
import contextlib
import dataclasses
import functools
import importlib.util
import itertools
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

# Both frameworks take their memory from the same GPU, and XLA would take nearly all of it.
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.6")

import jax
import jax.numpy as jnp
from rich.console import Console

from benchmarks import check, flops, machine, measure, report
from benchmarks.ceiling import make_ceiling
from benchmarks.implementations import IMPLEMENTATIONS
from benchmarks.implementations.base import Bind, Program
from benchmarks.problem import Problem, Tokens, make_problem, make_tokens
from benchmarks.routing import ROUTINGS
from benchmarks.shapes import CPU_SHAPES, GPU_SHAPES, SHAPES
from mok_jax import command
from mok_jax.sharding import LARGEST_DOMAIN

RESULTS_FILE, PICTURE_FILE = "layer.json", "layer.png"
PROTOCOLS = ("burst", "matched", "sustained")
STATE_S = 0.5  # Long enough for clocks and power to be read meanwhile.

# A ceiling that moved by more within one group of measurements says that its figures cannot be compared.
DRIFT_LIMITS = {"burst": 0.03, "matched": 0.03, "sustained": 0.08}
CPU_DRIFT_LIMITS = dict.fromkeys(PROTOCOLS, 0.1)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line (``None``: of this process)."""
    parser = command.Parser(
        "python -m benchmarks.layer",
        description="Measures the layer, its peers and the machine's ceiling in one run. Defaults are in parentheses.",
    )

    def add_choice(flag: str, choices, default, text: str) -> None:
        def parse(value: str) -> list[str]:
            names = value.split(",")
            for name in names:
                if name not in choices:
                    raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(choices)}")
            return names

        parser.add_argument(
            flag, type=parse, default=default, metavar="NAME,...", help=f"{text}; of {', '.join(choices)}"
        )

    def add(flag: str, kind: Callable, default: Any, metavar: str, text: str) -> None:
        parser.add_argument(flag, type=kind, default=default, metavar=metavar, help=f"{text} (%(default)s)")

    chosen = f"GPU: {','.join(GPU_SHAPES)}; CPU: {','.join(CPU_SHAPES)}"
    add_choice("--shapes", SHAPES, None, f"layers to measure ({chosen})")
    add_choice("--pass", flops.PASSES, ["forward+backward", "forward", "backward"], "passes (all but forward+saves)")
    add_choice("--routing", ROUTINGS, list(ROUTINGS), "how tokens choose experts (all)")
    add_choice("--implementations", IMPLEMENTATIONS, list(IMPLEMENTATIONS), "what is measured (all)")
    add_choice("--protocol", PROTOCOLS, list(PROTOCOLS), "how it is timed, see benchmarks/measure.py (all)")
    add("--ep", command.whole(1, LARGEST_DOMAIN), 1, "N", "ranks that share the experts")
    add("--data", command.whole(1), 1, "N", "groups of such ranks")
    dtypes = "of activations and products (bfloat16 on a GPU, float32 on a CPU)"
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), help=dtypes)
    kept = "where layer.json and layer.png are written; those of an earlier run are moved into earlier-1, ... inside"
    add("--out", Path, Path("runs/bench"), "FOLDER", kept)
    add("--time-limit", command.not_negative, 420.0, "S", "seconds for the run; what they do not last for is left out")
    add("--build-limit", command.positive, 60.0, "S", "seconds to build and check one implementation")
    parser.add_argument("--commit", metavar="HASH", help="to record where the checkout has no git (asked of git)")
    parser.add_argument("--keep-going", action="store_true", help="leave out what computes wrong results, and go on")
    return parser.parse_args(arguments)


@dataclasses.dataclass
class Run:
    """What all groups of measurements share."""

    args: argparse.Namespace
    console: Console
    ceiling: Program
    ceiling_flops: int
    results: dict[str, Any]
    started: float
    # Reasons, by implementation, for not building it again.
    given_up: dict[str, str] = dataclasses.field(default_factory=dict)
    failed: bool = False

    @property
    def seconds_left(self) -> float:
        return self.args.time_limit - (time.perf_counter() - self.started)


@dataclasses.dataclass(frozen=True)
class Group:
    """One table of implementations: a problem, pass and routing."""

    problem: Problem
    pass_name: str
    routing: str

    @property
    def on_gpu(self) -> bool:
        return self.problem.platform != "cpu"

    @property
    def flops(self) -> float:
        """Of one device, or of the machine on a CPU."""
        shape, problem = self.problem.shape, self.problem
        total = flops.flops(self.pass_name, problem.rows, shape.hidden, shape.intermediate)
        return total / problem.ranks if self.on_gpu else total

    def record(self, implementation: str, protocol: str, **values: Any) -> dict[str, Any]:
        """A record of this group."""
        return report.make_record(
            **{"pass": self.pass_name},
            shape=self.problem.shape.name,
            ep=self.problem.ep,
            data=self.problem.data,
            routing=self.routing,
            implementation=implementation,
            protocol=protocol,
            **values,
        )


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    args = parse_arguments(arguments)
    console = Console(width=None if sys.stdout.isatty() else 160)
    if jax.config.jax_num_cpu_devices < 1:
        jax.config.update("jax_num_cpu_devices", max(1, args.ep * args.data))
    devices = jax.devices()
    if len(devices) < args.ep * args.data:
        console.print(f"--ep {args.ep} --data {args.data}: there are only {len(devices)} devices", style="red")
        return 2
    try:
        earlier = command.make_folder(args.out, (RESULTS_FILE, PICTURE_FILE))
    except OSError as error:
        print(f"benchmarks.layer: {error}", file=sys.stderr)
        return 2
    if earlier:
        console.print(f"moved the results of an earlier run to {earlier}", markup=False, soft_wrap=True)
    on_cpu = devices[0].platform == "cpu"
    dtype = jnp.dtype(args.dtype or ("float32" if on_cpu else "bfloat16"))
    results: dict[str, Any] = {"meta": machine.describe(args.commit), "records": []}
    ceiling, ceiling_flops = make_ceiling(devices[0], dtype)
    run = Run(args, console, ceiling, ceiling_flops, results, time.perf_counter())
    try:
        shapes = args.shapes or (CPU_SHAPES if on_cpu else GPU_SHAPES)
        for number, name in enumerate(shapes):
            # What earlier shapes did not need is for the later ones.
            share = run.seconds_left / (len(shapes) - number)
            try:
                measure_shape(run, make_problem(SHAPES[name], args.ep, args.data, dtype, devices), share)
            except jax.errors.JaxRuntimeError as error:
                record_failure(run, name, describe_error(error))
    except check.WrongResultError as wrong:
        console.print(f"stopped: {wrong}", style="bold red", markup=False)
        run.failed = True
    finally:
        finish(run)
    return 1 if run.failed else 0


def record_failure(run: Run, shape: str, error: str) -> None:
    """Records of everything that this shape still owed when the device failed."""
    run.failed = True
    keys = ("shape", "pass", "routing", "implementation", "protocol")
    there = {tuple(record[key] for key in keys) for record in run.results["records"]}
    args = run.args
    owed = itertools.product([shape], getattr(args, "pass"), args.routing, args.implementations, args.protocol)
    for values in owed:
        if values not in there:
            record = report.make_record(ep=args.ep, data=args.data, error=error, **dict(zip(keys, values, strict=True)))
            run.results["records"].append(record)


def finish(run: Run) -> None:
    """Writes and shows everything."""
    run.results["meta"]["usable"] = all(r["usable"] for r in run.results["records"] if r["error"] is None)
    run.results["meta"]["seconds"] = round(time.perf_counter() - run.started, 1)
    save(run)
    report.print_table(run.results, run.console)
    if not run.results["meta"]["usable"]:
        run.console.print("the machine drifted: figures in parentheses are unusable", style="bold red")
    if importlib.util.find_spec("matplotlib") is None:
        run.console.print("no picture: matplotlib is not installed", style="yellow")
    else:
        report.draw(run.results, run.args.out / PICTURE_FILE)
    run.console.print(f"wrote {run.args.out}; {run.results['meta']['seconds']:.0f} s")


def save(run: Run) -> None:
    """Writes the results so far."""
    report.write_json(run.results, run.args.out / RESULTS_FILE)


def measure_shape(run: Run, problem: Problem, seconds: float) -> None:
    """All passes and routings of one shape; those for which the time does not last are recorded as left out."""
    end = time.perf_counter() + seconds
    routed = {routing: make_tokens(problem, routing) for routing in run.args.routing}
    expected = {routing: check.expect(problem, tokens[0]) for routing, tokens in routed.items()}
    for pass_name in getattr(run.args, "pass"):
        binds: dict[str, Bind] = {}
        for routing, tokens in routed.items():
            group = Group(problem, pass_name, routing)
            programs: dict[str, Checked] = {}
            reasons: dict[str, str] = {}
            for name in run.args.implementations:
                reason = IMPLEMENTATIONS[name].why_not(problem) or run.given_up.get(name)
                if reason is None and time.perf_counter() > end:
                    reason = "left out: no time was left for this shape"
                if reason is None:
                    try:
                        programs[name] = prepare(run, group, name, binds, tokens, expected[routing])
                    except check.WrongResultError as wrong:
                        if not run.args.keep_going:
                            raise
                        run.failed, reason = True, str(wrong)
                    except Exception as error:
                        reason = describe_error(error)
                if reason is not None:
                    reasons[name] = reason
            measure_group(run, group, programs, reasons)
            save(run)
    machine.read_state(run.results["meta"], lambda: measure.load(run.ceiling, STATE_S, overlapped=True))


class Checked(NamedTuple):
    """A program that may be timed, and the errors of its results by name (None: it has none to check)."""

    program: Program
    errors: dict[str, float] | None


def prepare(
    run: Run, group: Group, name: str, binds: dict[str, Bind], tokens: list[Tokens], expected: check.Expected
) -> Checked:
    """Builds an implementation, unless another routing has done so, and checks it."""
    started = time.perf_counter()
    label = f"{group.problem.shape.name} {group.pass_name} {group.routing} {name}"
    try:
        with time_limit(run.args.build_limit):
            if name not in binds:
                binds[name] = IMPLEMENTATIONS[name].build(group.problem, group.pass_name)
            program = binds[name](tokens)
            errors = program.results and check.check(label, program.results(0), expected, group.problem.dtype)
            return Checked(program, errors)
    except TimeoutError:
        run.given_up[name] = f"given up: {label} took over {run.args.build_limit:.0f} s to build and check"
        raise
    finally:
        run.console.print(
            f"{label}: {time.perf_counter() - started:.1f} s to build and check", style="dim", markup=False
        )


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises TimeoutError in the body once it has taken so long; a compiler's call is let finish first."""

    def expire(*_: Any) -> None:
        raise TimeoutError(f"took more than {seconds:.0f} s")

    previous = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def describe_error(error: Exception) -> str:
    """Type and the first lines of its text: compilers' are long."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}"


def measure_group(run: Run, group: Group, programs: dict[str, Checked], reasons: dict[str, str]) -> None:
    """Times what is ready in each protocol; adds a record for every implementation, if only with the reason."""
    limits = DRIFT_LIMITS if group.on_gpu else CPU_DRIFT_LIMITS
    for protocol in run.args.protocol:
        time_all = {"burst": time_bursts, "matched": time_matched, "sustained": time_sustained}[protocol]
        timed, failures = time_all(run, {name: p.program for name, p in programs.items()}, overlapped=group.on_gpu)
        for name in run.args.implementations:
            if name not in timed:
                error = reasons.get(name) or failures[name]
                run.results["records"].append(group.record(name, protocol, error=error))
                continue
            taken, (program, errors) = timed[name], programs[name]
            run.results["records"].append(
                group.record(
                    name,
                    protocol,
                    **rates(taken, group.flops, run.ceiling_flops),
                    cycle_efficiency=cycle_efficiency(taken, group.flops / program.calls),
                    peak_bytes=program.peak_bytes,
                    checked=errors is not None,
                    errors=errors,
                    drift=taken.drift,
                    usable=taken.drift <= limits[protocol],
                )
            )


class Timed(NamedTuple):
    """A program's launches, those of the ceiling to compare them with, and how much that moved meanwhile.

    And the clock cycles of all CTAs of a call of the fused kernel, if it is one.
    """

    own: measure.Timing
    ceiling: measure.Timing
    drift: float
    cycles: float | None


def time_bursts(run: Run, programs: dict[str, Program], *, overlapped: bool) -> tuple[dict[str, Timed], dict[str, str]]:
    """Bursts of all programs, and of the ceiling before, after every second one and at the end; and failures.

    All bursts of the ceiling together are what every program is compared with.
    """
    timings, cycles, failures = {}, {}, {}
    ceilings = [measure.burst(run.ceiling, overlapped=overlapped)] if programs else []
    for number, (name, program) in enumerate(programs.items(), start=1):
        try:
            timings[name], cycles[name] = count_cycles(
                program, functools.partial(measure.burst, program, overlapped=overlapped)
            )
        except Exception as error:
            failures[name] = describe_error(error)
        if number % 2 == 0 or number == len(programs):
            ceilings.append(measure.burst(run.ceiling, overlapped=overlapped))
    return {
        name: Timed(own, measure.join(ceilings), measure.drift(ceilings), cycles[name]) for name, own in timings.items()
    }, failures


def time_matched(
    run: Run, programs: dict[str, Program], *, overlapped: bool
) -> tuple[dict[str, Timed], dict[str, str]]:
    """Bursts of each program between two of the ceiling that last as long; and failures."""

    def measure_one(program: Program) -> tuple[measure.Timing, measure.Timing, float]:
        own, ceilings = measure.matched(program, run.ceiling, overlapped=overlapped)
        return own, measure.join(ceilings), measure.drift(ceilings)

    return time_each(programs, measure_one)


def time_sustained(
    run: Run, programs: dict[str, Program], *, overlapped: bool
) -> tuple[dict[str, Timed], dict[str, str]]:
    """Each program in turn with the ceiling, on a machine that stays loaded; and failures."""

    def measure_one(program: Program) -> tuple[measure.Timing, measure.Timing, float]:
        own, ceiling = measure.sustained(program, run.ceiling, overlapped=overlapped)
        return own, ceiling, measure.trend(ceiling)

    if programs:
        measure.load(run.ceiling, measure.LOAD_S, overlapped=overlapped)
    return time_each(programs, measure_one)


def time_each(
    programs: dict[str, Program], measure_one: Callable[[Program], tuple[measure.Timing, measure.Timing, float]]
) -> tuple[dict[str, Timed], dict[str, str]]:
    """Each program beside a ceiling: ``measure_one`` returns both, and how much the ceiling moved; and failures."""
    timed, failures = {}, {}
    for name, program in programs.items():
        try:
            (own, ceiling, drift), cycles = count_cycles(program, functools.partial(measure_one, program))
            timed[name] = Timed(own, ceiling, drift, cycles)
        except Exception as error:
            failures[name] = describe_error(error)
    return timed, failures


def count_cycles[T](program: Program, run: Callable[[], T]) -> tuple[T, float | None]:
    """What ``run`` returns, and the clock cycles of all CTAs of one of the calls that it makes, on average."""
    if program.cycles is None:
        return run(), None
    calls, cycles = program.cycles()
    returned = run()
    calls_after, cycles_after = program.cycles()
    return returned, (cycles_after - cycles) / (calls_after - calls)


def cycle_efficiency(taken: Timed, work: float) -> float | None:
    """Of calls of ``work`` FLOPs each; None of what is not the fused kernel on a GPU."""
    return None if taken.cycles is None else work / flops.HOPPER_FLOPS_PER_CYCLE / taken.cycles


def rates(taken: Timed, work: float, ceiling_work: float) -> dict[str, float]:
    """The measured values of a record: medians, extremes, and rates over those of the ceiling."""
    own, ceiling = taken.own, taken.ceiling
    return {
        "over_c": (work / own.median) / (ceiling_work / ceiling.median),
        "over_c_min": (work / own.least) / (ceiling_work / ceiling.least),
        "ms": 1e3 * own.median,
        "ms_min": 1e3 * own.least,
        "ms_max": 1e3 * own.most,
        "tflops": work / own.median / 1e12,
        "c_tflops": ceiling_work / ceiling.median / 1e12,
        "host_us": own.host_us,
    }


if __name__ == "__main__":
    sys.exit(main())
