"""The NNX layer: over a mesh it is the layer without one; masks, losses, shapes, transforms and errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import relative_l2
from flax import nnx
from flax.core import spmd
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from mok_jax.nnx import MoE
from mok_jax.sharding import make_mesh

HIDDEN, EXPERTS, K = 16, 8, 2
F32_TOLERANCE = 1e-5


@pytest.fixture
def mesh():
    return make_mesh(expert_parallelism=4, devices=jax.devices("cpu")[:8])


def make_layer(mesh=None, **changes):
    arguments = {
        "hidden_size": HIDDEN,
        "intermediate_size": 24,
        "num_experts": EXPERTS,
        "num_experts_per_tok": K,
        "aux_loss_coeff": 0.3,
        "z_loss_coeff": 0.2,
        "implementation": "reference",
    }
    return MoE(**(arguments | changes), mesh=mesh, rngs=nnx.Rngs(0))


def make_input(*leading, seed=1):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(*leading, HIDDEN)).astype(np.float32))


@nnx.jit
def forward(layer, x):
    # Jitted, so that a layer compiles as one program and layers that are equal share it.
    return layer(x)


@nnx.jit
def value_and_gradients(layer, x, mask):
    """Loss, layer's output, and gradients in the parameters and in ``x``."""

    def loss(layer, x):
        out = layer(x, mask)
        return jnp.sum(jnp.sin(out.output)) + out.aux_loss + out.z_loss, out

    (value, out), gradients = nnx.value_and_grad(loss, argnums=(0, 1), has_aux=True)(layer, x)
    return value, out, gradients


def assert_same(got, want):
    for got_leaf, want_leaf in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert got_leaf.shape == want_leaf.shape and got_leaf.dtype == want_leaf.dtype
        assert relative_l2(got_leaf, want_leaf) < F32_TOLERANCE


@pytest.mark.parametrize("implementation", ["reference", "xla", "megakernel"])
def test_mesh_equals_no_mesh(mesh, implementation):
    x, mask = make_input(3, 7), jnp.ones((3, 7), bool).at[1, 4:].set(False)
    want = value_and_gradients(make_layer(), x, mask)
    got = value_and_gradients(make_layer(mesh, implementation=implementation), x, mask)
    assert_same(got, want)


@pytest.mark.parametrize("leading", [(), (1,), (13,), (2, 4), (2, 2, 3)])
def test_any_leading_dimensions_and_odd_token_counts(mesh, leading):
    x = make_input(*leading)
    got, want = forward(make_layer(mesh), x), forward(make_layer(), x)
    assert got.output.shape == x.shape
    assert int(got.expert_load.sum()) == K * np.prod(leading, dtype=int)
    assert_same(got, want)


@pytest.mark.parametrize("expert_axis", ["data", ("data", "expert")])
def test_other_expert_axes(mesh, expert_axis):
    layer = make_layer(mesh, expert_axis=expert_axis)
    assert layer.wi_0.get_value().sharding.spec[0] == expert_axis
    x = make_input(16)
    assert_same(forward(layer, x), forward(make_layer(), x))


def test_explicit_mesh():
    # What jax.make_mesh gives by default: shardings are part of the types.
    mesh = jax.make_mesh((2, 4), ("data", "expert"), (AxisType.Explicit,) * 2, devices=jax.devices("cpu")[:8])
    x = make_input(8, 5)
    want = value_and_gradients(make_layer(), x, None)
    with jax.set_mesh(mesh):
        layer = make_layer(mesh)
        got = value_and_gradients(layer, jax.device_put(x, NamedSharding(mesh, P("data"))), None)
    assert_same(got, want)
    with pytest.raises(ValueError, match=r"explicit axes .*jax\.set_mesh"):
        layer(x)


def test_mesh_of_one_device():
    x = make_input(5)
    # Not jitted: this is how a layer is tried out by hand.
    assert_same(make_layer(make_mesh(devices=jax.devices("cpu")[:1]))(x), forward(make_layer(), x))


