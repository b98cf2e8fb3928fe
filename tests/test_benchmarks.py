"""The benchmark itself: statistics, operation counts, routing, the file's schema, and that wrong results stop a run."""

import dataclasses
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import check, flops, layer, machine, measure, report, routing
from benchmarks.implementations import IMPLEMENTATIONS, compiled, grouped
from benchmarks.implementations.base import Implementation, Program
from benchmarks.problem import make_problem, make_tokens
from benchmarks.shapes import SHAPES


@pytest.fixture(scope="module")
def tiny():
    return make_problem(SHAPES["tiny"], 1, 1, jnp.dtype("float32"), jax.devices("cpu"))


# Statistics


def test_a_timing_has_median_and_extremes():
    timing = measure.Timing((3.0, 1.0, 8.0, 2.0), (1e-6, 3e-6, 2e-6, 9e-6))
    assert (timing.median, timing.least, timing.most) == (2.5, 1.0, 8.0)
    assert timing.host_us == pytest.approx(2.5)


def test_rates_are_work_over_time_over_the_ceilings():
    ceiling = measure.Timing((0.5, 1.0, 2.0), (0.0,) * 3)
    own = measure.Timing((2.0, 4.0, 8.0), (1e-5,) * 3)
    values = layer.rates(layer.Timed(own, ceiling, 0.0, None), work=6e12, ceiling_work=3e12)
    assert values["tflops"] == 1.5 and values["c_tflops"] == 3.0
    assert values["over_c"] == 0.5 and values["over_c_min"] == 0.5
    assert (values["ms"], values["ms_min"], values["ms_max"]) == (4e3, 2e3, 8e3)


def test_a_host_that_wakes_late_is_no_drift():
    """Late after the second launch: that looks longer by what the third looks shorter."""
    steady, late = measure.Timing((1.0,) * 6, (0,) * 6), measure.Timing((1.0, 1.4, 0.6, 1.0, 1.0, 1.0), (0,) * 6)
    assert measure.drift([steady, late]) == pytest.approx(0)


def test_drift_compares_means_and_trend_compares_halves():
    steady, slow = measure.Timing((1.0, 1.2), (0, 0)), measure.Timing((1.32, 1.32), (0, 0))
    assert measure.drift([steady, steady]) == 0
    assert measure.drift([steady, slow, steady]) == pytest.approx(0.2)
    assert measure.trend(measure.Timing((1.0, 1.0, 1.3, 1.3), (0,) * 4)) == pytest.approx(0.3)
    assert measure.trend(measure.Timing((1.3, 1.0, 1.3, 1.0), (0,) * 4)) == 0


