"""The Linen layer: it is the NNX layer to the bit, and lives with what Linen has: boxes, collections, scan, remat."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from mok_jax import routing
from mok_jax.layer import Settings
from mok_jax.linen import STATE, Gate, MoE
from mok_jax.nnx import MoE as NnxMoE
from mok_jax.sharding import make_mesh
from support.layers import EXPERTS, HIDDEN, K, assert_same, make_full_layer, make_input, twin

LOGICAL = {
    "wi_0": P("exp", "embed", "mlp"),
    "wi_1": P("exp", "embed", "mlp"),
    "wo": P("exp", "mlp", "embed"),
    "gate": {"kernel": P("embed", None)},
}


@pytest.fixture
def mesh():
    return make_mesh(expert_parallelism=4, devices=jax.devices("cpu")[:8])


def make_layer(mesh=None, **changes):
    sizes = {"hidden_size": HIDDEN, "intermediate_size": 24, "num_experts": EXPERTS, "num_experts_per_tok": K}
    return MoE(**(sizes | {"implementation": "megakernel"} | changes), mesh=mesh)


def test_same_arguments_as_nnx():
    def arguments(function):
        own = ("self", "rngs", "parent", "name")
        parameters = inspect.signature(function).parameters.values()
        return [(p.name, p.kind, p.default) for p in parameters if p.name not in own]

    assert arguments(MoE) == arguments(NnxMoE.__init__) == arguments(Settings)


def test_same_bits_as_nnx():
    """With everything that a layer can have, padded experts over a mesh included, and with its experts given."""
    mesh = make_mesh(devices=jax.devices("cpu")[:8])
    layer = make_full_layer(mesh, implementation="megakernel", num_experts=12, use_bias=True)
    linen, variables = twin(layer)
    x, mask = make_input(3, 7), jnp.ones((3, 7), bool).at[1, 4:].set(False)
    given = jnp.arange(3 * 7 * K, dtype=jnp.int32).reshape(3, 7, K) % 12

    def loss(out):
        return jnp.sum(jnp.sin(out.output)) + out.aux_loss + out.z_loss, out

    @jax.jit
    def linen_step(variables, x, ids):
        return jax.grad(lambda p, x: loss(linen.apply(variables | {"params": p}, x, mask, ids)), (0, 1), has_aux=True)(
            variables["params"], x
        )

    @nnx.jit
    def nnx_step(layer, x, ids):
        return nnx.grad(lambda layer, x: loss(layer(x, mask, ids)), argnums=(0, 1), has_aux=True)(layer, x)

    for ids in None, given:
        (params, dx), out = linen_step(variables, x, ids)
        (state, want_dx), want = nnx_step(layer, x, ids)
        jax.tree.map(np.testing.assert_array_equal, (params, dx, out), (nnx.to_pure_dict(state), want_dx, want))


def test_parameters_are_sharded_and_named(mesh):
    layer = make_layer(mesh, expert_bias=True, param_dtype=jnp.bfloat16)
    variables = jax.jit(layer.init)(jax.random.key(0), make_input(2, 3))
    assert nn.get_partition_spec(variables) == {"params": LOGICAL, STATE: {"expert_bias": P()}}
    values = nn.unbox(variables)
    assert values["params"]["wi_0"].dtype == jnp.bfloat16 and values[STATE]["expert_bias"].dtype == jnp.float32
    for whole in values["params"]["gate"]["kernel"], values[STATE]["expert_bias"]:
        assert whole.sharding.is_fully_replicated and len(whole.sharding.device_set) == 8
    settings = Settings(HIDDEN, 24, EXPERTS, K, mesh=mesh)
    not_jitted = Gate(settings, settings.parameters()["wo"]).init(jax.random.key(0))["params"]["kernel"].value
    for wo in values["params"]["wo"], not_jitted:
        assert wo.sharding.is_equivalent_to(NamedSharding(mesh, P("expert")), 3)
    padded = jax.eval_shape(make_layer(mesh, num_experts=6).init, jax.random.key(0), make_input(2))["params"]
    assert padded["wo"].value.shape == (8, 24, HIDDEN) and padded["gate"]["kernel"].value.shape == (HIDDEN, 6)
    # As NNX initialises it: each expert with the variance of its own fan-in.
    assert float(values["params"]["wi_0"].std()) == pytest.approx(HIDDEN**-0.5, rel=0.05)
    assert set(jax.eval_shape(make_layer().init, jax.random.key(0), make_input(1))) == {"params"}


def test_initialisation_runs_the_reference(mesh):
    layer, key, x = make_layer(mesh), jax.random.key(0), make_input(8)
    assert "mok_forward" not in str(jax.make_jaxpr(layer.init)(key, x))
    variables = jax.eval_shape(layer.init, key, x)
    assert "mok_forward" in str(jax.make_jaxpr(layer.apply)(variables, x))


def test_initialisation_on_an_explicit_mesh():
    """Shardings are in the types then, and boxes can be opened anywhere."""
    mesh = jax.make_mesh((2, 4), ("data", "expert"), (AxisType.Explicit,) * 2, devices=jax.devices("cpu")[:8])
    layer = make_layer(mesh)
    with jax.set_mesh(mesh):
        variables = jax.jit(layer.init)(jax.random.key(0), jax.device_put(make_input(8, 5), NamedSharding(mesh, P())))
    wo = nn.unbox(variables)["params"]["wo"]
    assert jax.typeof(wo).sharding.spec == P("expert", None, None)
    assert nn.get_partition_spec(variables)["params"] == LOGICAL


class Block(nn.Module):
    mesh: object

    @nn.compact
    def __call__(self, x, _):
        out = make_layer(self.mesh, expert_bias=True, name="moe")(x)
        return x + out.output, out


def test_scan_over_rematerialised_layers(mesh):
    """Three layers as one scanned, rematerialised block are three layers one after the other."""
    depth, x = 3, make_input(8)
    stack = nn.scan(
        nn.remat(Block, prevent_cse=False),
        variable_axes={"params": 0, STATE: 0, "intermediates": 0},
        split_rngs={"params": True},
        length=depth,
        metadata_params={nn.PARTITION_NAME: "layers"},
    )(mesh)
    variables = jax.jit(stack.init)(jax.random.key(0), x, None)
    assert nn.get_partition_spec(variables)["params"]["moe"]["wi_0"] == P("layers", "exp", "embed", "mlp")
    values = nn.unbox(variables)
    assert values["params"]["moe"]["wi_0"].shape == (depth, EXPERTS, HIDDEN, 24)
    assert np.ptp(values["params"]["moe"]["wi_0"], axis=0).min() > 0
    values[STATE]["moe"]["expert_bias"] += jnp.linspace(0, 1, EXPERTS)

    def scanned(values, x):
        return stack.apply(values, x, None, mutable="intermediates")

    def one_by_one(values, x):
        outs = []
        for n in range(depth):
            x, out = Block(None).apply(jax.tree.map(lambda a, n=n: a[n], values), x, None)
            outs.append(out)
        return x, jax.tree.map(lambda *a: jnp.stack(a), *outs)

    (y, outs), sown = jax.jit(scanned)(values, x)
    assert_same((y, outs), jax.jit(one_by_one)(jax.device_get(values), x))
    np.testing.assert_array_equal(sown["intermediates"]["moe"]["expert_load"][0], outs.expert_load)
    assert outs.expert_bias_update.shape == values[STATE]["moe"]["expert_bias"].shape

    def gradient(apply):
        return jax.jit(jax.grad(lambda p, x: jnp.sum(jnp.sin(apply(values | {"params": p}, x))), (0, 1)))

    got = gradient(lambda v, x: scanned(v, x)[0][0])(values["params"], x)
    values = jax.device_get(values)
    assert_same(got, gradient(lambda v, x: one_by_one(v, x)[0])(values["params"], x))


def test_training_step_with_accumulated_gradients(mesh):
    """Two microbatches give the gradient of the batch; the bias moves by the batch's load and has no gradient."""
    layer, x = make_layer(mesh, expert_bias=True, expert_bias_update_rate=0.25), make_input(2, 16)
    variables = nn.unbox(jax.jit(layer.init)(jax.random.key(0), x))

    def loss(params, x):
        out = layer.apply(variables | {"params": params}, x)
        return jnp.mean(jnp.square(out.output - 1)), out

    @jax.jit
    def step(variables, x):
        def accumulate(total, microbatch):
            gradient, out = jax.grad(loss, has_aux=True)(variables["params"], microbatch)
            return jax.tree.map(lambda a, b: a + b / len(x), total, gradient), out.expert_load

        gradient, load = jax.lax.scan(accumulate, jax.tree.map(jnp.zeros_like, variables["params"]), x)
        update = routing.expert_bias_update(load.sum(axis=0), 0.25)
        return gradient, jax.tree.map(jnp.add, variables[STATE], {"expert_bias": update})

    gradient, state = step(variables, x)
    want, out = jax.jit(jax.grad(loss, has_aux=True))(variables["params"], x)
    assert_same(gradient, want)
    np.testing.assert_array_equal(state["expert_bias"], out.expert_bias_update)
    assert np.abs(state["expert_bias"]).max() == 0.25


