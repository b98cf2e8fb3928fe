"""Training by several processes, a rank each: the same bits twice, and the losses of one process."""

import sys
from pathlib import Path

import numpy as np
import pytest

from models.metrics import read_metrics
from support import start_ranks

RANKS = 4
LIMIT_S = 120
ROOT = Path(__file__).parents[1]

LACKING = start_ranks.why_not(RANKS, start_ranks.NCCL)

pytestmark = pytest.mark.gpu


def train(folder, *, ranks):
    """Losses by interval, and the parameters' digest."""
    command = [
        sys.executable,
        "-m",
        "models.train",
        "--implementation",
        "megakernel",
        "--deterministic",
        "--steps",
        "100",
        "--out",
        str(folder),
    ]
    several = ["--coordinator", "127.0.0.1:{port}", "--processes", str(ranks), "--process-id", "{rank}"]
    ended = start_ranks.start(
        ranks,
        command + (["--reserve-sms", "{reserved}", *several] if ranks > 1 else []),
        nccl=start_ranks.NCCL,
        limit_s=LIMIT_S,
        variables=lambda rank: {"PYTHONPATH": str(ROOT), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
    )
    assert not any(e.status for e in ended), "\n".join(e.output[-3000:] for e in ended)
    intervals, results = read_metrics(folder / "metrics.jsonl")
    return np.array([interval["loss"] for interval in intervals]), results["parameters_sha256"]


@pytest.mark.skipif(bool(LACKING), reason=str(LACKING))
def test_several_processes_train_as_one(tmp_path):
    losses, digest = train(tmp_path / "first", ranks=RANKS)
    again, same_digest = train(tmp_path / "second", ranks=RANKS)
    expected, _ = train(tmp_path / "alone", ranks=1)
    assert digest == same_digest
    assert losses.tobytes() == again.tobytes()
    print(f"loss at most {np.abs(losses - expected).max():.4f} nats from one process's")
    assert np.abs(losses - expected).max() < 0.02
