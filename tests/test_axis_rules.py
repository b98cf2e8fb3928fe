"""Logical axes: both layers lie along a mesh as Flax's rules say, and what was saved on one mesh is used on another."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx, serialization
from flax.training.train_state import TrainState
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mok_jax import linen
from mok_jax import nnx as mok_nnx
from mok_jax.layer import Settings
from support.layers import EXPERTS, HIDDEN, K, assert_same, make_input

AXES = ("data", "expert", "tensor")
ARGUMENTS = {
    "hidden_size": HIDDEN,
    "intermediate_size": 24,
    "num_experts": EXPERTS,
    "num_experts_per_tok": K,
    "implementation": "reference",
}
BOTH = pytest.mark.parametrize("front_end", ("linen", "nnx"))

# The caller's rules, and where wi_0 [exp, embed, mlp] is then.
RULES = {
    "none": ((), P("expert")),
    "of other axes": ((("vocab", "tensor"), ("layers", "nowhere")), P("expert")),
    "the first wins": ((("embed", "data"), ("embed", "tensor")), P("expert", "data")),
    "the first free one wins": (
        (("exp", "expert"), ("embed", ("data", "expert")), ("embed", "data")),
        P("expert", "data"),
    ),
    "a mesh axis is used once": ((("exp", "expert"), ("embed", ("data", "expert"))), P("expert")),
    "the caller's come first": ((("embed", ("data", "expert")),), P(None, ("data", "expert"))),
    "all taken": ((("embed", "data"), ("exp", "data"), ("mlp", ("tensor", "data"))), P(None, "data")),
    "None is an answer": ((("exp", None), ("exp", "expert"), ("mlp", "tensor")), P(None, None, "tensor")),
    "mesh axes are names, too": ((("data", "tensor"), ("embed", "data"), ("embed", None)), P("expert", "data")),
    "lists": ([["exp", ["expert", "data"]], ["embed", "tensor"]], P(("expert", "data"), "tensor")),
}


def make_mesh(shape=(2, 2, 2), names=AXES, axis_type=AxisType.Auto):
    devices = np.array(jax.devices("cpu")[: np.prod(shape)]).reshape(shape)
    return Mesh(devices, names, axis_types=(axis_type,) * len(names))


def make_linen(mesh):
    return linen.MoE(**ARGUMENTS, mesh=mesh)


def make_nnx(mesh, seed=0, **changes):
    return mok_nnx.MoE(**ARGUMENTS, **changes, mesh=mesh, rngs=nnx.Rngs(seed))


def parameter(front_end, name, mesh):
    """A new parameter, as a layer makes it."""
    if front_end == "nnx":
        return nnx.jit(lambda: getattr(make_nnx(mesh), name))()[...]
    settings = Settings(**ARGUMENTS, mesh=mesh)
    init = linen.Gate(settings, settings.parameters()[name]).init
    return jax.jit(init)(jax.random.key(0))["params"]["kernel"].value


@BOTH
@pytest.mark.parametrize("rules", RULES)
def test_parameters_lie_along_the_mesh_as_the_rules_say(front_end, rules):
    mesh = make_mesh()
    rules, spec = RULES[rules]
    with nn.logical_axis_rules(rules):
        wi_0 = parameter(front_end, "wi_0", mesh)
    assert wi_0.sharding.is_equivalent_to(NamedSharding(mesh, spec), 3)


@settings(max_examples=50, deadline=None, database=None, derandomize=True)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(("exp", "embed", "mlp", "data", "other")),
            st.none() | st.sampled_from(AXES) | st.lists(st.sampled_from(AXES), unique=True).map(tuple),
        )
    )
)
def test_any_rules_are_read_as_flax_reads_them(rules):
    """The oracle is Flax's own function; NNX and its optimizer, which read rules otherwise, are led to the same."""
    of_layer = Settings(**ARGUMENTS, use_bias=True, mesh=make_mesh())
    ours = [] if "exp" in dict(rules) else [("exp", "expert")]
    want = {name: nn.logical_to_mesh_axes(p.axes, rules + ours) for name, p in of_layer.parameters().items()}

    def make():
        layer = make_nnx(of_layer.mesh, use_bias=True)
        return nnx.state((layer, nnx.Optimizer(layer, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)))

    def specs(state):
        return {
            path[-2 if path[-1] == "kernel" else -1]: leaf.get_value()
            for path, leaf in nnx.to_flat_state(nnx.get_partition_spec(state))
            if "step" not in path
        }

    with nn.logical_axis_rules(rules):
        for name, parameter in of_layer.parameters().items():
            jaxpr = jax.make_jaxpr(linen.Gate(of_layer, parameter).init)(jax.random.key(0))
            (got,) = (eqn.params["sharding"] for eqn in jaxpr.eqns if eqn.primitive.name == "sharding_constraint")
            assert got.mesh == of_layer.mesh and got.spec == want[name]
        state = nnx.eval_shape(make)
        assert specs(state) == want
    assert specs(state) == want


