"""`python -m benchmarks.ranks`, with virtual devices as ranks."""

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import check, ranks, report
from support.processes import run_python

ROOT = Path(__file__).parents[1]


def test_every_pass_of_ranks_is_beside_one_rank(tmp_path):
    printed = run_python(f"""
sys.path.insert(0, {str(ROOT)!r})
jax.config.update("jax_num_cpu_devices", 2)
from benchmarks import measure, ranks
measure.IDLE_S = 0
assert ranks.main(["--shape", "tiny", "--out", {str(tmp_path)!r}]) == 0
""")
    assert printed.count("2 ranks run at") == len(ranks.PASSES)
    results = json.loads((tmp_path / "ranks.json").read_text())
    report.check_schema(results)
    assert [(r["pass"], r["ep"]) for r in results["records"]] == [(p, ep) for p in ranks.PASSES for ep in (1, 2)]
    assert all(r["checked"] and r["ms"] > 0 and max(r["errors"].values()) < 1e-4 for r in results["records"])


def test_ranks_that_differ_are_not_recorded():
    of_rank, alone = {"y": np.float32([1, 2])}, {"y": np.float32([1, 3, 0, 0])}
    with pytest.raises(check.WrongResultError, match="y of rank 0 of 2 has other bits"):
        ranks.check_alike(2, of_rank, alone)
