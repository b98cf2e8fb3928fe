"""The megakernel over several processes, a rank each: numerics against the oracle, bits against one rank's, and what
users put around the layer. `support.start_ranks` starts the processes; `test_invariance` varies all else.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import PartitionSpec as P

import mok_jax
from mok_jax.nnx import MoE
from support import ranks
from support.cases import CASES, Case, make, one_rank, uniform, zipf
from support.compare import assert_close, assert_dtypes, differences, relative_l2
from support.oracle import forward_backward
from support.ranks import RANKS

pytestmark = pytest.mark.ranks

TOLERANCE = 1e-2


def assert_same(actual, expected):
    different = differences(actual, expected)
    assert not any(different.values()), f"elements that differ: {different}"


@pytest.mark.parametrize("case", [case for case in CASES if case.E % RANKS == 0], ids=str)
def test_case(case):
    inputs = make(case, "bfloat16")
    actual = ranks.run(inputs, RANKS)
    assert_close(actual, forward_backward(*inputs.for_oracle(), "swiglu", None, inputs.x.dtype), TOLERANCE)
    assert_dtypes(actual, inputs)
    assert_same(actual, ranks.run(inputs, 1))


@pytest.mark.skipif(RANKS % 2 or RANKS < 4, reason="needs two groups of two")
@pytest.mark.parametrize(("axis", "ep", "replicas"), [(("outer", "inner"), RANKS, 1), ("expert", RANKS // 2, 2)])
@pytest.mark.parametrize("check_vma", (True, False))
def test_meshes(axis, ep, replicas, check_vma):
    """A pair of axes; two groups at once, which share each expert's gradient."""
    inputs = make(Case("meshes", 40 * RANKS, 3, 4 * RANKS, 136, 72, zipf), "bfloat16")
    actual = ranks.run(inputs, ep, axis=axis, replicas=replicas, check_vma=check_vma)
    expected = ranks.run(inputs, 1)
    if replicas == 1:
        return assert_same(actual, expected)
    for name in ("y", "dx", "d_expert_weights"):
        assert getattr(actual, name).tobytes() == getattr(expected, name).tobytes(), name
    assert_close(actual, forward_backward(*inputs.for_oracle(), "swiglu", None, inputs.x.dtype), TOLERANCE)


def test_arenas_of_several_classes():
    """Calls of different shapes one after the other, in arenas of their own and in the same one; ids of one call lie
    where another has rows."""
    shapes = (33, 2, 136, uniform), (400, 4, 256, zipf), (36, 2, 128, one_rank), (33, 3, 136, zipf)
    cases = [Case(str(tokens), tokens * RANKS, k, 4 * RANKS, h, 72, routing) for tokens, k, h, routing in shapes]
    for _ in range(2):
        for case in cases:
            inputs = make(case, "bfloat16")
            assert_same(ranks.run(inputs, RANKS), ranks.run(inputs, 1))


# ---- What stands around the layer.


@functools.cache
def problem(layers=1):
    """Tokens and weights, and a step whose losses and gradients are to be alike, however many ranks there are."""
    case = Case("around", 32 * RANKS, 2, 4 * RANKS, 128, 64, zipf)
    inputs = make(case, "bfloat16")
    weights = [np.stack([w * np.asarray(0.5**i, w.dtype) for i in range(layers)]) for w in inputs[3:6]]
    return inputs, weights


def around(layer):
    """Jits ``layer(moe, x, ids, expert_weights, wi_0, wi_1, wo) -> x`` and its gradient over all ranks, and on one."""

    def step(axis, x, ids, expert_weights, *weights):
        moe = functools.partial(mok_jax.moe, axis_name=axis, config=ranks.own_share(), implementation="megakernel")

        def loss(x, *weights):
            return jnp.sum(layer(moe, x, ids, expert_weights, *weights).astype(jnp.float32) ** 2)

        value, gradients = jax.value_and_grad(loss, argnums=(0, 1, 2, 3))(x, *weights)
        return (value if axis is None else jax.lax.psum(value, axis)), gradients

    mesh = ranks.mesh_of(expert=RANKS)
    tokens, experts = P("expert"), P(None, "expert")
    specs = (tokens,) * 3 + (experts,) * 3
    many = jax.jit(
        jax.shard_map(
            functools.partial(step, "expert"),
            mesh=mesh,
            in_specs=specs,
            out_specs=(P(), (tokens, experts, experts, experts)),
        )
    )

    def on_all(*arguments):
        placed = (ranks.place(a, mesh, spec) for a, spec in zip(arguments, specs, strict=True))
        return multihost_utils.process_allgather(many(*placed), tiled=True)

    return on_all, lambda *arguments: jax.device_get(jax.jit(functools.partial(step, None))(*arguments))


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


@pytest.mark.parametrize(("layer", "layers"), [(one_layer, 1), (two_layers, 2), (scanned, 32), (recomputed, 8)])
def test_around(layer, layers):
    inputs, weights = problem(layers)
    arguments = inputs.x, inputs.expert_ids, inputs.expert_weights, *weights
    on_all, alone = around(layer)
    (loss, gradients), (expected_loss, expected) = on_all(*arguments), alone(*arguments)
    assert abs(float(loss) - float(expected_loss)) <= 1e-5 * abs(float(expected_loss))  # sums of ranks
    for actual, wanted in zip(gradients, expected, strict=True):
        assert np.asarray(actual).tobytes() == np.asarray(wanted).tobytes()


MESHES = [{"expert": RANKS}, {"data": 2, "expert": RANKS // 2}, {"data": 1, "expert": RANKS // 2, "tensor": 2}]


@pytest.mark.parametrize("sizes", [s for s in MESHES if np.prod(list(s.values())) == RANKS], ids=str)
def test_layer_trains_alike(sizes):
    """`nnx.MoE` on a mesh gives the losses of one device."""
    options = {"num_experts": 4 * RANKS, "num_experts_per_tok": 2, "dtype": jnp.bfloat16}
    options["config"] = ranks.own_share()
    x = np.random.default_rng(3).standard_normal((16 * RANKS, 128)).astype(np.float32)

    def losses(mesh):
        layer = MoE(128, 64, **options, mesh=mesh, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(layer, optax.sgd(0.05), wrt=nnx.Param)

        @nnx.jit
        def step(layer, optimizer, x):
            def loss(layer):
                return jnp.mean((layer(x).output.astype(jnp.float32) - x) ** 2)

            value, gradients = nnx.value_and_grad(loss)(layer)
            optimizer.update(layer, gradients)
            return value

        tokens = x if mesh is None else ranks.place(x, mesh, P(tuple(mesh.axis_names)))
        return [float(step(layer, optimizer, tokens)) for _ in range(4)]

    mesh = ranks.mesh_of(**sizes)
    with jax.set_mesh(mesh):
        actual = losses(mesh)
    expected = losses(None)
    assert relative_l2(actual, expected) < 1e-3
    assert expected[-1] < 0.99 * expected[0]


def test_no_failure_was_reported():
    mok_jax.check()
