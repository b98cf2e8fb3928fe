"""``python -m mok_jax timeline``: it records every task once, with times that can be, and writes what it has recorded.

What tasks there are is what `csrc/verify` enumerates for the same shape and routing.
"""

import collections
import importlib.util
import itertools
import json
import re

import pytest

from mok_jax import native, timeline, verify
from mok_jax.__main__ import main
from mok_jax.timeline import Event
from mok_jax.verify import Request
from support.verifier import ask

# Two or three macrobatches a rank, several tiles of each kind.
REQUEST = Request(
    hidden_size=264,
    intermediate_size=136,
    num_experts=8,
    num_experts_per_tok=3,
    tokens=480,
    dtype="float32",
    expert_parallelism=4,
)
RANKS, RING_BLOCKS = REQUEST.expert_parallelism, 2
SETTINGS = {"ring_rows": 128 * RING_BLOCKS, "minibatch_rows": 128, "host_comm_workers": 2, "host_compute_workers": 3}
# gate_up, down, hidden_grad, row_grad, weight_grad: tiles of 128 rows and 256 columns, half of gate_up's gate; bands.
TILES = 2, 2, 1, 2, 2 * 3 * 1 + 2 * 2, 4
SAVES = {"nothing": 0, "pre_activations": 1, "pre_activations_and_rows": 2}
INPUTS = timeline.make_inputs(REQUEST, "zipf")


@pytest.fixture(scope="module", params=SAVES)
def recorded(request):
    """The name of what is saved, and all events."""
    return request.param, timeline.record(REQUEST, INPUTS, save=request.param, **SETTINGS)


def of_program(save, direction):
    """Every task of all ranks as ``(rank, communicates, task)``."""
    local = REQUEST.tokens // RANKS, REQUEST.num_experts_per_tok, REQUEST.num_experts // RANKS
    shape = SAVES[save], RANKS, *local, RING_BLOCKS, 1
    number = timeline.DIRECTIONS.index(direction)
    lists = ask("program", number, *shape, TILES, INPUTS.expert_ids.flatten().tolist())
    for number, tasks in enumerate(lists):
        for task in tasks:
            yield number // 2, number % 2 == 0, task


@pytest.mark.parametrize("direction", timeline.DIRECTIONS)
def test_every_task_is_recorded_once(recorded, direction):
    save, events = recorded
    names = "kind", "macrobatch", "block", "blocks", "expert", "part"
    expected = [(rank, who, *(task[name] for name in names)) for rank, who, task in of_program(save, direction)]
    own = [e for e in events if e.direction == direction]
    assert len(set(expected)) == len(expected) and max(e.macrobatch for e in own) > 0
    assert sorted((e.rank, e.communicates, *(getattr(e, name) for name in names)) for e in own) == sorted(expected)
    assert {e.kind for e in own} <= set(timeline.COLORS)


def test_times(recorded):
    _, events = recorded
    workers = collections.defaultdict(list)
    for e in events:
        workers[e.direction, e.rank, e.worker].append(e)
        assert e.begin <= e.ready <= e.end
    assert {(rank, worker) for _, rank, worker in workers} <= set(itertools.product(range(RANKS), range(5)))
    for (_, _, worker), own in workers.items():
        assert {e.communicates for e in own} == {worker < SETTINGS["host_comm_workers"]}
        assert all(e.end <= later.begin for e, later in itertools.pairwise(own))
    # Waits are over no sooner than what they are for has begun.
    pulled, computed = collections.defaultdict(list), []
    for e in events:
        if e.direction == "forward" and e.kind == "pull_rows":
            pulled[e.rank, e.block].append(e.ready)
        elif e.direction == "forward" and e.kind == "gate_up":
            computed.append(e)
    assert computed and all(e.ready >= max(pulled[e.rank, e.block]) for e in computed)


def test_nothing_is_recorded_unless_asked():
    extension = native.library()
    verify.run_layer(REQUEST, INPUTS, RANKS)
    assert extension.take_timeline() == []
    extension.start_timeline()
    verify.run_layer(REQUEST, INPUTS, RANKS)
    extension.start_timeline()  # begins anew
    assert extension.take_timeline() == []
    verify.run_layer(REQUEST, INPUTS, RANKS)
    assert extension.take_timeline() == []


