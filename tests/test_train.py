"""The demonstration command, very small, as a user starts it: what it writes, how it ends, and what it refuses."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from processes import cpu_environment

from models import data, train
from models.report import read_metrics

ROOT = Path(__file__).parents[1]
TEXT = b"".join(b"def f%d(x):\n    return x + %d\n\n\n" % (n, n * n) for n in range(500))
TINY = (
    *("--hidden-size", "16", "--intermediate-size", "8", "--num-heads", "2", "--num-layers", "1"),
    *("--batch-size", "8", "--sequence-length", "16", "--log-every", "2", "--implementation", "reference"),
)
TIME_LIMIT_S = 140


@pytest.fixture(scope="module")
def text_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "functions.py"
    path.write_bytes(TEXT)
    return path


def start(text_file, out, *arguments, **environment):
    paths = "--data", str(text_file), "--out", str(out)
    command = [sys.executable, "-u", "-m", "models.train", *paths, *TINY, *arguments]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=cpu_environment(**environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process):
    """Output and exit code; the process does not outlive the test."""
    try:
        output, _ = process.communicate(timeout=TIME_LIMIT_S)
    finally:
        process.kill()
    return output, process.returncode


def test_a_run_writes_everything(text_file, tmp_path):
    output, code = finish(start(text_file, tmp_path, "--steps", "5"))
    assert code == 0, output
    assert "8 cpu devices: data 2 x expert 4, float32" in output
    written = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert set(written) == {"metrics.jsonl", "loss.png", "expert_load.png", "sample.txt"}
    assert min(written.values()) > 0

    intervals, results = read_metrics(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in intervals] == [2, 4, 5]
    for line, steps in zip(intervals, (2, 2, 1), strict=True):
        assert np.sum(line["expert_load"]) == 8 * 16 * 2 * steps
        assert 0 < line["loss"] < 10 and line["tokens_per_s"] > 0 and line["load_imbalance"] >= 1
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
    (tmp_path / "sample.txt").write_text("of an earlier run")
    process = start(text_file, tmp_path, "--steps", "1000000")
    metrics, limit = tmp_path / "metrics.jsonl", time.monotonic() + TIME_LIMIT_S
    while not (metrics.exists() and metrics.read_text().count("\n") >= 2):
        assert process.poll() is None and time.monotonic() < limit, finish(process)[0]
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    output, code = finish(process)
    assert code == 130, output
    assert "interrupted" in output and "Traceback" not in output
    assert {path.name for path in tmp_path.iterdir()} == {"metrics.jsonl", "loss.png", "expert_load.png"}
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert len(lines) >= 2 and all("loss" in line for line in lines)


def test_impossible_arguments_end_with_one_line(text_file, tmp_path):
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
