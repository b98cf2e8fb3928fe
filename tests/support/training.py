"""Runs of ``python -m models.train``, very small, as a user starts them."""

import subprocess
import sys
from pathlib import Path

import pytest

from support.processes import cpu_environment

ROOT = Path(__file__).parents[2]
TEXT = b"".join(b"def f%d(x):\n    return x + %d\n\n\n" % (n, n * n) for n in range(500))
TINY = (
    *("--hidden-size", "16", "--intermediate-size", "8", "--num-heads", "2", "--num-layers", "1"),
    *("--batch-size", "8", "--sequence-length", "16", "--log-every", "2", "--implementation", "reference"),
)
TIME_LIMIT_S = 140


def write_text(folder):
    """The path of what is trained on."""
    path = folder / "functions.py"
    path.write_bytes(TEXT)
    return path


def start(text_file, out, *arguments, program=("-m", "models.train"), **environment):
    paths = "--data", str(text_file), "--out", str(out)
    return subprocess.Popen(
        [sys.executable, "-u", *program, *paths, *TINY, *arguments],
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


def wait_for(process, text):
    """Returns when the process has printed a line that holds ``text``."""
    lines = []
    for line in process.stdout:
        lines.append(line)
        if text in line:
            return
    pytest.fail("".join(lines))