def event(**changes):
    """Rank 1's second worker computes: 2 ms of waiting, 3 ms of work."""
    fields = {"direction": "forward", "rank": 1, "worker": 1, "communicates": False, "kind": "down", "macrobatch": 0}
    fields |= {"block": 2, "blocks": 1, "expert": 0, "part": 3, "begin": 10**9, "ready": 1002000000, "end": 1005000000}
    return Event(**fields | changes)


TWO = [event(), event(worker=0, communicates=True, kind="notify", ready=1008000000, end=1010000000)]


def test_trace():
    written = timeline.trace(TWO)["traceEvents"]
    names = {(e["name"], e["pid"], e["tid"]): e["args"]["name"] for e in written if e["ph"] == "M"}
    assert names == {
        ("process_name", 1, 0): "rank 1",
        ("thread_name", 1, 0): "communication",
        ("thread_name", 1, 1): "compute",
    }
    wait, task = (e for e in written if e["ph"] == "X" and e["tid"] == 1)
    args = {"macrobatch": 0, "block": 2, "blocks": 1, "expert": 0, "part": 3}
    common = {"ph": "X", "pid": 1, "tid": 1, "args": args}
    assert wait == {**common, "name": "wait: down", "cat": "wait", "ts": 0, "dur": 2000}
    assert task == {**common, "name": "down", "cat": "task", "ts": 2000, "dur": 3000}


def test_table():
    """Shares are of two workers' 10 ms each."""
    assert [line.split() for line in timeline.table(TWO).splitlines()[1:]] == [
        ["notify", "1", "2.0", "8.0", "10.0%", "40.0%"],
        ["down", "1", "3.0", "2.0", "15.0%", "10.0%"],
        ["no", "task", "0", "0.0", "5.0", "0.0%", "25.0%"],
        ["all", "2", "5.0", "15.0", "25.0%", "75.0%"],
    ]


SIZES = "--hidden-size 72 --intermediate-size 40 --num-experts 8 --num-experts-per-tok 3 --tokens 96"


def test_command(tmp_path, capsys):
    assert main(["timeline", *SIZES.split(), "--routing", "zipf", "--out", str(tmp_path)]) == timeline.RECORDED
    printed = capsys.readouterr().out
    assert re.search(r"^forward: [\d.]+ ms, \d+ workers of 4 ranks$", printed, re.MULTILINE)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(timeline.FILES)
    for direction in timeline.DIRECTIONS:
        events = json.loads((tmp_path / f"{direction}.json").read_text())["traceEvents"]
        for e in events:
            assert {"name", "ph", "pid", "tid", "args"} <= set(e)
            assert e["ph"] == "M" or (e["ts"] >= 0 and e["dur"] >= 0 and e["cat"] in ("wait", "task"))
        assert {e["pid"] for e in events} == set(range(4))
        assert (tmp_path / f"{direction}.png").read_bytes().startswith(b"\x89PNG")
    assert main(["timeline", *SIZES.split(), "--out", str(tmp_path), "--expert-parallelism", "1"]) == timeline.RECORDED
    assert f"earlier results are now in {tmp_path / 'earlier-1'}" in capsys.readouterr().out


def test_without_matplotlib_there_are_no_pictures(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert main(["timeline", *SIZES.split(), "--out", str(tmp_path)]) == timeline.RECORDED
    assert "no pictures: they need matplotlib (pip install matplotlib)\n" in capsys.readouterr().out
    assert {path.suffix for path in tmp_path.iterdir()} == {".json"}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ("--expert-parallelism 3", r"tokens=4096 must be a multiple of expert_parallelism=3; the nearest is 4095\."),
        ("--expert-parallelism 99", r"expert_parallelism=99 is more than the 72 devices .* the nearest is 72"),
        ("--model mixtral-8x7b --num-experts 1", r"num_experts_per_tok=2 is more than num_experts=1; the nearest is 1"),
        (f"{SIZES} --out {__file__}", r".* cannot be a folder"),
    ],
)
def test_refusals(capsys, options, text):
    assert main(["timeline", *options.split()]) == timeline.REFUSED
    assert re.fullmatch(f"refused: {text}.*\n", capsys.readouterr().err)


def test_a_wrong_command_line_is_refused(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["timeline", "--routing", "even"])
    assert re.fullmatch(r"mok_jax timeline: argument --routing: invalid choice: .*\n", capsys.readouterr().err)
