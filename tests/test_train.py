"""The demonstration command, very small, as a user starts it: what it writes, how it ends, and what it refuses."""

import dataclasses
import io
import json
import os
import re
import signal
import sys
import time

import jax
import numpy as np
import pytest
from rich.console import Console

from models import data, train
from models.config import ModelConfig
from models.interrupt import GRACE_S
from models.metrics import Intervals, read_metrics
from mok_jax import native
from support.processes import free_port
from support.training import TIME_LIMIT_S, TINY, finish, start, wait_for, write_text

INTERRUPT_LIMIT_S = 5

# The command with all that takes long replaced, and minutes of C, where Python handles no signal, in one place.
BLOCKED = """
import hashlib, sys
import numpy as np
from models import data, interrupt, train

def block(*_, **__):
    print("blocked", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 1_000_000_000)

def step(state, _):
    return state, {"loss": np.float32(3), "router_loss": np.float32(0), "expert_load": np.ones((1, 8), np.int32)}

train.compile_train_step = lambda *_: step
train.make_evaluation = lambda *_, **__: block if place == "evaluate" else lambda *_: 2.5
train.generate = lambda *_: b"text"
place, arguments = sys.argv[1], sys.argv[2:]
if place == "step":
    step = block
elif place != "evaluate":
    setattr(data if place == "load_corpus" else train, place, block)
interrupt.leave(train.main(arguments))
"""


