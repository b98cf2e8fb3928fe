"""A layer inside other people's programs: under their meshes, inside their ``shard_map``, eagerly."""

import functools

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import mok_jax
from mok_jax import linen
from mok_jax.nnx import MoE
from support.compare import relative_l2

LAYER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_shared_experts": 1,
    "use_bias": True,
    "expert_bias": True,
    "aux_loss_coeff": 0.1,
}
STAGES = 2


def make_mesh(*axes, types=AxisType.Auto):
    """8 devices, two along each axis but that of the experts."""
    shape = [2 ** (4 - len(axes)) if axis in ("expert", "tp") else 2 for axis in axes]
    return Mesh(np.array(jax.devices("cpu")[:8]).reshape(shape), axes, axis_types=(types,) * len(axes))


def make_layer(mesh=None, **changes):
    return MoE(**LAYER | changes, mesh=mesh, rngs=nnx.Rngs(0))


@functools.cache
def make_input():
    return np.random.default_rng(1).normal(size=(STAGES, 16, LAYER["hidden_size"])).astype(np.float32)


@pytest.fixture(scope="module")
def want():
    return np.asarray(make_layer()(make_input()).output)


def call(layer, x, jit=True):
    return (nnx.jit if jit else lambda f: f)(lambda layer, x: layer(x).output)(layer, x)


# Under jax.set_mesh


