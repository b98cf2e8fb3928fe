"""The megakernel over several processes, a rank each: numerics against the oracle, bits against one rank's, and
layers on meshes. `support.start_ranks` starts the processes; `test_invariance` varies all else.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import mok_jax
from mok_jax import linen as linen_layer
from mok_jax import nnx as nnx_layer
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


# ---- Layers.


def layer_options(mesh):
    options = {"num_experts": 4 * RANKS, "num_experts_per_tok": 2, "dtype": jnp.bfloat16, "mesh": mesh}
    return {"hidden_size": 128, "intermediate_size": 64, "config": ranks.own_share()} | options


def error(output, x):
    return jnp.mean((output.astype(jnp.float32) - x) ** 2)


def nnx_losses(mesh, x):
    layer = nnx_layer.MoE(**layer_options(mesh), rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(layer, optax.sgd(0.5), wrt=nnx.Param)

    @nnx.jit
    def step(layer, optimizer, x):
        value, gradients = nnx.value_and_grad(lambda layer: error(layer(x).output, x))(layer)
        optimizer.update(layer, gradients)
        return value

    return [float(step(layer, optimizer, x)) for _ in range(4)]


def linen_losses(mesh, x):
    layer = linen_layer.MoE(**layer_options(mesh))
    parameters = jax.jit(layer.init)(jax.random.key(0), x)

    @jax.jit
    def step(parameters, x):
        value, gradients = jax.value_and_grad(lambda p: error(layer.apply(p, x).output, x))(parameters)
        return value, jax.tree.map(lambda p, g: p - 0.5 * g, parameters, gradients)

    losses = []
    for _ in range(4):
        value, parameters = step(parameters, x)
        losses.append(float(value))
    return losses


HALF = RANKS // 2
MESHES = [
    {"expert": RANKS},
    {"data": 2, "expert": HALF},
    {"data": 1, "expert": HALF, "tensor": 2},
    {"data": 2, "expert": HALF // 2, "tensor": 2},
]


@pytest.mark.parametrize("losses", [nnx_losses, linen_losses])
@pytest.mark.parametrize("sizes", [s for s in MESHES if np.prod(list(s.values())) == RANKS], ids=str)
def test_layer_trains_alike(sizes, losses):
    """A layer on a mesh gives the losses of one device."""
    x = np.random.default_rng(3).standard_normal((16 * RANKS, 128)).astype(np.float32)
    mesh = ranks.mesh_of(**sizes)
    with jax.set_mesh(mesh):
        actual = losses(mesh, ranks.place(x, mesh, P(tuple(mesh.axis_names))))
    expected = losses(None, x)
    assert relative_l2(actual, expected) < 1e-3
    assert expected[-1] < 0.99 * expected[0]


def test_no_failure_was_reported():
    mok_jax.check()