def test_a_state_cast_to_bf16_still_balances():
    """Inference takes the bias as it is, and adding an update makes it f32."""
    layer, x = make_layer(expert_bias=True), make_input(2, 16)
    variables = layer.init(jax.random.key(0), x) | {STATE: {"expert_bias": jnp.ones(EXPERTS)}}
    variables = jax.tree.map(lambda a: a.astype(jnp.bfloat16), variables)
    out = layer.apply(variables, x)
    (bias,) = jax.tree.leaves(jax.tree.map(jnp.add, variables[STATE], {"expert_bias": out.expert_bias_update}))
    np.testing.assert_array_equal(bias, 1 + out.expert_bias_update)
    assert bias.dtype == jnp.float32 and jnp.any(bias != 1)


def test_illegal_arguments_are_refused_where_they_are_written(mesh):
    with pytest.raises(ValueError, match=r"num_experts_per_tok=9 .* nearest is 8"):
        make_layer(mesh, num_experts_per_tok=9)
    with pytest.raises(TypeError, match=r"expert_bias is 0\.5; it must be True, False or None"):
        make_layer(expert_bias=0.5)
    with pytest.raises(ValueError, match=r"x has shape \(3, 5\); expected \[..., hidden_size=16\]"):
        make_layer().init(jax.random.key(0), jnp.ones((3, 5)))
