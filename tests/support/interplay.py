"""A step of several ranks with collectives around its layers, and the same on one rank: `test_gpu_interplay` runs it in
all ways, and `restarted_rank` in a new process.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import PartitionSpec as P

import mok_jax
from support import ranks
from support.cases import Case, make, zipf
from support.compare import count_differences
from support.ranks import RANKS

TIMES = 4  # a program runs: a command buffer is made when it runs for the second time


@functools.cache
def problem(layers=1, tokens=32):
    """Tokens and weights of a step whose losses and gradients are to be alike, however many ranks there are."""
    inputs = make(Case("around", tokens * RANKS, 2, 4 * RANKS, 128, 64, zipf), "bfloat16")
    weights = [np.stack([w * np.asarray(0.5**i, w.dtype) for i in range(layers)]) for w in inputs[3:6]]
    return inputs.x, inputs.expert_ids, inputs.expert_weights, *weights


def one_layer(moe, x, ids, expert_weights, wi_0, wi_1, wo):
    return moe(x, ids, expert_weights, wi_0[0], wi_1[0], wo[0])


def two_layers(moe, x, ids, expert_weights, wi_0, wi_1, wo):
    """That do not depend on each other."""
    first, second = ((wi_0[i], wi_1[i], wo[i]) for i in range(2))
    return moe(x, ids, expert_weights, *first) + moe(x, jnp.flip(ids, axis=1), expert_weights, *second)


def scanned(moe, x, ids, expert_weights, wi_0, wi_1, wo):
    def body(x, weights):
        return (x + moe(x, ids, expert_weights, *weights)).astype(x.dtype), None

    return jax.lax.scan(body, x, (wi_0, wi_1, wo))[0]


def recomputed(moe, x, ids, expert_weights, wi_0, wi_1, wo):
    def body(x, weights):
        block = jax.checkpoint(lambda x, w: x + moe(x, ids, expert_weights, *w), policy=mok_jax.remat_policy)
        return block(x, weights).astype(x.dtype), None

    return jax.lax.scan(body, x, (wi_0, wi_1, wo))[0]


def make_step(layer, axis):
    """A rank's ``(x, ids, expert_weights, wi_0, wi_1, wo) -> loss, gradients``, with collectives around the layer."""
    moe = functools.partial(mok_jax.moe, axis_name=axis, config=ranks.own_share(), implementation="megakernel")

    def loss(x, expert_weights, *arguments):
        ids, *weights = arguments
        return jnp.sum(layer(moe, x, ids, expert_weights, *weights).astype(jnp.float32) ** 2)

    def step(x, ids, expert_weights, *weights):
        value, gradients = jax.value_and_grad(loss, argnums=(0, 1, 3, 4, 5))(x, expert_weights, ids, *weights)
        return (value if axis is None else jax.lax.psum(value, axis)), gradients

    return step


def jit_over_ranks(layer, **options):
    mesh = ranks.mesh_of(expert=RANKS)
    return jax.jit(
        jax.shard_map(
            make_step(layer, "expert"),
            mesh=mesh,
            in_specs=SPECS,
            out_specs=(P(), (TOKENS, TOKENS, EXPERTS, EXPERTS, EXPERTS)),
        ),
        **options,
    )


TOKENS, EXPERTS = P("expert"), P(None, "expert")
SPECS = (TOKENS,) * 3 + (EXPERTS,) * 3


def place(arguments):
    return [ranks.place(a, ranks.mesh_of(expert=RANKS), spec) for a, spec in zip(arguments, SPECS, strict=True)]


@functools.cache
def alone(layer, layers=1, tokens=32):
    """What one rank finds."""
    return jax.device_get(jax.jit(make_step(layer, None))(*problem(layers, tokens)))


def assert_same_bits(actual, expected):
    different = [count_differences(np.asarray(a), np.asarray(b)) for a, b in zip(actual, expected, strict=True)]
    assert not any(different), f"elements that differ, by array: {different}"


def assert_alike(actual, expected):
    (loss, gradients), (expected_loss, expected_gradients) = actual, expected
    assert abs(float(loss) - float(expected_loss)) <= 1e-5 * abs(float(expected_loss))  # sums of ranks
    assert_same_bits(multihost_utils.process_allgather(gradients, tiled=True), expected_gradients)