@pytest.fixture(scope="module")
def text_file(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text"))


def interrupt(process, times=1):
    """Output, exit code, and seconds from the first SIGINT to the end."""
    started = time.monotonic()
    for number in range(times):
        time.sleep(0.2 * min(1, number))
        process.send_signal(signal.SIGINT)
    output, code = finish(process)
    return output, code, time.monotonic() - started


def test_a_run_writes_everything(text_file, tmp_path):
    """And moves aside what an earlier one has left."""
    (tmp_path / "earlier-1").mkdir()
    (tmp_path / "metrics.jsonl").write_text("of an earlier run")
    output, code = finish(start(text_file, tmp_path, "--steps", "13", "--tensorboard", "--profile", "2"))
    assert code == 0, output
    assert "8 cpu devices: data 2 x expert 4, float32" in output
    earlier = tmp_path / "earlier-2"
    assert f"moved the results of an earlier run to {earlier}" in output
    assert (earlier / "metrics.jsonl").read_text() == "of an earlier run"
    written = {path.name: path.stat().st_size for path in tmp_path.iterdir() if path.is_file()}
    assert set(written) == {"metrics.jsonl", "config.json", "loss.png", "expert_load.png", "sample.txt"}
    assert min(written.values()) > 0
    assert list((tmp_path / "tensorboard").glob("events.*"))
    assert list((tmp_path / "profile").rglob("*.trace.json.gz"))

    intervals, results = read_metrics(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in intervals] == [2, 4, 6, 8, 10, 12, 13]
    for line, steps in zip(intervals, (2,) * 6 + (1,), strict=True):
        assert np.sum(line["expert_load"]) == 8 * 16 * 2 * steps
        assert 0 < line["loss"] < 10 and line["model_tflops_per_s"] > 0 and line["load_imbalance"] >= 1
    assert intervals[0]["loss"] > intervals[-1]["loss"]
    assert results["held_out_loss"] != results["held_out_loss_without_experts"]
    assert 0 < results["held_out_loss"] < 10


def test_deterministic_runs_end_with_the_same_bits(text_file, tmp_path):
    """On the devices that the user's flags ask for."""
    arguments = ("--steps", "3", "--num-layers", "2", "--deterministic", "--remat", "--scan")
    flags = "--xla_force_host_platform_device_count=2"
    processes = {run: start(text_file, tmp_path / run, *arguments, XLA_FLAGS=flags) for run in ("first", "second")}
    lines = []
    for run, process in processes.items():
        output, code = finish(process)
        assert code == 0 and "2 cpu devices" in output, output
        intervals, results = read_metrics(tmp_path / run / "metrics.jsonl")
        digest = results["parameters_sha256"]
        assert len(digest) == 64 and f"SHA-256 of the parameters: {digest}\n" in output
        lines.append((digest, [line["loss"] for line in intervals]))
    assert lines[0] == lines[1]


@pytest.mark.parametrize("users", ("", "--xla_cpu_enable_fast_math=false"))
def test_deterministic_is_asked_of_xla_before_it_starts(text_file, monkeypatch, users):
    """And not without the argument; what the user asks of XLA stays."""
    monkeypatch.setenv("XLA_FLAGS", users)
    seen = []

    def start_devices(*_):
        seen.append(os.environ["XLA_FLAGS"].split())
        raise ValueError("seen enough")

    monkeypatch.setattr(train, "start_devices", start_devices)
    for arguments in ([], ["--deterministic"]):
        assert train.main(["--data", str(text_file), *arguments]) == 2
    assert seen == [users.split(), [*users.split(), "--xla_gpu_deterministic_ops=true"]]


def test_ctrl_c_keeps_what_was_written(text_file, tmp_path):
    process = start(text_file, tmp_path, "--steps", "1000000")
    metrics, limit = tmp_path / "metrics.jsonl", time.monotonic() + TIME_LIMIT_S
    while not (metrics.exists() and metrics.read_text().count("\n") >= 2):
        assert process.poll() is None and time.monotonic() < limit, finish(process)[0]
        time.sleep(0.05)
    output, code, seconds = interrupt(process)
    assert code == 130 and seconds < INTERRUPT_LIMIT_S, output
    assert "interrupted" in output and "Traceback" not in output
    # A picture is there whole or, where drawing takes longer than a run may take to end, not at all.
    names = {path.name for path in tmp_path.iterdir()}
    assert "metrics.jsonl" in names and names <= {"metrics.jsonl", "config.json", "loss.png", "expert_load.png"}
    assert all((tmp_path / name).read_bytes().endswith(b"IEND\xaeB`\x82") for name in names if name.endswith(".png"))
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert len(lines) >= 2 and all("loss" in line for line in lines)


def test_ctrl_c_while_xla_compiles(text_file, tmp_path):
    """An earlier run's results stay where they are."""
    (tmp_path / "metrics.jsonl").write_text("of an earlier run")
    process = start(text_file, tmp_path, "--num-layers", "12")
    wait_for(process, "cpu devices")
    time.sleep(2)
    output, code, seconds = interrupt(process)
    assert code == 130 and seconds < INTERRUPT_LIMIT_S, output
    assert "Traceback" not in output and "compiled" not in output
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize("place", ("load_corpus", "compile_train_step", "evaluate", "draw"))
def test_ctrl_c_where_python_handles_no_signal(text_file, tmp_path, place):
    process = start(text_file, tmp_path, "--steps", "4", program=("-c", BLOCKED, place))
    wait_for(process, "blocked")
    output, code, seconds = interrupt(process)
    assert code == 130 and seconds < INTERRUPT_LIMIT_S, output
    assert output == "interrupted: what was written so far is kept\n"
    assert seconds < GRACE_S  # Only the loop is given time to end.
    if place in ("evaluate", "draw"):
        intervals, results = read_metrics(tmp_path / "metrics.jsonl")
        assert [line["step"] for line in intervals] == [2, 4]
        assert bool(results) == (place == "draw")


@pytest.mark.parametrize("times", (1, 2))
def test_ctrl_c_in_a_step_that_does_not_end(text_file, tmp_path, times):
    """The loop is given a while to end, unless Ctrl-C comes again."""
    process = start(text_file, tmp_path, program=("-c", BLOCKED, "step"))
    wait_for(process, "blocked")
    output, code, seconds = interrupt(process, times)
    assert code == 130 and "interrupted: what was written so far is kept\n" in output
    assert (GRACE_S < seconds < INTERRUPT_LIMIT_S) if times == 1 else (seconds < GRACE_S)


def test_a_loss_that_is_no_number_ends_the_run(text_file, tmp_path):
    output, code = finish(start(text_file, tmp_path, "--steps", "1000", "--learning-rate", "1e30"))
    assert code == 1 and "Traceback" not in output
    intervals, results = read_metrics(tmp_path / "metrics.jsonl")
    assert intervals[-1]["loss"] is None and not results
    assert output.splitlines()[-1] == (
        f"models.train: the loss is nan at step {intervals[-1]['step']}; a smaller --learning-rate than 1e+30 may help"
    )
    assert intervals[-1]["step"] < 100 and (tmp_path / "loss.png").stat().st_size > 0


def test_a_held_out_loss_that_is_no_number_ends_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(train, "parameters_sha256", lambda *_: "")
    names = "held_out_loss", "held_out_loss_without_experts"
    evaluations = dict.fromkeys(names, lambda *_: float("inf"))
    training = train.Training(*[None] * 7, evaluations)
    with (
        (tmp_path / "metrics").open("wb", buffering=0) as log,
        pytest.raises(FloatingPointError, match="the held-out loss is inf after the last step"),
    ):
        train.write_results(log, training, None, Console(quiet=True), 0.0)
    assert read_metrics(tmp_path / "metrics")[1]["held_out_loss"] is None


REFUSALS = {
    "--seed -1": "argument --seed: -1 must be from 0 to 4294967295; the nearest is 0",
    "--seed 4294967296": "argument --seed: 4294967296 must be from 0 to 4294967295; the nearest is 4294967295",
    "--seed any": "argument --seed: 'any' must be a whole number, such as 0",
    "--learning-rate nan": "argument --learning-rate: nan must be a finite number above 0",
    "--learning-rate inf": "argument --learning-rate: inf must be a finite number above 0",
    "--learning-rate -0.1": "argument --learning-rate: -0.1 must be a finite number above 0",
    "--learning-rate 0": "argument --learning-rate: 0 must be a finite number above 0",
    "--learning-rate fast": "argument --learning-rate: 'fast' must be a number, such as 0.5",
    "--steps 0": "argument --steps: 0 must be at least 1; the nearest is 1",
    "--log-every 0": "argument --log-every: 0 must be at least 1; the nearest is 1",
    "--batch-size -8": "argument --batch-size: -8 must be at least 1; the nearest is 1",
    "--sequence-length 0": "argument --sequence-length: 0 must be at least 1; the nearest is 1",
    "--expert-parallelism 0": "argument --expert-parallelism: 0 must be at least 1; the nearest is 1",
    "--unknown": "unrecognized arguments: --unknown",
    "--num-layers 0": "num_layers=0 must be at least 1; the nearest is 1.",
    "--hidden-size 17": "hidden_size=17 must be a multiple of 2 * num_heads (4); the nearest is 16.",
    "--aux-loss-coeff nan": "aux_loss_coeff=nan must be a finite number of at least 0.",
    "--z-loss-coeff -1": "z_loss_coeff=-1.0 must be a finite number of at least 0.",
    "--rope-base 0": "rope_base=0.0 must be a finite number above 0, such as 10000.",
    "--num-experts-per-tok 9": "num_experts_per_tok=9 must be from 1 to the number of experts (8); the nearest is 8.",
    "--sequence-length 1800": (
        "the held-out text has 1792 bytes; a crop takes 1801. Use more text or shorter sequences."
    ),
    "--out {file}": "{file} cannot be a folder: {file} is not one.",
    "--out {file}/below/it": "{file}/below/it cannot be a folder: {file} is not one.",
    "--data {noise}": "data='{noise}' is not text in UTF-8; name a text file or a folder of them.",
    "--data /dev/zero": "data='/dev/zero' is not text in UTF-8; name a text file or a folder of them.",
}


@pytest.mark.parametrize("arguments", REFUSALS)
def test_impossible_arguments_end_with_one_line(text_file, tmp_path, capsys, monkeypatch, arguments):
    """Whoever finds them, and before anything is compiled or written."""
    monkeypatch.setattr(train, "compile_train_step", lambda *_: pytest.fail("compiled"))
    noise = tmp_path / "noise"
    noise.write_bytes(np.random.default_rng(0).bytes(5000))
    names = {"file": text_file, "noise": noise}
    paths = "--data", str(text_file), "--out", str(tmp_path / "out")
    words = [word.format(**names) for word in arguments.split()]
    with pytest.raises(SystemExit) as end:
        sys.exit(train.main([*paths, *TINY, "--batch-size", str(jax.device_count()), *words]))
    output, errors = capsys.readouterr()
    assert (end.value.code, output) == (2, "")
    assert errors == f"models.train: {REFUSALS[arguments].format(**names)}\n"
    assert not (tmp_path / "out").exists()


def test_help_says_what_each_option_means(capsys):
    with pytest.raises(SystemExit):
        train.main(["--help"])
    shown = capsys.readouterr().out.split("options:")[1]
    options = re.split(r"\n  (?=-)", shown)[2:]
    assert len(options) == 25 + len(dataclasses.fields(ModelConfig))
    for option in options:
        assert len(re.findall(r"[a-z]{2,}", re.sub(r"^.*?(\n|  )", "", option))) >= 2, option
        assert "(" in option, option  # The default.


def test_a_platform_that_is_not_there(text_file, tmp_path):
    output, code = finish(start(text_file, tmp_path, JAX_PLATFORMS="abacus"))
    assert code == 2 and output.count("\n") == 1
    assert output.startswith("models.train: JAX_PLATFORMS=abacus has no devices here; JAX_PLATFORMS=cpu has.")


def test_without_matplotlib_there_are_no_pictures(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(train.importlib.util, "find_spec", lambda _: None)
    train.draw(tmp_path, Console())
    assert capsys.readouterr().out == "no pictures: they need matplotlib (pip install matplotlib)\n"


def test_arguments_that_do_not_fit_the_devices(text_file, tmp_path):
    output, code = finish(start(text_file, tmp_path, "--batch-size", "9"))
    assert code == 2 and "Traceback" not in output
    assert output.splitlines()[-1] == (
        "models.train: batch_size=9 must be a multiple of the number of devices (8); the nearest is 8."
    )


def test_default_corpus_is_the_standard_library():
    corpus = data.load_corpus()
    assert corpus.train.size > 4_000_000 and corpus.held_out.size > 100_000
    assert b"import" in corpus.train.tobytes()
    again = data.load_corpus()
    assert np.array_equal(corpus.train, again.train) and np.array_equal(corpus.held_out, again.held_out)


def test_folder_holds_out_files_and_skips_what_is_no_text(tmp_path):
    for number in range(40):
        (tmp_path / f"{number:02}.txt").write_text(f"<{number}>")
    (tmp_path / "picture.bin").write_bytes(b"\x89\xff\x00")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "skipped.txt").write_text("skipped")
    corpus = data.load_corpus(tmp_path)
    assert corpus.held_out.tobytes() == b"<10>\n<30>"
    assert corpus.train.tobytes().split(b"\n") == [f"<{n}>".encode() for n in range(40) if n not in (10, 30)]


def test_crops_are_reproducible_and_of_the_text():
    text = np.arange(200, dtype=np.uint8)
    first, second = (next(data.random_crops(text, 4, 9, seed=3)) for _ in range(2))
    assert first.shape == (4, 9) and first.dtype == np.int32
    np.testing.assert_array_equal(first, second)
    np.testing.assert_array_equal(first, first[:, :1] + np.arange(9))
    spread = list(data.spread_crops(text, 2, 10, batches=3))
    assert len(spread) == 3 and spread[0][0, 0] == 0 and spread[-1][-1, -1] == 199


def test_missing_and_empty_text(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere.*does not exist"):
        data.load_corpus(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="holds no text"):
        data.load_corpus(tmp_path)
    with pytest.raises(ValueError, match="5 bytes; a crop takes 9"):
        next(data.random_crops(np.zeros(5, np.uint8), 1, 9, seed=0))


def test_what_a_gpu_has_reported_ends_the_run_before_anything_is_written(monkeypatch):
    log = io.BytesIO()
    intervals = Intervals(log, lambda step: 0.1, tokens_per_step=1, length=1)
    step = {"loss": np.float32(1), "router_loss": np.float32(0), "expert_load": np.ones((1, 2))}
    intervals.add(step)
    monkeypatch.setattr(native.library(), "failure_text", lambda: "GPU 0, rank 1 waited", raising=True)
    with pytest.raises(RuntimeError, match=r"^mok_jax: GPU 0, rank 1 waited$"):
        intervals.add(step)
    assert not log.getvalue()


def test_several_processes_train_as_one(text_file, tmp_path):
    """Two, with a half of the devices each: one writes, the other is silent; the metrics are those of one process."""
    port, steps = free_port(), ("--steps", "4", "--implementation", "xla")
    several = "--coordinator", f"127.0.0.1:{port}", "--processes", "2", "--process-id"
    folders = [tmp_path / str(rank) for rank in range(2)]
    processes = [
        start(text_file, folder, *steps, *several, str(rank), JAX_NUM_CPU_DEVICES="4")
        for rank, folder in enumerate(folders)
    ]
    alone = start(text_file, tmp_path / "alone", *steps)
    (first, *_), (second, *_), (_, exit_code) = (finish(process) for process in (*processes, alone))
    assert exit_code == 0 and [process.returncode for process in processes] == [0, 0], first + second
    assert not folders[1].exists() and "SHA-256" in first and "SHA-256" not in second
    (intervals, results), (expected, expected_results) = (
        read_metrics(folder / "metrics.jsonl") for folder in (folders[0], tmp_path / "alone")
    )
    np.testing.assert_allclose([i["loss"] for i in intervals], [i["loss"] for i in expected], rtol=1e-4)
    assert results["held_out_loss"] == pytest.approx(expected_results["held_out_loss"], rel=1e-3)
