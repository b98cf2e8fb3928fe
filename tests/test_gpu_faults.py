"""What becomes of several ranks when one of them goes wrong: within its limit every rank has an error that says why,
its next call is refused, and its process ends. `support.faulty_rank` is what the ranks run.
"""

import functools
import json
import os
import re
import sys

import pytest

from support import start_ranks
from support.faulty_rank import FAULTS

RANKS = 4
LIMIT_S = 90

LACKING = start_ranks.why_not(RANKS, start_ranks.NCCL)

pytestmark = pytest.mark.gpu

CANCELLED = r"ended a call early because rank \d had failed"
DIFFERENT = r"are in different calls, or in calls of different shapes"
# As the last rank may make its next call meanwhile.
ENTRY = rf"waited longer than entry_timeout_s for rank 3 to start call 2, which is in call 1|{DIFFERENT}"
REFUSED = r"restart the process"
# What one of the others is told of a fault, and what the last rank is, at which it happens; None: no error.
TOLD = {
    "never_starts": (ENTRY, None),
    "killed": (r"waited longer than (entry_timeout_s for rank 3|timeout_s)", ""),
    "late": (None, None),
    "another_call": (DIFFERENT,) * 2,
    "another_shape": (DIFFERENT,) * 2,
    "another_size": (ENTRY, r"waited longer than entry_timeout_s for the other ranks to make the memory of its call"),
    "host_error": (ENTRY, r"the data are broken"),
    "no_memory": (r"rank 3 has \d+ MiB of GPU memory left outside XLA's pool",) * 2,
    "another_build": (ENTRY, r"interface"),
}
# Faults after which all can go on.
CAN_GO_ON = {"late", "no_memory"}


def variables(fault, rank):
    """Of a rank; the last one may use little of the GPU, where that is its fault."""
    is_poor = fault == "no_memory" and rank == RANKS - 1
    # XLA would have ranks that compile different programs wait for each other.
    alone = {"PYTHONPATH": os.path.dirname(__file__), "XLA_FLAGS": "--xla_gpu_shard_autotuning=false"}
    return alone | ({"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=4G"} if is_poor else {})


def read(output):
    """The lines that a rank has printed for this test."""
    lines = [json.loads(line) for line in output.splitlines() if line.startswith('{"')]
    return {name: text for line in lines for name, text in line.items()}


def show(ended):
    return f"{ended.status}{' late' if ended.late else ''} {read(ended.output)}\n{ended.output[-1200:]}"


@pytest.mark.skipif(bool(LACKING), reason=str(LACKING))
@pytest.mark.parametrize("fault", [fault.__name__ for fault in FAULTS])
def test_every_rank_is_told(fault):
    ended = start_ranks.start(
        RANKS,
        [sys.executable, "-m", "support.faulty_rank", fault],
        nccl=start_ranks.NCCL,
        limit_s=LIMIT_S,
        grace_s=LIMIT_S,
        beside=fault != "killed",
        variables=functools.partial(variables, fault),
    )
    everything = "\n".join(f"---- rank {rank}: {show(e)}" for rank, e in enumerate(ended))
    assert not any(e.late for e in ended), everything
    told = [read(e.output) for e in ended]
    of_others, of_last = TOLD[fault]
    others, last = told[:-1], told[-1]
    if of_others is None:
        assert told == [{"call": None, "next": None}] * RANKS, everything
        return
    assert all(rank.get("call") for rank in others), everything
    assert any(re.search(of_others, rank["call"]) for rank in told if rank.get("call")), everything
    assert all(re.search(rf"{of_others}|{CANCELLED}", rank["call"]) for rank in others), everything
    assert all("next" in rank and (fault in CAN_GO_ON) == (rank["next"] is None) for rank in others), everything
    assert fault in CAN_GO_ON or all(re.search(REFUSED, rank["next"]) for rank in others), everything
    if fault == "killed":
        assert ended[-1].status < 0, everything
    elif of_last is None:
        assert last["call"] is None, everything
    else:
        assert re.search(rf"{of_last}|{CANCELLED}", last["call"]), everything
