"""``python -m mok_jax timeline``: what every worker of a call did, and what it waited for, as pictures and traces.

Recorded from the CPU executor, which runs the same task lists as a GPU's kernel; the times are those of a CPU.
"""

import argparse
import collections
import importlib.util
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from mok_jax import native, verify
from mok_jax.command import check_folder, make_folder, say_refused
from mok_jax.verify import Inputs, Request

RECORDED, REFUSED = 0, 2
DIRECTIONS = ("forward", "backward")
FILES = tuple(f"{direction}.{kind}" for direction in DIRECTIONS for kind in ("json", "png"))
ROUTINGS = ("uniform", "zipf")
# Of the call that is recorded where the command line says no other: seconds on two cores.
SIZES = {"hidden_size": 1024, "intermediate_size": 512, "num_experts": 16, "num_experts_per_tok": 4}
TOKENS, RANKS = 4096, 4

# Every kind of task and its colour, in the order in which legends and tables have them.
COLORS = {
    "pull_rows": "#0969da",
    "pull_grads": "#54aeff",
    "notify": "#1b7c83",
    "reduce": "#8250df",
    "gate_up": "#d4a72c",
    "down": "#bc4c00",
    "hidden_grad": "#fa8f47",
    "row_grad": "#bf3989",
    "weight_grad": "#2da44e",
}


class Event(NamedTuple):
    """A task that a worker has done.

    Attributes:
      direction: ``"forward"`` or ``"backward"``.
      rank: whose task it was.
      worker: which thread of the rank did it; those that communicate come first.
      communicates: whether the worker is one of them.
      kind: of the task, a key of ``COLORS``.
      macrobatch: where the task stands in the call, as docs/algorithm.md says.
      block: row block; the first one of a weight gradient's piece; of ``reduce``, the block of tokens.
      blocks: row blocks that it covers.
      expert: number within the rank; -1 of ``reduce``.
      part: which tile, which pull, or which band of columns.
      begin: when the worker took it up, in nanoseconds of one clock of all workers.
      ready: when all that it waits for was there.
      end: when it was done, and all that wait for it were told.
    """

    direction: str
    rank: int
    worker: int
    communicates: bool
    kind: str
    macrobatch: int
    block: int
    blocks: int
    expert: int
    part: int
    begin: int
    ready: int
    end: int


def record(request: Request, inputs: Inputs, **settings: Any) -> list[Event]:
    """Every task of a forward and a backward, with ``settings`` of ``MoKConfig``.

    The call has run before, so that its memory is there.

    Raises:
      ValueError, TypeError, NotImplementedError: the megakernel does not run such a call here, or not on CPUs.

    Example:
      >>> sizes = {"hidden_size": 16, "intermediate_size": 8, "num_experts": 2, "num_experts_per_tok": 1}
      >>> request = Request(**sizes, tokens=8)
      >>> sorted({event.kind for event in record(request, make_inputs(request, "zipf")) if event.communicates})
      ['notify', 'pull_grads', 'pull_rows', 'reduce']
    """
    platform = jax.local_devices()[0].platform
    if platform != "cpu":
        raise ValueError(f"this process computes on {platform}, and only the CPU executor records; JAX_PLATFORMS=cpu.")
    step, extension = verify.jit_layer(request, request.expert_parallelism, **settings), native.library()
    jax.block_until_ready(step(*inputs))
    extension.start_timeline()
    try:
        jax.block_until_ready(step(*inputs))
    finally:
        events = extension.take_timeline()
    return [Event(**event) for event in events]


def make_inputs(request: Request, routing: str) -> Inputs:
    """Those of ``verify``; with ``"zipf"`` the r-th most popular expert is chosen as often as 1 / r."""
    inputs = verify.make_inputs(request)
    if routing == "uniform":
        return inputs
    random = np.random.default_rng(request.seed)
    scores = random.permutation(-np.log1p(np.arange(request.num_experts)))
    # The k largest of logits plus Gumbel noise are a draw of k without replacement.
    noisy = scores + random.gumbel(size=(request.tokens, request.num_experts))
    ids = np.argsort(-noisy, axis=1)[:, : request.num_experts_per_tok]
    return inputs._replace(expert_ids=ids.astype(np.int32))


# ---- What the events say. All of these are given events of one direction.


