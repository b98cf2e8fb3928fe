"""Tokens that are replicated over axes of the mesh, such as ``tensor``, are split over them and computed once."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import mok_jax
from mok_jax.layer import compute
from mok_jax.sharding import make_mesh
from support.layers import assert_same, make_full_layer, make_input, twin

TOKENS = 8, 8
EVERYTHING = P(("data", "expert", "tensor"))


def make_tensor_mesh(axis_type=AxisType.Auto):
    mesh = make_mesh(expert_parallelism=2, tensor_parallelism=2, devices=jax.devices("cpu")[:8])
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(axis_type,) * 3)


def make_function(front_end, mesh):
    """A full layer as a function ``(its arrays, x) -> MoEOutput``, and its arrays."""
    full_layer = make_full_layer(mesh, implementation="megakernel", use_bias=True)
    if front_end == "linen":
        linen, variables = twin(full_layer)
        return linen.apply, variables
    graph, state = nnx.split(full_layer)
    return lambda state, x: nnx.merge(graph, state)(x), state


@functools.cache
def without_mesh():
    apply, arrays = make_function("nnx", None)
    return jax.jit(apply)(arrays, make_input(*TOKENS))


@pytest.fixture
def local_tokens(monkeypatch):
    """Token counts of the calls of ``mok_jax.moe``, as each rank sees them."""
    compute.moe_layer.clear_cache()  # A layer that has been traced with the same shapes would not call it again.
    counts, moe = [], mok_jax.moe
    monkeypatch.setattr(mok_jax, "moe", lambda x, *rest, **options: counts.append(len(x)) or moe(x, *rest, **options))
    return counts


@pytest.mark.parametrize("jit", [True, False], ids=["jit", "eager"])
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("front_end", ["nnx", "linen"])
def test_replicated_tokens_are_split(front_end, axis_type, jit, local_tokens):
    mesh, x, want = make_tensor_mesh(axis_type), make_input(*TOKENS), without_mesh()
    local_tokens.clear()
    with jax.set_mesh(mesh):
        apply, arrays = make_function(front_end, mesh)
        apply = jax.jit(apply) if jit else apply
        out = apply(arrays, jax.device_put(x, NamedSharding(mesh, P("data"))))
    assert local_tokens == [np.prod(TOKENS) / mesh.size]
    if jit and axis_type == AxisType.Auto:
        # Nothing of the program says how it wants them, and they are not gathered for nobody.
        assert out.output.sharding.is_equivalent_to(NamedSharding(mesh, EVERYTHING), 3)
    else:
        assert out.output.sharding.is_equivalent_to(NamedSharding(mesh, P("data")), 3)
    assert_same(out, want)


def test_nothing_is_computed_twice():
    """Router, biases and shared experts included: the FLOPs of a device are an eighth of all, however tokens come."""
    mesh = make_tensor_mesh()

    def flops_of_a_device(mesh, tokens, sharding):
        apply, arrays = make_function("nnx", mesh)
        step = jax.jit(jax.grad(lambda arrays, x: jnp.sum(jnp.sin(apply(arrays, x).output)), (0, 1)))
        return step.lower(arrays, jax.device_put(make_input(*tokens), sharding)).compile().cost_analysis()["flops"]

    least = flops_of_a_device(mesh, TOKENS, NamedSharding(mesh, EVERYTHING))
    assert least < 1.25 * flops_of_a_device(None, TOKENS, None) / mesh.size
    # 63 tokens, which 8 devices cannot share evenly, are padded by one.
    for tokens, spec in (TOKENS, P()), (TOKENS, P("data")), ((7, 9), P()):
        assert flops_of_a_device(mesh, tokens, NamedSharding(mesh, spec)) < 1.02 * least, (tokens, spec)
