"""Many steps of several ranks, each with fresh tokens and routing, among collectives: every step has one rank's bits.
`support.start_ranks` starts the processes; MOK_SOAK_STEPS says how many steps there are.
"""

import functools
import os
import resource

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import mok_jax
from support import ranks
from support.ranks import RANKS

pytestmark = pytest.mark.ranks

STEPS = int(os.environ.get("MOK_SOAK_STEPS", 400))
# Tokens of a rank, which change every few hundred steps.
SIZES = 40, 96, 7, 160, 64, 33, 128, 1
STEPS_OF_A_SIZE = max(1, min(250, STEPS // (2 * len(SIZES))))
HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 128, 64, 4 * RANKS, 3


def random_problem(key, tokens):
    """Of all ranks: bits are alike wherever these are made, as none of it is rounded but to its dtype."""
    keys = jax.random.split(key, 7)
    sizes = HIDDEN, INTERMEDIATE
    shapes = (tokens, HIDDEN), (tokens, HIDDEN), (EXPERTS, *sizes), (EXPERTS, *sizes), (EXPERTS, *sizes[::-1])
    x, dy, wi_0, wi_1, wo = (
        jax.random.randint(k, shape, -64, 64).astype(jnp.bfloat16) / 64 for k, shape in zip(keys, shapes, strict=False)
    )
    # Uneven: an expert's number is the least of two.
    ids = jax.random.randint(keys[5], (2, tokens, TOP_K), 0, EXPERTS).min(axis=0)
    expert_weights = jax.random.randint(keys[6], (tokens, TOP_K), 1, 256).astype(jnp.float32) / 256
    return x, ids, expert_weights, wi_0 / 8, wi_1 / 8, wo / 8, dy


def outputs(axis, x, ids, expert_weights, wi_0, wi_1, wo, dy):
    """``y`` and all gradients."""
    moe = functools.partial(mok_jax.moe, axis_name=axis, config=ranks.own_share(), implementation="megakernel")
    y, vjp = jax.vjp(lambda x, w, *weights: moe(x, ids, w, *weights), x, expert_weights, wi_0, wi_1, wo)
    return y, *vjp(dy)


def count_differences(actual, expected):
    different = jax.lax.bitcast_convert_type(actual, _bits(actual)) != jax.lax.bitcast_convert_type(
        expected, _bits(expected)
    )
    return jnp.sum(different)


def _bits(array):
    return jnp.dtype(f"u{array.dtype.itemsize}")


@functools.cache
def step_of(tokens):
    """``(uint32 [2] of a key, int32 []) -> int32 []``: adds how many elements of a step differ from one rank's."""

    def step(key, different):
        rank = jax.lax.axis_index("expert")
        everything = random_problem(jax.random.wrap_key_data(key), tokens * RANKS)

        def own(array):
            return jax.lax.dynamic_slice_in_dim(array, rank * (len(array) // RANKS), len(array) // RANKS)

        actual = outputs("expert", *map(own, everything))
        expected = outputs(None, *everything)
        # Collectives of three kinds around the call, which depend on it.
        gathered = jax.lax.all_gather(actual[0], "expert", tiled=True)
        scattered = jax.lax.psum_scatter(expected[0].astype(jnp.float32), "expert", tiled=True)
        here = sum(count_differences(a, own(e)) for a, e in zip(actual, expected, strict=True))
        here += count_differences(gathered, expected[0])
        here += count_differences(scattered, own(expected[0]).astype(jnp.float32) * RANKS)
        return different + jax.lax.psum(here, "expert").astype(jnp.int32)

    mesh = ranks.mesh_of(expert=RANKS)
    return jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(P(), P()), out_specs=P(), check_vma=False))


def used_bytes():
    """Of the device, by this process, and of the host."""
    device = jax.local_devices(backend="gpu")[0].memory_stats()["bytes_in_use"]
    return device, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def test_soak():
    mesh = ranks.mesh_of(expert=RANKS)
    keys = jax.random.split(jax.random.key(0), STEPS)
    keys = jax.device_get(jax.random.key_data(keys))
    different = ranks.place(np.zeros((), np.int32), mesh, P())
    early = None
    for number, key in enumerate(keys):
        block, place = divmod(number, STEPS_OF_A_SIZE)
        different = step_of(SIZES[block % len(SIZES)])(ranks.place(key, mesh, P()), different)
        if place == STEPS_OF_A_SIZE - 1:
            assert int(different) == 0, f"{int(different)} elements differ after {number + 1} steps"
            mok_jax.check()
            if block % 8 == 7:
                print(f"{number + 1} steps", flush=True)
            early = early or (used_bytes() if block == 2 * len(SIZES) - 1 else None)
    assert int(different) == 0
    mok_jax.check()
    late = used_bytes()
    if early:
        print(f"{STEPS} steps; device bytes {early[0]} then {late[0]}, host bytes {early[1]} then {late[1]}")
        assert late[0] == early[0]
        assert late[1] < 1.05 * early[1]