def test_parameters_are_sharded_and_named(mesh):
    layer = make_layer(mesh)
    shapes = {"/".join(map(str, path)): leaf.shape for path, leaf in nnx.to_flat_state(nnx.state(layer))}
    up, down = (EXPERTS, HIDDEN, 24), (EXPERTS, 24, HIDDEN)
    assert shapes == {"gate/kernel": (HIDDEN, EXPERTS), "wi_0": up, "wi_1": up, "wo": down}
    assert layer.wi_1.get_metadata("out_sharding") == ("exp", "embed", "mlp")
    assert layer.wo.get_metadata("out_sharding") == ("exp", "mlp", "embed")
    assert layer.wo.get_value().sharding.is_equivalent_to(NamedSharding(mesh, P("expert")), 3)
    assert layer.wi_0.get_value().addressable_shards[0].data.shape == (EXPERTS // 4, HIDDEN, 24)
    assert layer.gate.kernel.get_value().sharding.is_fully_replicated


def test_the_callers_axis_rules_win(mesh):
    with spmd.logical_axis_rules((("embed", "data"),)):
        layer = make_layer(mesh)
    assert layer.wi_0.get_value().sharding.spec == P("expert", "data", None)
    x = make_input(8)
    assert_same(forward(layer, x), forward(make_layer(), x))


def test_mask_is_as_if_padding_were_not_there(mesh):
    x, mask = make_input(2, 8), jnp.ones((2, 8), bool).at[1].set(False)
    for layer in make_layer(), make_layer(mesh):
        dirty = jnp.where(mask[..., None], x, jnp.nan)
        value, out, (layer_gradient, x_gradient) = value_and_gradients(layer, dirty, mask)
        want_value, want_out, (want_layer_gradient, want_x_gradient) = value_and_gradients(layer, x[:1], None)
        np.testing.assert_array_equal(out.output[1], 0)
        np.testing.assert_array_equal(x_gradient[1], 0)
        np.testing.assert_array_equal(out.expert_load, want_out.expert_load)
        assert_same(
            (value, out.output[:1], out.aux_loss, out.z_loss, layer_gradient, x_gradient[:1]),
            (want_value, want_out.output, want_out.aux_loss, want_out.z_loss, want_layer_gradient, want_x_gradient),
        )


def test_losses_are_scaled():
    x = make_input(6)
    full, half, none = (forward(make_layer(aux_loss_coeff=c, z_loss_coeff=c), x) for c in (1.0, 0.5, 0.0))
    assert float(full.aux_loss) == pytest.approx(2 * float(half.aux_loss)) and float(full.aux_loss) > 0.5
    assert float(full.z_loss) == pytest.approx(2 * float(half.z_loss)) and float(full.z_loss) > 0
    assert float(none.aux_loss) == float(none.z_loss) == 0


def test_dtypes(mesh):
    layer = make_layer(mesh, dtype=jnp.bfloat16)
    x = make_input(8)
    _, out, (gradients, x_gradient) = value_and_gradients(layer, x, None)
    assert out.output.dtype == jnp.bfloat16 and out.aux_loss.dtype == jnp.float32
    assert {leaf.dtype for leaf in jax.tree.leaves(gradients)} == {jnp.dtype(jnp.float32)}
    assert x_gradient.dtype == jnp.float32
    assert relative_l2(out.output.astype(jnp.float32), forward(make_layer(), x).output) < 2e-2


def test_gradients_reach_every_expert_and_the_gate(mesh):
    _, out, (gradients, _) = value_and_gradients(make_layer(mesh), make_input(64), None)
    assert int(out.expert_load.min()) > 0
    for name in ("wi_0", "wi_1", "wo"):
        assert np.abs(gradients[name].get_value()).reshape(EXPERTS, -1).max(axis=1).min() > 0
    assert np.abs(gradients["gate"]["kernel"].get_value()).min() > 0


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"num_experts": 6}, r"num_experts=6 must be a multiple .*\(4\); the nearest is 8"),
        ({"num_experts": 1, "num_experts_per_tok": 1}, r"num_experts=1 .* nearest is 4"),
        ({"num_experts_per_tok": 9}, r"num_experts_per_tok=9 .* nearest is 8"),
        ({"score_function": "tanh"}, r"score_function='tanh' .*softmax"),
        ({"expert_axis": "model"}, r"expert_axis='model' .*'data', 'expert'"),
        ({"intermediate_size": 0}, r"intermediate_size=0 .* nearest is 1"),
    ],
)
def test_construction_errors(mesh, changes, text):
    with pytest.raises(ValueError, match=text):
        make_layer(mesh, **changes)


def test_call_errors():
    layer = make_layer()
    with pytest.raises(ValueError, match=r"x has shape \(3, 5\); expected \[..., hidden_size=16\]"):
        layer(jnp.ones((3, 5)))
    with pytest.raises(ValueError, match=r"token_mask has shape \(3,\); expected \(2, 3\)"):
        layer(make_input(2, 3), jnp.ones(3, bool))