def test_stacked_nnx_layers_stay_split():
    """Where a mesh axis stands for a name, a transformation finds its own axis, too."""
    mesh, layers = make_mesh(), {nnx.PARTITION_NAME: None}
    make = nnx.vmap(lambda key: make_nnx(mesh, seed=key), transform_metadata=layers)
    with nn.logical_axis_rules(RULES["the first free one wins"][0]):
        stack = nnx.jit(make)(jax.random.split(jax.random.key(0), 2))
        y, _ = nnx.scan(lambda x, layer: (layer(x).output, None), transform_metadata=layers)(make_input(8), stack)
    assert stack.wi_0.get_metadata("out_sharding") == (None, "exp", "embed", "mlp")
    assert stack.gate.kernel.get_metadata("out_sharding") == (None, ("data", "expert"), None)
    assert stack.wi_0[...].sharding.spec == P(None, "expert", "data") and y.shape == (8, HIDDEN)


@BOTH
def test_rules_change_nothing_of_what_is_computed(front_end):
    """Even where the experts' weights lie along another axis than the experts."""
    mesh, x = make_mesh(), make_input(8)
    with nn.logical_axis_rules(RULES["the caller's come first"][0]):
        layer = nnx.jit(lambda: make_nnx(mesh))()
        if front_end == "nnx":
            out = nnx.jit(lambda layer, x: layer(x))(layer, x)
        else:
            out = jax.jit(make_linen(mesh).apply)({"params": nnx.to_pure_dict(nnx.state(layer))}, x)
    assert layer.wi_0[...].sharding.spec == P(None, ("data", "expert"))
    assert_same(out, make_nnx(None)(x))


@BOTH
def test_a_rule_for_an_axis_that_the_mesh_lacks(front_end):
    with (
        nn.logical_axis_rules((("embed", "fsdp"),)),
        pytest.raises(ValueError, match=r"fsdp .*is not found in mesh: \('data', 'expert', 'tensor'\)"),
    ):
        parameter(front_end, "wi_0", make_mesh())


def test_boxes_hold_names_alone():
    """So that shapes can be unboxed, and that an optimizer's state is boxed as parameters are."""
    mesh, x = make_mesh(), make_input(8)
    layer, rules = make_linen(mesh), RULES["the first free one wins"][0]

    def make():
        params = layer.init(jax.random.key(0), x)["params"]
        return TrainState.create(apply_fn=layer.apply, params=params, tx=optax.adam(1e-3))

    with nn.logical_axis_rules(rules):
        shapes = jax.eval_shape(make)
        shardings = nn.logical_to_mesh_sharding(nn.get_partition_spec(shapes), mesh, rules)
        state = jax.jit(make, out_shardings=shardings)()
        params = jax.jit(layer.init)(jax.random.key(0), x)["params"]
    box = shapes.params["wi_0"]
    assert isinstance(box, nn.LogicallyPartitioned) and box.mesh is None and box.rules is None
    assert nn.unbox(shapes).params["wi_0"].shape == (EXPERTS, HIDDEN, 24)
    gradient = jax.jit(jax.grad(lambda p: layer.apply({"params": p}, x).output.sum()))(state.params)
    state = state.apply_gradients(grads=gradient)
    for tree in params, state.params, state.opt_state[0].mu:
        same = jax.tree.map(lambda a, s: a.sharding.is_equivalent_to(s, a.ndim), nn.unbox(tree), shardings.params)
        assert all(jax.tree.leaves(same)), same


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_experts_are_not_gathered_under_a_global_mesh(axis_type):
    """Flax opens boxes along the rules of the caller, who need not say where experts are."""
    mesh, x = make_mesh((2, 4), ("data", "expert"), axis_type), make_input(8)
    layer = make_linen(mesh)
    with jax.set_mesh(mesh), nn.logical_axis_rules((("embed", "data"),)):
        variables = jax.jit(layer.init)(jax.random.key(0), x)
        out = jax.jit(layer.apply)(variables, x)
        jaxpr = jax.make_jaxpr(layer.apply)(variables, x)
    wi_0 = variables["params"]["wi_0"].value
    assert wi_0.sharding.is_equivalent_to(NamedSharding(mesh, P("expert", "data")), 3)
    if axis_type == AxisType.Auto:  # With explicit axes it is a check, of which nothing is left.
        opened = [eqn.params["sharding"].spec for eqn in jaxpr.eqns if eqn.primitive.name == "sharding_constraint"]
        assert P("expert", "data", None) in opened and P(None, "data", None) not in opened
    assert_same(out, make_linen(None).apply(jax.device_get(jax.tree.map(jnp.asarray, variables)), x))


