"""The promise of bitwise determinism, as one matrix: the same inputs give the same bits however the work is cut,
spread and timed.

`Cell`s are ways to run a step; `WORKLOADS` are global inputs; `RUNNERS` are executors, each a function from global
arrays, EP and a `MoKConfig` to the six outputs. An executor on other hardware joins by one more row. Whatever it runs
is compared with its own run on one rank with default settings, by equality of bytes, NaN and the sign of zero included.
Whether the values are right is the subject of `test_outputs`. The terminal summary shows which cells were covered.
"""

import collections
import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest

from mok_jax.activation import ACTIVATIONS
from mok_jax.config import SAVE_POLICIES, MoKConfig
from support import ranks, virtual_ranks
from support import runner as shard_map_runner
from support.cases import Case, bad_ids, make, uniform, zipf
from support.compare import count_differences, differences
from support.oracle import Outputs


class Runner(NamedTuple):
    """An executor and what can be varied on it.

    Attributes:
      run: ``(inputs, ep, config, **activation) -> Outputs``, global NumPy arrays; see `Workload` for ``activation``.
      ep_sizes: numbers of ranks that it can run; 1 is one of them.
      workers: settings of `MoKConfig` that change how many workers there are, and of which kind.
      timings: settings that change when they run.
      dtypes: those that it computes in; workloads of another one are left out.
      activations: those that it has; likewise.
      marks: of its tests.
    """

    run: Callable[..., Outputs]
    ep_sizes: tuple[int, ...]
    workers: tuple[dict, ...]
    timings: tuple[dict, ...]
    dtypes: tuple[str, ...] = ("bfloat16", "float32")
    activations: tuple[str, ...] = ACTIVATIONS
    marks: tuple = ()


def run_on_cpu(inputs, ep, config, **activation):
    return shard_map_runner.run(inputs, ep, implementation="megakernel", config=config, **activation)


RUNNERS = {
    "cpu": Runner(
        run_on_cpu,
        ep_sizes=(1, 2, 3, 4, 6, 8, 72),
        workers=tuple(
            {"host_comm_workers": comm, "host_compute_workers": compute}
            for comm, compute in ((1, 1), (1, 3), (3, 1), (2, 4))
        ),
        timings=tuple(
            {"host_delay_seed": seed, "host_comm_workers": 2, "host_compute_workers": 3} for seed in (1, 2, 3)
        ),
    ),
    # A rank needs two CTAs: 64 ranks leave none to reserve. Timing varies by itself.
    "gpu": Runner(
        virtual_ranks.run,
        ep_sizes=(1, 2, 3, 4, 6, 8, 24, 36),
        workers=tuple(
            {"comm_sms": comm, "reserve_sms": reserve} for comm, reserve in ((0, 16), (1, 0), (8, 0), (8, 16), (0, 100))
        ),
        timings=tuple({"reserve_sms": reserve} for reserve in (0, 7, 64)),
        dtypes=("bfloat16",),
        activations=("swiglu",),
        marks=(pytest.mark.gpu,),
    ),
    # Processes, a rank each; see `ranks`.
    "ranks": Runner(
        ranks.run,
        ep_sizes=(1, ranks.RANKS),
        workers=tuple({"comm_sms": comm, "reserve_sms": ranks.RESERVED_SMS} for comm in (0, 1, 4)),
        timings=tuple({"reserve_sms": ranks.RESERVED_SMS + more} for more in (0, 2, 6)),
        dtypes=("bfloat16",),
        activations=("swiglu",),
        marks=(pytest.mark.ranks,),
    ),
}


class Workload(NamedTuple):
    """Global inputs, and what experts do with them.

    Attributes:
      case: shape and routing.
      dtype: of tokens and weights.
      activation: arguments of ``mok_jax.moe``, where they are not the defaults.
      varied: kinds of cells to run it in; None for all.
    """

    case: Case
    dtype: str
    activation: dict = {}  # noqa: RUF012  (never changed)
    varied: tuple[str, ...] | None = None

    def runs_on(self, runner):
        return self.dtype in runner.dtypes and self.activation.get("activation", "swiglu") in runner.activations


# 72 divides tokens and experts, so that no EP size needs padding. The popular experts of `skewed` fill several row
# blocks, so that they straddle macrobatches; `irregular` has absent and bad ids and an odd K; widths straddle a tile.
WORKLOADS = {
    "uniform": Workload(Case("uniform", 144, 4, 72, 72, 136, uniform), "bfloat16"),
    "skewed": Workload(Case("skewed", 432, 3, 72, 136, 72, zipf), "float32"),
    "irregular": Workload(Case("irregular", 216, 3, 72, 72, 72, bad_ids), "bfloat16"),
    "gpt_oss": Workload(
        Case("gpt_oss", 216, 3, 72, 72, 136, zipf),
        "bfloat16",
        {"activation": "gpt_oss", "activation_limit": 0.75},
        varied=("save", "everything"),  # the ring and EP with them
    ),
}


class Cell(NamedTuple):
    """One way to run a step: what it varies, the value that is shown, and the run."""

    varied: str
    value: str
    ep: int
    settings: dict


