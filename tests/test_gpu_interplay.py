"""The megakernel over several processes under all that XLA and users put around it: the same bits as on one rank.
`support.start_ranks` starts the processes.
"""

import functools
import itertools
import os
import re
import subprocess
import sys

import jax
import jax.export
import pytest
from jax.experimental import multihost_utils

import mok_jax
from support import ranks
from support.interplay import (
    SPECS,
    TIMES,
    TOKENS,
    alone,
    assert_alike,
    assert_same_bits,
    jit_over_ranks,
    one_layer,
    place,
    problem,
    recomputed,
    scanned,
    two_layers,
)
from support.ranks import RANKS

pytestmark = pytest.mark.ranks

# What is asked of XLA, by the name that a test shows.
WAYS = {
    "as it is": {},
    "all in command buffers": {"xla_gpu_graph_min_graph_size": 1},
    "no command buffers": {"xla_gpu_graph_min_graph_size": 1_000_000},
    "latency-hiding scheduler": {"xla_gpu_enable_latency_hiding_scheduler": True},
    "no latency-hiding scheduler": {"xla_gpu_enable_latency_hiding_scheduler": False},
    "concurrent graphs": {"xla_gpu_graph_min_graph_size": 1, "xla_gpu_command_buffer_scheduling_mode": "CONCURRENT"},
}
LAYERS = {one_layer: 1, two_layers: 2, scanned: 32, recomputed: 8}
# The one that is left out is the last test, as all may be refused after it.
AROUND = [case for case in itertools.product(LAYERS, WAYS) if case != (two_layers, "concurrent graphs")]


@pytest.mark.parametrize(("layer", "way"), AROUND)
def test_around(layer, way):
    layers = LAYERS[layer]
    step = jit_over_ranks(layer, compiler_options=WAYS[way])
    arguments = place(problem(layers))
    for _ in range(TIMES):
        actual = step(*arguments)
        assert_alike(actual, alone(layer, layers))


def test_another_size_between_replays():
    """Captured graphs keep the addresses of their arenas while larger ones are made."""
    sizes = 32, 700, 32, 1500, 700, 32
    step = jit_over_ranks(one_layer, compiler_options=WAYS["all in command buffers"])
    placed = {tokens: place(problem(1, tokens)) for tokens in sizes}
    for tokens in sizes:
        for _ in range(TIMES):
            actual = step(*placed[tokens])
        assert_alike(actual, alone(one_layer, 1, tokens))


def test_donated_tokens():
    """Their buffer becomes a result's, and is what peers read."""
    mesh = ranks.mesh_of(expert=RANKS)
    moe = functools.partial(mok_jax.moe, config=ranks.own_share(), implementation="megakernel")

    def layer(axis, x, ids, expert_weights, wi_0, wi_1, wo):
        return moe(x, ids, expert_weights, wi_0[0], wi_1[0], wo[0], axis_name=axis).astype(x.dtype)

    everywhere = jax.shard_map(functools.partial(layer, "expert"), mesh=mesh, in_specs=SPECS, out_specs=TOKENS)
    step, alone = jax.jit(everywhere, donate_argnums=0), jax.jit(functools.partial(layer, None))
    x, *others = place(problem())
    expected, *others_alone = problem()
    for _ in range(TIMES):
        given, x = x, step(x, *others)
        expected = alone(expected, *others_alone)
        assert given.is_deleted()
    assert_same_bits([multihost_utils.process_allgather(x, tiled=True)], [jax.device_get(expected)])


def start_anew(meeting, role, folder, **variables):
    """What this rank prints as a new process; all ranks start theirs at the same time."""
    command = [sys.executable, "-m", "support.restarted_rank", role, folder, str(meeting)]
    variables = os.environ | {"PYTHONPATH": os.path.dirname(__file__)} | variables
    ended = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=90)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def test_exported_program_runs_in_new_processes():
    """`support.restarted_rank` loads it there and compares."""
    checks = [jax.export.DisabledSafetyCheck.custom_call(name) for name in ("mok_forward", "mok_backward")]
    step = jit_over_ranks(one_layer)
    exported = jax.export.export(step, platforms=["cuda"], disabled_checks=checks)(*place(problem()))
    folder = os.environ["MOK_FOLDER"]
    with open(f"{folder}/program{ranks.RANK}", "wb") as file:
        file.write(exported.serialize())
    assert "same bits" in start_anew(1, "load", folder)


def test_persistent_cache():
    """A program that other processes have compiled."""
    folder = f"{os.environ['MOK_FOLDER']}/cache"
    variables = {"JAX_COMPILATION_CACHE_DIR": folder, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    printed = [start_anew(meeting, "compile", folder, **variables) for meeting in (2, 3)]
    hits = [int(re.search(r"(\d+) programs were in the cache", text).group(1)) for text in printed]
    assert "same bits" in printed[0] and "same bits" in printed[1]
    assert hits[1] > hits[0], printed


def test_no_failure_was_reported():
    mok_jax.check()


def test_calls_that_nothing_orders():
    """Where XLA runs them side by side they are refused, and else right."""
    step = jit_over_ranks(two_layers, compiler_options=WAYS["concurrent graphs"])
    arguments = place(problem(2))
    for _ in range(TIMES):
        actual = jax.block_until_ready(step(*arguments))
        try:
            mok_jax.check()
        except RuntimeError as refusal:
            assert re.search("in two calls of one expert-parallel group|ended a call early", str(refusal)), refusal
            return
        assert_alike(actual, alone(two_layers, 2))