def test_without_a_mesh_boxes_are_opened_as_flax_opens_them():
    mesh, x = make_mesh(), make_input(8)
    variables = make_linen(None).init(jax.random.key(0), x)
    with jax.set_mesh(mesh), nn.logical_axis_rules((("exp", "expert"),)):
        jaxpr = jax.make_jaxpr(make_linen(None).apply)(variables, x)
    opened = [eqn.params["sharding"].spec for eqn in jaxpr.eqns if eqn.primitive.name == "sharding_constraint"]
    assert P("expert", None, None) in opened


OTHER_MESHES = {
    "none": lambda: None,
    "smaller": lambda: make_mesh((1, 2), ("data", "expert")),
    "larger": lambda: make_mesh((4, 4), ("data", "expert")),
    "other order": lambda: make_mesh((4, 2), ("expert", "data")),
    "other names": lambda: make_mesh((8,), ("expert",)),
    "explicit": lambda: make_mesh((2, 4), ("data", "expert"), AxisType.Explicit),
}


@functools.cache
def saved_on_one_mesh():
    """Parameters made on a mesh, as Linen's and NNX's users save them; input, and what becomes of it."""
    layer, x = make_nnx(make_mesh((2, 4), ("data", "expert"))), make_input(8)
    pure = nnx.to_pure_dict(nnx.state(layer))
    boxed = jax.tree.map(lambda a: nn.LogicallyPartitioned(a, ("of", "another", "version")[: a.ndim]), pure)
    return serialization.to_bytes({"params": boxed}), jax.device_get(pure), x, make_nnx(None)(x)


@pytest.mark.parametrize("mesh", OTHER_MESHES)
def test_linen_parameters_go_to_another_mesh(mesh):
    (saved, _, x, want), mesh = saved_on_one_mesh(), OTHER_MESHES[mesh]()
    layer = make_linen(mesh)
    with jax.set_mesh(mesh) if mesh and mesh.are_all_axes_explicit else contextlib.nullcontext():
        variables = serialization.from_bytes(jax.eval_shape(layer.init, jax.random.key(0), x), saved)
        assert variables["params"]["wo"].names == ("exp", "mlp", "embed")
        assert_same(jax.jit(layer.apply)(variables, x), want)


@pytest.mark.parametrize("mesh", OTHER_MESHES)
def test_nnx_parameters_go_to_another_mesh(mesh):
    """By value: variables would take their mesh along, and an optimizer's state would be made on that."""
    (_, saved, x, want), mesh = saved_on_one_mesh(), OTHER_MESHES[mesh]()
    with jax.set_mesh(mesh) if mesh and mesh.are_all_axes_explicit else contextlib.nullcontext():
        layer = make_nnx(mesh, seed=1)
        here = jax.tree.map(lambda a: a.sharding, nnx.to_pure_dict(nnx.state(layer)))
        nnx.update(layer, jax.device_put(saved, here))
        assert_same(nnx.jit(lambda layer, x: layer(x))(layer, x), want)
        optimizer = nnx.Optimizer(layer, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)
        moments = nnx.to_pure_dict(nnx.state(optimizer.opt_state))[0]["trace"]
    assert jax.tree.map(lambda a: a.sharding, moments) == here