class Lane(NamedTuple):
    """A worker, in the order of lanes in a picture."""

    rank: int
    worker: int
    name: str


def lanes(events: Iterable[Event]) -> list[Lane]:
    """The workers that did anything, named after what they do."""
    return sorted({Lane(e.rank, e.worker, "communication" if e.communicates else "compute") for e in events})


def span_ms(events: list[Event]) -> float:
    """From the first task's begin to the last one's end."""
    return (max(e.end for e in events) - min(e.begin for e in events)) / 1e6


def trace(events: list[Event]) -> dict[str, Any]:
    """In the Chrome trace event format, which Perfetto opens: a process is a rank, a thread a worker.

    Waits are events of the category ``wait``, just before those of their tasks.
    """
    start = min(e.begin for e in events)
    found: list[dict[str, Any]] = []
    for rank in sorted({e.rank for e in events}):
        found.append({"name": "process_name", "ph": "M", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}})
    for rank, worker, name in lanes(events):
        found.append({"name": "thread_name", "ph": "M", "pid": rank, "tid": worker, "args": {"name": name}})
    for e in sorted(events, key=lambda e: e.begin):
        args = {name: getattr(e, name) for name in ("macrobatch", "block", "blocks", "expert", "part")}
        common = {"ph": "X", "pid": e.rank, "tid": e.worker, "args": args}
        wait, task = {"name": f"wait: {e.kind}", "cat": "wait"}, {"name": e.kind, "cat": "task"}
        found.append(wait | common | {"ts": (e.begin - start) / 1e3, "dur": (e.ready - e.begin) / 1e3})
        found.append(task | common | {"ts": (e.ready - start) / 1e3, "dur": (e.end - e.ready) / 1e3})
    return {"traceEvents": found, "displayTimeUnit": "ms"}


def table(events: list[Event]) -> str:
    """For each kind how many tasks there were, how long workers ran them and waited for them, and as shares.

    Where a worker had no task, such as after its last one, it waited.
    """
    busy: dict[str, float] = collections.defaultdict(float)
    waiting: dict[str, float] = collections.defaultdict(float)
    for e in events:
        busy[e.kind] += (e.end - e.ready) / 1e6
        waiting[e.kind] += (e.ready - e.begin) / 1e6
    count = collections.Counter(e.kind for e in events)
    whole = len(lanes(events)) * span_ms(events)
    waiting["no task"] = whole - sum(busy.values()) - sum(waiting.values())

    def line(name: str, tasks: int, busy: float, waiting: float) -> str:
        shares = f"{busy / whole:8.1%} {waiting / whole:8.1%}"
        return f"{name:12} {tasks:7} {busy:10.1f} {waiting:10.1f} {shares}"

    lines = [f"{'':12} {'tasks':>7} {'busy ms':>10} {'waits ms':>10} {'busy':>8} {'waits':>8}"]
    kinds = [kind for kind in COLORS if count[kind]]
    lines += [line(kind, count[kind], busy[kind], waiting[kind]) for kind in [*kinds, "no task"]]
    lines.append(line("all", len(events), sum(busy.values()), sum(waiting.values())))
    return "\n".join(lines)


# ---- The picture.

_INCHES, _DPI, _LANE_INCHES, _MOST_INCHES = 10.0, 160, 0.2, 100.0
_EDGE = 0.2, 1.2  # between tasks: this share of one, and at most so many pixels
_PALE = 0.25  # share of the colour
_LINE, _BAND = "#d0d7de", "#f6f8fa"