@pytest.mark.parametrize("jit", [True, False], ids=["jit", "eager"])
@pytest.mark.parametrize("types", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_under_a_mesh(types, jit, want):
    """The layer's own mesh, or another one of the same axes and sizes, whatever their types."""
    with jax.set_mesh(make_mesh("fsdp", "tp", types=types)):
        layer = make_layer(make_mesh("fsdp", "tp", types=types), expert_axis="tp")
        assert relative_l2(call(layer, make_input(), jit), want) < 1e-5


@pytest.mark.parametrize("jit", [True, False], ids=["jit", "eager"])
def test_under_a_mesh_of_other_axes(jit):
    layer = make_layer(make_mesh("data", "expert"))
    text = r"mesh has axes {'data': 2, 'expert': 4}, but .* under a mesh of {'fsdp': 2, 'tp': 4}.*expert_axis"
    with jax.set_mesh(make_mesh("fsdp", "tp")), pytest.raises(ValueError, match=text):
        call(layer, make_input(), jit)


def test_under_a_mesh_of_another_type():
    layer = make_layer(make_mesh("data", "expert", types=AxisType.Explicit))
    with (
        jax.set_mesh(make_mesh("data", "expert")),
        pytest.raises(ValueError, match="lies on a mesh with explicit axes"),
    ):
        call(layer, make_input())


def test_abstract_mesh(want):
    """It has no devices: those of the mesh around are taken, and without one that is said."""
    mesh = make_mesh("data", "expert")
    with jax.set_mesh(mesh):
        assert relative_l2(call(make_layer(mesh.abstract_mesh), make_input()), want) < 1e-5
        layer = linen.MoE(**LAYER, mesh=mesh.abstract_mesh)
        out, _ = jax.jit(layer.init_with_output)(jax.random.key(0), make_input())
        assert out.output.shape == make_input().shape
    with pytest.raises(ValueError, match=r"mesh is an AbstractMesh of {'data': 2, 'expert': 4}.*jax.set_mesh"):
        make_layer(AbstractMesh((2, 4), ("data", "expert")))
    with pytest.raises(ValueError, match=r"mesh is an AbstractMesh of {'data': 2, 'expert': 4}.*jax.set_mesh"):
        layer.init(jax.random.key(0), make_input())


# Inside somebody's shard_map


def staged(layer, mesh, x=None, axis_names=frozenset({"stage"}), **options):
    """``layer`` on a pipeline: each stage has its own tokens. A function of its parameters."""
    graph, params, rest = nnx.split(layer, nnx.Param, ...)

    def of_stage(params, rest, x):
        return nnx.merge(graph, params, rest)(x[0]).output[None]

    along = {"in_specs": (P(), P(), P("stage")), "out_specs": P("stage")}
    everywhere = jax.shard_map(of_stage, mesh=mesh, axis_names=axis_names, **along, **options)
    return lambda params: everywhere(params, rest, make_input() if x is None else x), params


@pytest.mark.parametrize("axes", [("stage", "expert"), ("stage", "data", "expert"), ("expert", "stage")], ids=str)
def test_inside_a_shard_map(axes, want):
    mesh = make_mesh(*axes)
    step, params = staged(make_layer(mesh), mesh)
    assert relative_l2(jax.jit(step)(params), want) < 1e-5


def test_linen_inside_a_shard_map():
    mesh, x = make_mesh("stage", "expert"), make_input()
    plain, layer = linen.MoE(**LAYER), linen.MoE(**LAYER, mesh=mesh)
    variables = plain.init(jax.random.key(0), x)
    everywhere = jax.shard_map(
        lambda variables, x: layer.apply(variables, x[0]).output[None],
        mesh=mesh,
        axis_names={"stage"},
        in_specs=(P(), P("stage")),
        out_specs=P("stage"),
    )
    assert relative_l2(jax.jit(everywhere)(variables, x), plain.apply(variables, x).output) < 1e-5


def test_inside_a_shard_map_over_explicit_axes(want):
    mesh = make_mesh("stage", "expert", types=AxisType.Explicit)
    with jax.set_mesh(mesh):
        step, params = staged(make_layer(mesh), mesh, jax.device_put(make_input(), NamedSharding(mesh, P("stage"))))
        assert relative_l2(jax.jit(step)(params), want) < 1e-5


@pytest.mark.parametrize("changes", [{}, {"use_bias": False}, {"apply_router_weight_on_input": True}], ids=str)
def test_gradient_inside_a_shard_map(changes):
    mesh = make_mesh("stage", "expert")

    def gradient(step, params):
        return jax.jit(jax.grad(lambda params: jnp.sum(jnp.sin(step(params)))))(params)

    got = gradient(*staged(make_layer(mesh, **changes), mesh, check_vma=False))
    graph, params, rest = nnx.split(make_layer(**changes), nnx.Param, ...)
    want = gradient(lambda params: jnp.stack([nnx.merge(graph, params, rest)(x).output for x in make_input()]), params)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert relative_l2(a, b) < 1e-5
    # Where types are checked JAX's own gradient does not lower, of whatever is in there.
    with pytest.raises(NotImplementedError, match=r"shard_map over \('stage',\) with check_vma=True.*check_vma=False"):
        gradient(*staged(make_layer(mesh, **changes), mesh))


def test_inside_a_shard_map_over_its_own_axis():
    mesh = make_mesh("stage", "expert")
    step, params = staged(make_layer(mesh), mesh, axis_names={"stage", "expert"})
    with pytest.raises(ValueError, match=r"expert_axis='expert'.*axis_names={'stage'}.*mok_jax.moe\(..., axis_name="):
        jax.jit(step)(params)


def test_without_a_mesh_inside_a_shard_map(want):
    """A layer on every device, or, where devices would share one, a refusal that names what is missing."""
    mesh, layer = make_mesh("stage", "expert"), make_layer()
    step, params = staged(layer, mesh, axis_names={"stage", "expert"})
    assert relative_l2(jax.jit(step)(params), want) < 1e-5
    step, params = staged(layer, mesh)
    with pytest.raises(ValueError, match=r"not manual over mesh axes \['expert'\].*MoE\(mesh=...\)"):
        jax.jit(step)(params)


def test_without_a_mesh_under_explicit_axes():
    text = r"mesh is None, but .* explicit axes \['data', 'expert'\] of several devices: give the layer that mesh"
    layer = make_layer()
    with jax.set_mesh(make_mesh("data", "expert", types=AxisType.Explicit)), pytest.raises(ValueError, match=text):
        call(layer, make_input())


# Eagerly


@pytest.fixture
def compilations():
    """The names of the events of compilation, as they come."""
    events = []

    def listen(name, _, **__):
        if name.endswith("backend_compile_duration"):
            events.append(name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield events
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.parametrize("gradient", [False, True], ids=["value", "gradient"])
@pytest.mark.parametrize("axes", [None, ("data", "expert")], ids=["one device", "mesh"])
def test_eager_calls_compile_once(axes, gradient, compilations):
    layer, x = make_layer(axes and make_mesh(*axes)), jnp.asarray(make_input())
    graph, state = nnx.split(layer)
    step = lambda state, x: nnx.merge(graph, state)(x).output.sum()  # noqa: E731
    step = jax.grad(step, argnums=1) if gradient else step
    for _ in range(2):
        compilations.clear()
        jax.block_until_ready(step(state, x))
    assert not compilations


def test_eager_functions_compile_once(compilations):
    x, ids, weights = jnp.ones((16, 8)), jnp.zeros((16, 1), jnp.int32), jnp.ones((16, 1))
    wi, wo = jnp.ones((2, 8, 24)), jnp.ones((2, 24, 8))
    for _ in range(2):
        compilations.clear()
        jax.block_until_ready(jax.grad(lambda x: mok_jax.moe(x, ids, weights, wi, wi, wo).sum())(x))
    assert not compilations