def cells_of(runner):
    """All ways to run a step on ``runner``, except the one that all are compared with."""
    small = {"ring_rows": 256, "minibatch_rows": 128}
    largest = [n for n in runner.ep_sizes if n <= 4]
    some, last = largest[len(largest) // 2], largest[-1]
    for n in runner.ep_sizes:
        yield Cell("EP", str(n), n, {})
    for repeat in range(3):
        yield Cell("repeats", str(repeat + 1), last, small)
    for workers in runner.workers:
        yield Cell("workers", "/".join(map(str, workers.values())), some, small | workers)
    for timing in runner.timings:
        yield Cell("delays", str(next(iter(timing.values()))), last, small | timing)
    for rows in (128, 256, 1024):
        yield Cell("minibatch", str(rows), last, {"minibatch_rows": rows})
    for n in (1, last):
        for rows in (128, 256, 512, 8192):
            yield Cell("ring", f"{rows} at EP {n}", n, {"ring_rows": rows, "minibatch_rows": 128})
    for save in SAVE_POLICIES:
        for rows in (None, 128, 512):
            yield Cell("save", f"{save} (ring {rows or 'default'})", some, {"save": save, "ring_rows": rows})
    everything = {"ring_rows": 128, "minibatch_rows": 128, "save": "nothing"} | runner.timings[0]
    yield Cell("everything", "smallest ring, nothing saved, delays", runner.ep_sizes[-2], everything)


class Coverage:
    """Collects the cells that passed, and prints them at the end; a pytest plugin, there once the first has."""

    def __init__(self):
        self.values = collections.defaultdict(dict)
        self.runs = collections.Counter()

    def add(self, runner, cell):
        self.values[runner].setdefault(cell.varied, {})[cell.value] = None
        self.runs[runner] += 1

    def pytest_terminal_summary(self, terminalreporter):
        for runner, varied in self.values.items():
            terminalreporter.section(f"bitwise invariance on {runner}: {self.runs[runner]} runs, same bits", sep="-")
            for name, values in varied.items():
                terminalreporter.write_line(f"{name:10} {', '.join(values)}")


@pytest.fixture(scope="session")
def coverage(request):
    plugin = Coverage()
    request.config.pluginmanager.register(plugin, "mok_invariance_coverage")
    return plugin


@functools.cache
def inputs_of(workload, seed=1):
    return make(WORKLOADS[workload].case, WORKLOADS[workload].dtype, seed)


def run(runner, workload, inputs, ep, **settings):
    return RUNNERS[runner].run(inputs, ep, MoKConfig(**settings), **WORKLOADS[workload].activation)


@functools.cache
def expected_of(runner, workload):
    """One rank, the ring that holds everything, default workers."""
    return run(runner, workload, inputs_of(workload), 1)


def workloads_of(runner):
    return [name for name, workload in WORKLOADS.items() if workload.runs_on(RUNNERS[runner])]


def marked(runner, *rest, **options):
    return pytest.param(runner, *rest, marks=RUNNERS[runner].marks, **options)


MATRIX = [
    marked(runner, workload, cell, id=f"{runner}-{workload}-{cell.varied}-{cell.value}".replace(" ", "_"))
    for runner in RUNNERS
    for cell in cells_of(RUNNERS[runner])
    for workload in workloads_of(runner)
    if WORKLOADS[workload].varied is None or cell.varied in WORKLOADS[workload].varied
]
PAIRS = [marked(runner, workload) for runner in RUNNERS for workload in workloads_of(runner)]


@pytest.mark.parametrize(("runner", "workload", "cell"), MATRIX)
def test_same_bits(runner, workload, cell, coverage):
    actual = run(runner, workload, inputs_of(workload), cell.ep, **cell.settings)
    different = differences(actual, expected_of(runner, workload))
    assert not any(different.values()), f"elements that differ: {different}"
    coverage.add(runner, cell)


@pytest.mark.parametrize("runner", [marked(name) for name in RUNNERS])
def test_another_order_would_show(runner):
    """The data are such that bits depend on the order of sums: reversed tokens give the same rows, other gradients."""
    inputs = make(WORKLOADS["skewed"].case, RUNNERS[runner].dtypes[-1], weight_dtype="float32")
    per_token = {name: getattr(inputs, name)[::-1] for name in ("x", "expert_ids", "expert_weights", "dy")}
    actual = run(runner, "skewed", inputs._replace(**per_token), 1)
    expected = run(runner, "skewed", inputs, 1)
    for name in ("y", "dx", "d_expert_weights"):
        assert count_differences(getattr(actual, name)[::-1], getattr(expected, name)) == 0, name
    # A tensor core adds 16 rows at once, so that the order within those does not show: the expert with most rows.
    busiest = np.bincount(inputs.expert_ids.ravel()).argmax()
    for name in ("d_wi_0", "d_wi_1", "d_wo"):
        gradient, before = getattr(actual, name)[busiest], getattr(expected, name)[busiest]
        assert count_differences(gradient, before) > before.size / 2, name


@pytest.mark.parametrize(("runner", "workload"), PAIRS)
@pytest.mark.parametrize("others", ("changed", "absent"))
def test_token_is_independent_of_the_others(runner, others, workload, coverage):
    """`y` and `dx` of a third of the tokens, while the rest change data and experts, or cease to exist."""
    inputs, other = inputs_of(workload), inputs_of(workload, seed=2)
    kept = np.arange(len(inputs.x)) % 3 == 0
    if others == "absent":
        replacements = {"expert_ids": np.full_like(inputs.expert_ids, -1)}
    else:
        replacements = {name: getattr(other, name) for name in ("x", "expert_ids", "expert_weights", "dy")}
    changed = {name: np.where(kept[:, None], getattr(inputs, name), new) for name, new in replacements.items()}
    cell = Cell("tokens", f"others {others}", sorted(RUNNERS[runner].ep_sizes)[1], {"ring_rows": 256})
    actual = run(runner, workload, inputs._replace(**changed), cell.ep, **cell.settings)
    expected = expected_of(runner, workload)
    for name in ("y", "dx"):
        assert count_differences(getattr(actual, name)[kept], getattr(expected, name)[kept]) == 0, name
    coverage.add(runner, cell)