class FakeDevice:
    """A device with a clock of its own: launches queue up, and waiting moves the clock."""

    def __init__(self, monkeypatch):
        self.now, self.free = 0.0, 0.0
        monkeypatch.setattr(measure.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(measure.time, "sleep", self.sleep)

    def sleep(self, seconds):
        self.now += seconds

    def program(self, durations, host_s=0.001, queue="xla"):
        def launch(i):
            self.now += host_s
            self.free = max(self.free, self.now) + durations[i % len(durations)]
            return self.free

        def wait(end):
            self.now = max(self.now, end)

        return Program(launch, wait, queue=queue)


def test_overlapped_launches_take_from_end_to_end(monkeypatch):
    program = FakeDevice(monkeypatch).program([0.1, 0.2, 0.3])
    taken = measure.time_launches([program] * 6, overlapped=True)
    assert taken[0].device_s is None
    np.testing.assert_allclose([launch.device_s for launch in taken[1:]], [0.2, 0.3, 0.1, 0.2, 0.3])
    np.testing.assert_allclose([launch.host_s for launch in taken], 0.001)


def test_queues_do_not_share_the_device(monkeypatch):
    device = FakeDevice(monkeypatch)
    first, second = device.program([0.1]), device.program([0.2], queue="other")
    taken = measure.time_launches([first, first, second, second, first], overlapped=True)
    assert [launch.device_s is None for launch in taken] == [True, False, True, False, True]
    np.testing.assert_allclose([taken[1].device_s, taken[3].device_s], [0.1, 0.2])


def test_lone_launches_take_from_their_start(monkeypatch):
    program = FakeDevice(monkeypatch).program([0.1, 0.2])
    taken = measure.time_launches([program] * 4, overlapped=False)
    np.testing.assert_allclose([launch.device_s for launch in taken], [0.101, 0.201] * 2)


def test_burst_discards_the_first_launches(monkeypatch):
    program = FakeDevice(monkeypatch).program([9.0, 9.0, 9.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6])
    timing = measure.burst(program, overlapped=True)
    np.testing.assert_allclose(timing.device_s, [0.1, 0.2, 0.3, 0.4, 0.5, 0.6])


def test_matched_compares_with_a_ceiling_that_is_busy_as_long(monkeypatch):
    device = FakeDevice(monkeypatch)
    slower_and_slower = [0.01 * 1.01**i for i in range(200)]
    own, ceilings = measure.matched(device.program([0.1]), device.program(slower_and_slower), overlapped=True)
    np.testing.assert_allclose(own.device_s, [0.1] * 6)
    ends = np.cumsum(slower_and_slower[1:])  # what the first launch took is not known
    expected = [t for t, end in zip(slower_and_slower[1:], ends, strict=True) if 0.3 < end <= 0.9]
    for ceiling in ceilings:
        np.testing.assert_allclose(ceiling.device_s, expected)


def test_matched_counts_six_launches_of_a_slow_ceiling(monkeypatch):
    device = FakeDevice(monkeypatch)
    _, ceilings = measure.matched(device.program([0.01]), device.program([0.5]), overlapped=True)
    assert [len(ceiling.device_s) for ceiling in ceilings] == [6, 6]


@pytest.mark.parametrize("queue", ["xla", "other"])
def test_sustained_keeps_program_and_ceiling_apart(monkeypatch, queue):
    device = FakeDevice(monkeypatch)
    own, ceiling = measure.sustained(device.program([0.05], queue=queue), device.program([0.02]), overlapped=True)
    np.testing.assert_allclose(own.device_s, 0.05)
    np.testing.assert_allclose(ceiling.device_s, 0.02)
    assert len(own.device_s) == len(ceiling.device_s) >= measure.LEAST_ROUNDS


# Work


def test_flops_count_three_products_a_row_forward_and_six_backward():
    rows, hidden, intermediate = 5, 7, 3
    forward = 2 * rows * hidden * intermediate * 2 + 2 * rows * intermediate * hidden
    assert flops.flops("forward", rows, hidden, intermediate) == forward
    assert flops.flops("backward", rows, hidden, intermediate) == 2 * forward
    assert flops.flops("forward+backward", rows, hidden, intermediate) == 3 * forward


def test_cycles_are_those_of_one_call():
    readings = iter([(2, 1_000), (6, 9_000)])
    program = Program(launch=None, wait=None, cycles=lambda: next(readings), calls=2)
    returned, cycles = layer.count_cycles(program, lambda: "timing")
    assert (returned, cycles) == ("timing", 2_000)
    taken = layer.Timed(None, None, 0.0, cycles)
    assert layer.cycle_efficiency(taken, 1_500 * flops.HOPPER_FLOPS_PER_CYCLE) == 0.75
    assert layer.count_cycles(Program(launch=None, wait=None), lambda: 1) == (1, None)
    assert layer.cycle_efficiency(layer.Timed(None, None, 0.0, None), 1.0) is None


def test_a_commit_can_be_given():
    assert machine.describe("0123abc")["commit"] == "0123abc"
    assert machine.describe()["commit"] == machine.commit()


def test_shapes_scale_with_ranks_unless_they_are_whole():
    assert SHAPES["v3"].over(ep=4, data=2) == dataclasses.replace(SHAPES["v3"].over(1, 1), tokens=32768, experts=64)
    assert SHAPES["demo"].over(ep=4, data=2) == SHAPES["demo"].over(ep=1, data=1)
    with pytest.raises(ValueError, match="8 experts for 3 ranks"):
        SHAPES["demo"].over(ep=3, data=1)


def test_demo_is_what_make_demo_trains():
    from models import train

    args, demo = train.parse_arguments([]), SHAPES["demo"]
    assert (demo.hidden, demo.intermediate) == (args.hidden_size, args.intermediate_size)
    assert (demo.experts, demo.top_k) == (args.num_experts, args.num_experts_per_tok)
    assert demo.tokens == args.batch_size * args.sequence_length


@pytest.mark.parametrize("name", routing.ROUTINGS)
def test_routing_gives_distinct_experts_and_differs_by_seed(name):
    first, second = (routing.ROUTINGS[name](np.random.default_rng(seed), 500, 12, 5) for seed in (0, 1))
    assert first.shape == (500, 5) and first.dtype == np.int32
    assert first.min() >= 0 and first.max() < 12
    assert all(len(set(token)) == 5 for token in first.tolist())
    assert (first != second).any()
    np.testing.assert_array_equal(first, routing.ROUTINGS[name](np.random.default_rng(0), 500, 12, 5))


def test_uniform_routing_is_even_and_zipf_routing_is_not():
    random = np.random.default_rng(0)
    even = np.bincount(routing.uniform(random, 4000, 8, 1)[:, 0], minlength=8) / 4000
    skewed = np.sort(np.bincount(routing.zipf(random, 4000, 8, 1)[:, 0], minlength=8))[::-1] / 4000
    harmonic = 1 / np.arange(1, 9)
    np.testing.assert_allclose(even, 1 / 8, atol=0.025)
    np.testing.assert_allclose(skewed, harmonic / harmonic.sum(), atol=0.025)


def test_router_weights_are_positive_and_sum_to_one():
    weights = routing.router_weights(np.random.default_rng(0), 50, 4)
    assert weights.dtype == np.float32 and weights.min() > 0
    np.testing.assert_allclose(weights.sum(axis=1), 1, rtol=1e-6)


# Results


class XlaProducts:
    """``grouped.Products`` from XLA: the layer around the products is the same for the GPU's."""

    def dot(self, lhs, rhs, sizes):
        return jax.lax.ragged_dot(lhs, rhs, sizes, precision="highest")

    def dot_transposed(self, lhs, rhs, sizes):
        return self.dot(lhs, rhs.swapaxes(1, 2), sizes)

    def weight_gradient(self, lhs, rhs, sizes):
        zeros = jnp.zeros((len(sizes), lhs.shape[1], rhs.shape[1]), lhs.dtype)
        return jax.vjp(lambda weights: self.dot(lhs, weights, sizes), zeros)[1](rhs)[0]


@pytest.mark.parametrize("pass_name", flops.PASSES)
def test_the_layer_around_grouped_products_is_right(tiny, pass_name):
    tokens = make_tokens(tiny, "zipf")
    parameters = grouped.side_by_side(tiny.weights)
    bind = compiled.build(grouped.make_layer(XlaProducts()), parameters, pass_name, grouped.split_gradients)
    bind(make_tokens(tiny, "uniform")).results(0)
    results = bind(tokens).results(1)
    assert ("y" in results, "dx" in results) == ("forward" in pass_name.split("+"), "backward" in pass_name)
    check.check("grouped", results, check.expect(tiny, tokens[1]), tiny.dtype)


def test_a_forward_that_saves_returns_no_argument(tiny):
    tokens = make_tokens(tiny, "uniform")
    _, saves = IMPLEMENTATIONS["megakernel"].build(tiny, "forward+saves")(tokens).launch(0)
    arguments = {array.shape for array in (*tokens[0], *tiny.weights)}
    assert saves and not arguments & {saved.shape for saved in saves}


def test_f32_weights_are_those_of_the_layer_and_their_gradients_are_f32():
    problem = make_problem(SHAPES["tiny"], 1, 1, jnp.dtype("bfloat16"), jax.devices("cpu"))
    tokens = make_tokens(problem, "uniform")
    results = IMPLEMENTATIONS["megakernel-f32-weights"].build(problem, "forward+backward")(tokens).results(0)
    check.check("f32 weights", results, check.expect(problem, tokens[0]), problem.dtype)
    assert {results[name].dtype.name for name in ("d_wi_0", "d_wi_1", "d_wo")} == {"float32"}


@pytest.mark.parametrize("result", ["y", "dx", "d_expert_weights", "d_wi_0", "d_wi_1", "d_wo"])
def test_one_wrong_value_is_found(tiny, result):
    tokens = make_tokens(tiny, "uniform")
    bind = IMPLEMENTATIONS["xla"].build(tiny, "forward+backward")
    results = {name: np.array(array) for name, array in bind(tokens).results(0).items()}
    expected = check.expect(tiny, tokens[0])
    assert max(check.check("right", results, expected, tiny.dtype).values()) < 1e-5
    row = tuple(np.ravel(index)[-1] for index in expected.where[result])
    results[result][row] *= 1.01
    with pytest.raises(check.WrongResultError, match=rf"wrong {result} by"):
        check.check("wrong", results, expected, tiny.dtype)
    results[result][row] = np.nan
    with pytest.raises(check.WrongResultError, match=rf"wrong {result} by"):
        check.check("wrong", results, expected, tiny.dtype)


# The command


def replace_layer(monkeypatch, name, function):
    """Registers ``function(x, ids, weights, wi_0, wi_1, wo)`` under the name of an implementation."""

    def build(problem, pass_name):
        return compiled.build(function, problem.weights, pass_name)

    monkeypatch.setitem(IMPLEMENTATIONS, name, Implementation(name, lambda _: None, build))


@pytest.fixture
def hurry(monkeypatch):
    """For tests in which the figures do not matter."""
    for name in ("IDLE_S", "LOAD_S", "RELOAD_S", "SUSTAINED_S"):
        monkeypatch.setattr(measure, name, 0.01)


def run_command(tmp_path, *arguments):
    code = layer.main(["--shapes", "tiny", "--routing", "uniform", "--out", str(tmp_path), *arguments])
    return code, json.loads((tmp_path / "layer.json").read_text())


@pytest.mark.parametrize(
    ("arguments", "text"),
    (
        ("--ep 0", "argument --ep: 0 must be from 1 to 72; the nearest is 1"),
        ("--time-limit nan", "argument --time-limit: nan must be a finite number of at least 0"),
        ("--shapes v9", "argument --shapes: 'v9' is not one of "),
        (f"--out {__file__}", f"{__file__} cannot be a folder: {__file__} is not one."),
    ),
)
def test_impossible_arguments_end_with_one_line(capsys, arguments, text):
    with pytest.raises(SystemExit) as end:
        sys.exit(layer.main(arguments.split()))
    errors = capsys.readouterr().err
    assert end.value.code == 2 and errors.startswith(f"benchmarks.layer: {text}") and errors.count("\n") == 1


def test_results_of_an_earlier_run_are_moved(tmp_path, capsys):
    (tmp_path / "layer.json").write_text("of an earlier run")
    run_command(tmp_path, "--time-limit", "0", "--implementations", "xla", "--pass", "forward")
    assert f"moved the results of an earlier run to {tmp_path / 'earlier-1'}" in capsys.readouterr().out
    assert (tmp_path / "earlier-1" / "layer.json").read_text() == "of an earlier run"


def test_a_planted_wrong_result_stops_the_run(monkeypatch, tmp_path, capsys):
    replace_layer(monkeypatch, "xla", lambda x, ids, weights, *_: x)
    code, results = run_command(tmp_path, "--pass", "forward", "--implementations", "xla,megakernel")
    assert code == 1 and results["records"] == []
    assert "stopped: tiny forward uniform xla: wrong y by" in capsys.readouterr().out


def test_a_wrong_result_is_never_timed_even_when_going_on(monkeypatch, tmp_path, hurry):
    replace_layer(monkeypatch, "xla", lambda x, ids, weights, *_: x)
    arguments = "--pass", "forward", "--implementations", "xla,megakernel", "--protocol", "burst", "--keep-going"
    code, results = run_command(tmp_path, *arguments)
    records = {r["implementation"]: r for r in results["records"]}
    assert code == 1 and "wrong y by" in records["xla"]["error"] and records["xla"]["ms"] is None
    assert records["megakernel"]["checked"] and records["megakernel"]["ms"] > 0


def test_an_exception_is_a_record_and_ends_nothing(monkeypatch, tmp_path, capsys, hurry):
    def broken(*_):
        raise NotImplementedError("no such kernel")

    replace_layer(monkeypatch, "xla", broken)
    arguments = "--pass", "forward", "--implementations", "xla,megakernel", "--protocol", "burst"
    code, results = run_command(tmp_path, *arguments)
    errors = {r["implementation"]: r["error"] for r in results["records"]}
    assert code == 0 and errors == {"xla": "NotImplementedError: no such kernel", "megakernel": None}
    assert "no such kernel" in capsys.readouterr().out


def test_the_command_measures_everything_that_can_run_here(tmp_path, capsys, hurry):
    code, results = run_command(tmp_path, "--pass", "forward+backward")
    assert code == 0 and (tmp_path / "layer.png").stat().st_size > 0
    report.check_schema(results)
    assert {"device", "clocks", "power", "versions", "commit", "date"} <= set(results["meta"])
    measured = [r for r in results["records"] if r["error"] is None]
    assert {(r["implementation"], r["protocol"]) for r in measured} >= {
        (name, protocol) for name in ("megakernel", "xla", "ideal-unfused") for protocol in layer.PROTOCOLS
    }
    assert {r["implementation"] for r in results["records"]} == set(IMPLEMENTATIONS)
    for r in measured:
        assert 0 < r["ms_min"] <= r["ms"] <= r["ms_max"]
        assert r["checked"] == (r["implementation"] != "ideal-unfused")
    reasons = {r["implementation"]: r["error"] for r in results["records"] if r["error"]}
    assert reasons["pallas-mgpu"] == "its kernels exist for GPUs only"
    assert "pallas-mgpu: its kernels exist for GPUs only" in capsys.readouterr().out


def test_a_device_that_fails_costs_one_shape_its_figures(monkeypatch, tmp_path, hurry):
    def fail(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    monkeypatch.setattr(check, "expect", fail)
    code, results = run_command(tmp_path, "--pass", "forward,backward", "--implementations", "xla,torch")
    assert code == 1 and len(results["records"]) == 2 * 2 * len(layer.PROTOCOLS)
    assert all("out of memory" in record["error"] for record in results["records"])


def test_several_ranks_and_no_time_left(tmp_path, hurry):
    arguments = "--ep", "2", "--data", "2", "--pass", "forward", "--protocol", "burst"
    code, results = run_command(tmp_path, *arguments, "--implementations", "megakernel,torch")
    assert code == 0 and [r["error"] is None for r in results["records"]] == [True, False]
    assert (results["records"][0]["ep"], results["records"][0]["data"]) == (2, 2)
    code, results = run_command(tmp_path, *arguments, "--implementations", "megakernel", "--time-limit", "0")
    assert code == 0 and "no time was left" in results["records"][0]["error"]


def test_the_schema_is_checked():
    meta = dict.fromkeys(report.META_KEYS)
    good = report.make_record(error="not installed")
    report.check_schema({"meta": meta, "records": [good]})
    with pytest.raises(ValueError, match="neither an error nor"):
        report.check_schema({"meta": meta, "records": [good | {"error": None}]})
    with pytest.raises(ValueError, match="has the keys"):
        report.check_schema({"meta": meta, "records": [{"shape": "v3"}]})
    with pytest.raises(ValueError, match="meta lacks"):
        report.check_schema({"meta": {}, "records": []})
    with pytest.raises(ValueError, match="no such keys"):
        report.make_record(speed=1)