def draw(events: list[Event], title: str, path: Path) -> None:
    """Writes a picture: a lane for each worker, below each other and grouped by rank; waits are pale."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    workers = lanes(events)
    # Half a lane between two ranks.
    places = {(lane.rank, lane.worker): number + 0.5 * lane.rank for number, lane in enumerate(workers)}
    bottom = max(places.values()) + 1
    height = min(1.1 + _LANE_INCHES * bottom, _MOST_INCHES)
    figure = Figure(figsize=(_INCHES, height), dpi=_DPI, layout="constrained")
    axes = figure.add_subplot()
    for rank in sorted({lane.rank for lane in workers}):
        tops = [places[lane.rank, lane.worker] for lane in workers if lane.rank == rank]
        axes.axhspan(min(tops) - 0.1, max(tops) + 1, color=_BAND, linewidth=0, zorder=0)
    _draw_bars(axes, events, places)
    kinds = [kind for kind in COLORS if any(e.kind == kind for e in events)]
    handles = [Patch(color=COLORS[kind], label=kind) for kind in kinds]
    figure.legend(
        handles=[*handles, Patch(color=_pale(COLORS[kinds[0]]), label="pale: waiting")],
        title=title,
        loc="outside upper left",
        alignment="left",
        ncols=len(kinds) + 1,
        columnspacing=1.5,
        handlelength=1.5,
        frameon=False,
        fontsize=8,
        title_fontsize=9,
    )
    names = [lane.name if lane.worker else f"rank {lane.rank}   {lane.name}" for lane in workers]
    axes.set_yticks([place + 0.45 for place in places.values()], names, fontsize=7)
    axes.set_ylim(bottom, -0.2)
    axes.set_xlim(0, span_ms(events))
    axes.set_xlabel("ms", fontsize=8)
    axes.tick_params(axis="x", labelsize=8)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color=_LINE, linewidth=0.5)
    axes.set_axisbelow(True)
    for side in ("top", "left", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(path)


def _draw_bars(axes: Any, events: list[Event], places: dict[tuple[int, int], float]) -> None:
    start, pixel = min(e.begin for e in events), span_ms(events) / (0.85 * _INCHES * _DPI)
    share, most = _EDGE
    waits, tasks = collections.defaultdict(list), collections.defaultdict(list)
    for e in events:
        bar, length = (e.kind, places[e.rank, e.worker]), (e.end - e.ready) / 1e6
        waits[bar].append(((e.begin - start) / 1e6, (e.ready - e.begin) / 1e6))
        tasks[bar].append(((e.ready - start) / 1e6, length - min(share * length, most * pixel)))
    for kind, place in tasks:
        axes.broken_barh(waits[kind, place], (place + 0.25, 0.4), facecolors=_pale(COLORS[kind]), linewidth=0)
        axes.broken_barh(tasks[kind, place], (place, 0.9), facecolors=COLORS[kind], linewidth=0)


def _pale(color: str) -> str:
    return "#" + "".join(f"{round(255 - _PALE * (255 - int(color[i : i + 2], 16))):02x}" for i in (1, 3, 5))


# ---- The command.


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    parser.epilog = f"Exit status: {RECORDED}, recorded; {REFUSED}, refused."
    verify.add_request_arguments(parser, SIZES)
    parser.set_defaults(tokens=TOKENS, expert_parallelism=RANKS)
    parser.add_argument("--routing", choices=ROUTINGS, default="uniform", help="who is chosen (%(default)s)")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/timeline"), metavar="FOLDER", help="of the results (%(default)s)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Records a call of parsed arguments, writes files and prints a table; returns the exit status."""
    _start_devices(arguments.expert_parallelism)
    try:
        request = verify.request_of(arguments)
        check_folder(arguments.out)
        events = record(request, make_inputs(request, arguments.routing))
        earlier = make_folder(arguments.out, FILES)
    except (ValueError, TypeError, NotImplementedError, ImportError, OSError) as refusal:
        say_refused(refusal, as_json=False)
        return REFUSED
    pictures = importlib.util.find_spec("matplotlib") is not None
    for direction in DIRECTIONS:
        own = [e for e in events if e.direction == direction]
        title = f"{direction}: {span_ms(own):.1f} ms, {len(lanes(own))} workers of {request.expert_parallelism} ranks"
        print(f"{title}\n{table(own)}\n")
        (arguments.out / f"{direction}.json").write_text(json.dumps(trace(own)))
        if pictures:
            draw(own, title, arguments.out / f"{direction}.png")
    if earlier:
        print(f"earlier results are now in {earlier}")
    workers, cores = len(lanes(own)), os.cpu_count() or 1
    if workers > cores:
        print(f"{workers} workers shared {cores} cores: a task's time is also that in which it had none")
    if not pictures:
        print("no pictures: they need matplotlib (pip install matplotlib)")
    print(f"results are in {arguments.out}; Perfetto (ui.perfetto.dev) opens the .json files")
    return RECORDED


def _start_devices(count: int) -> None:
    """Virtual ones of the CPU, unless this process has its devices already."""
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        return
    jax.config.update("jax_platforms", "cpu")
