"""The NNX layer: over a mesh it is the layer without one; masks, losses, shapes, transforms and errors."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import mok_jax.layer
from mok_jax import routing
from mok_jax.layer import Weights
from mok_jax.nnx import ExpertBias
from mok_jax.sharding import make_mesh
from support.compare import relative_l2
from support.layers import (
    EXPERTS,
    F32_TOLERANCE,
    HIDDEN,
    K,
    assert_same,
    make_full_layer,
    make_input,
    make_layer,
    random_bias,
)
from support.published_layers import expert, swiglu


@pytest.fixture
def mesh():
    return make_mesh(expert_parallelism=4, devices=jax.devices("cpu")[:8])


@nnx.jit
def forward(layer, x, mask=None, expert_ids=None):
    # Jitted, so that a layer compiles as one program and layers that are equal share it.
    return layer(x, mask, expert_ids)


@nnx.jit
def value_and_gradients(layer, x, mask, expert_ids=None):
    """Loss, layer's output, and gradients in the parameters and in ``x``."""

    def loss(layer, x):
        out = layer(x, mask, expert_ids)
        return jnp.sum(jnp.sin(out.output)) + out.aux_loss + out.z_loss, out

    (value, out), gradients = nnx.value_and_grad(loss, argnums=(0, 1), has_aux=True)(layer, x)
    return value, out, gradients


@pytest.mark.parametrize("implementation", ["reference", "xla", "megakernel"])
def test_mesh_equals_no_mesh(mesh, implementation):
    x, mask = make_input(3, 7), jnp.ones((3, 7), bool).at[1, 4:].set(False)
    want = value_and_gradients(make_layer(), x, mask)
    got = value_and_gradients(make_layer(mesh, implementation=implementation), x, mask)
    assert_same(got, want)


def test_padded_experts_over_a_mesh_equal_no_mesh(mesh):
    """Six experts on four ranks: two are padding, of which nothing is seen but zeros in the experts' weights."""
    changes = {"num_experts": 6, "num_groups": 3, "group_topk": 2}
    plain, padded = make_full_layer(**changes), make_full_layer(mesh, implementation="megakernel", **changes)
    assert padded.settings.padded_experts == 8
    x = make_input(3, 7)
    want_value, want_out, (want_gradients, want_dx) = value_and_gradients(plain, x, None)
    value, out, (gradients, dx) = value_and_gradients(padded, x, None)
    got = {
        "value": value,
        "out": out,
        "dx": dx,
        "state": nnx.to_pure_dict(nnx.state(padded)),
        "gradients": nnx.to_pure_dict(gradients),
    }
    for arrays in got["state"], got["gradients"]:
        for name in ("wi_0", "wi_1", "wo"):
            assert arrays[name].shape[0] == 8 and not arrays[name][6:].any()
            arrays[name] = arrays[name][:6]
    assert_same(
        got,
        {
            "value": want_value,
            "out": want_out,
            "dx": want_dx,
            "state": nnx.to_pure_dict(nnx.state(plain)),
            "gradients": nnx.to_pure_dict(want_gradients),
        },
    )


def test_full_layer_over_meshes_equals_no_mesh(mesh):
    x, mask = make_input(3, 7), jnp.ones((3, 7), bool).at[1, 4:].set(False).at[2].set(False)
    want = value_and_gradients(make_full_layer(), x, mask)
    np.testing.assert_array_equal(want[1].output[2], 0)
    assert_same(value_and_gradients(make_full_layer(mesh), jnp.where(mask[..., None], x, jnp.nan), mask), want)

    explicit = jax.make_mesh((2, 4), ("data", "expert"), (AxisType.Explicit,) * 2, devices=jax.devices("cpu")[:8])
    with jax.set_mesh(explicit):
        assert_same(forward(make_full_layer(explicit), x, mask), want[1])


def test_given_experts_over_a_mesh_equal_no_mesh(mesh):
    """Six experts on four ranks, of which an id may name none: not those that are padding either."""
    rng, x, mask = np.random.default_rng(2), make_input(3, 7), jnp.ones((3, 7), bool).at[1, 4:].set(False)
    ids = jnp.asarray(rng.integers(-1, 6, (3, 7, K)).astype(np.int32)).at[0, :2].set(-1)
    changes = {"num_experts": 6, "num_groups": 1, "group_topk": 1}
    plain, padded = make_full_layer(**changes), make_full_layer(mesh, implementation="megakernel", **changes)
    value, out, (gradients, dx) = value_and_gradients(padded, x, mask, ids)
    want_value, want_out, (want_gradients, want_dx) = value_and_gradients(plain, x, mask, ids)
    assert_same((value, out, dx, gradients.gate), (want_value, want_out, want_dx, want_gradients.gate))
    np.testing.assert_array_equal(out.expert_load, routing.expert_load(jnp.where(mask[..., None], ids, -1), 6))
    assert np.abs(gradients.gate.kernel[...]).max() > 0
    explicit = jax.make_mesh((2, 4), ("data", "expert"), (AxisType.Explicit,) * 2, devices=jax.devices("cpu")[:8])
    with jax.set_mesh(explicit):
        assert_same(forward(make_full_layer(explicit, **changes), x, mask, ids), want_out)

    for layer in plain, padded:
        out = forward(layer, x, None, ids.at[2, 1, 0].set(6).at[2, 3, 1].set(-2))
        np.testing.assert_array_equal(np.isnan(out.output).any(axis=-1), np.isin(np.arange(21), (15, 17)).reshape(3, 7))
        assert int(out.expert_load.sum()) == int((ids >= 0).sum()) - int(ids[2, 1, 0] >= 0) - int(ids[2, 3, 1] >= 0)


def test_experts_that_the_router_would_choose(mesh):
    """Given, they are the router's to the bit, in all that the layer returns."""
    layer, x = make_full_layer(), make_input(2, 6)
    logits = x.reshape(-1, HIDDEN) @ layer.gate.kernel[...] + layer.gate.bias[...]
    chosen = routing.top_k_routing(
        logits, K, "sigmoid", expert_bias=layer.expert_bias[...], num_groups=4, group_topk=2
    ).expert_ids
    want = forward(layer, x)
    jax.tree.map(np.testing.assert_array_equal, forward(layer, x, None, chosen.reshape(2, 6, K)), want)


@pytest.mark.parametrize("use_bias", [False, True])
def test_router_weight_on_the_input(mesh, use_bias):
    """With two experts a token, masked tokens and padded experts; against the experts' own formula."""
    changes = {"apply_router_weight_on_input": True, "use_bias": use_bias, "num_experts": 6, "router_bias": True}
    plain, padded = make_layer(**changes), make_layer(mesh, implementation="megakernel", **changes)
    for layer in plain, padded:
        layer.gate.bias[...] = jnp.asarray(random_bias(6))
        for bias in (layer.wi_0_bias, layer.wi_1_bias, layer.wo_bias) if use_bias else ():
            bias[...] = bias[...].at[:6].set(np.random.default_rng(3).normal(size=(6, bias.shape[1])))
    x, mask = make_input(3, 7), jnp.ones((3, 7), bool).at[1, 4:].set(False)
    value, out, (gradients, dx) = value_and_gradients(padded, jnp.where(mask[..., None], x, jnp.nan), mask)
    want_value, want, (want_gradients, want_dx) = value_and_gradients(plain, x, mask)
    assert_same((value, out, dx, gradients.gate), (want_value, want, want_dx, want_gradients.gate))

    state = {"/".join(path): np.asarray(leaf[...], np.float64) for path, leaf in nnx.to_flat_state(nnx.state(plain))}
    row = np.asarray(x[0, 0], np.float64)
    logits = row @ state["gate/kernel"] + state["gate/bias"]
    ids, token = np.argsort(-logits)[:K], np.zeros(HIDDEN)
    for e, weight in zip(ids, np.exp(logits[ids]) / np.exp(logits[ids]).sum(), strict=True):
        biases = (state[name][e] if use_bias else 0 for name in ("wi_0_bias", "wi_1_bias", "wo_bias"))
        token += expert(weight * row, *(state[name][e] for name in ("wi_0", "wi_1", "wo")), swiglu, np.inf, [*biases])
    assert relative_l2(want.output[0, 0], token) < F32_TOLERANCE


def test_router_bias_is_a_parameter(mesh):
    """Zeros, trained, in the losses, and created after all others, so that seeds keep their meaning."""
    layer, plain = (make_layer(mesh, router_bias=router_bias, num_shared_experts=1) for router_bias in (True, False))
    with_bias, without = (nnx.to_flat_state(nnx.state(made, nnx.Param)) for made in (layer, plain))
    assert {path for path, _ in with_bias} - {path for path, _ in without} == {("gate", "bias")}
    assert layer.gate.bias.shape == (EXPERTS,) and layer.gate.bias.get_metadata("out_sharding") == (None,)
    for path, leaf in without:
        np.testing.assert_array_equal(dict(with_bias)[path][...], leaf[...])
    x = make_input(2, 16)
    assert_same(forward(layer, x), forward(plain, x))
    layer.gate.bias[...] = jnp.asarray(random_bias(EXPERTS))
    out, want = forward(layer, x), forward(plain, x)
    assert (out.expert_load != want.expert_load).any()
    assert abs(float(out.aux_loss - want.aux_loss)) > 1e-3 and abs(float(out.z_loss - want.z_loss)) > 1e-3
    assert make_layer(router_bias=True, param_dtype=jnp.bfloat16).gate.bias.dtype == jnp.bfloat16


def test_expert_bias_is_state_and_no_parameter(mesh):
    layer = make_full_layer(mesh)
    assert isinstance(layer.expert_bias, ExpertBias) and not isinstance(layer.expert_bias, nnx.Param)
    assert layer.expert_bias.get_value().sharding.is_fully_replicated
    assert "expert_bias" not in nnx.state(layer, nnx.Param)
    before = layer.expert_bias.get_value()
    _, out, (gradients, _) = value_and_gradients(layer, make_input(2, 16), None)
    assert "expert_bias" not in gradients
    np.testing.assert_array_equal(out.expert_bias_update, routing.expert_bias_update(out.expert_load, 0.25))

    @nnx.jit
    def step(layer, x):
        layer.expert_bias[...] += layer(x).expert_bias_update

    step(layer, make_input(2, 16))
    np.testing.assert_array_equal(layer.expert_bias[...], before + out.expert_bias_update)
    assert make_layer(expert_bias=False).expert_bias is None
    assert forward(make_layer(), make_input(3)).expert_bias_update is None


@pytest.mark.parametrize("to_host", [False, True], ids=["arrays", "numpy"])
def test_a_state_cast_to_bf16_still_balances(mesh, to_host):
    """Inference takes the bias as it is, and the next update, which bf16 would lose, makes it f32."""
    layer, x = make_layer(mesh, expert_bias=True), make_input(2, 16)
    layer.expert_bias[...] = jnp.ones(EXPERTS)
    state = jax.tree.map(lambda a: a.astype(jnp.bfloat16), nnx.state(layer))
    nnx.update(layer, jax.device_get(state) if to_host else state)
    out = forward(layer, x)
    assert layer.expert_bias[...].dtype == jnp.bfloat16 and jnp.any(out.expert_bias_update != 0)

    @nnx.jit
    def step(layer, x):
        layer.expert_bias[...] += layer(x).expert_bias_update

    step(layer, x)
    bias = layer.expert_bias[...]
    assert bias.dtype == jnp.float32
    np.testing.assert_array_equal(bias, 1 + out.expert_bias_update)


def test_parameters_of_shared_experts():
    layer = nnx.eval_shape(lambda: make_full_layer(param_dtype=jnp.bfloat16))
    state = {"/".join(map(str, path)): leaf.get_value() for path, leaf in nnx.to_flat_state(nnx.state(layer))}
    assert {name: leaf.shape for name, leaf in state.items() if "shared" in name} == {
        "shared_wi_0": (HIDDEN, 24),
        "shared_wi_1": (HIDDEN, 24),
        "shared_wo": (24, HIDDEN),
        "shared_gate/kernel": (HIDDEN, 1),
    }
    assert {name for name, leaf in state.items() if leaf.dtype != jnp.bfloat16} == {"expert_bias"}
    assert layer.shared_wo.get_metadata("out_sharding") == ("mlp", "embed")
    # The other parameters are those of the layer without: seeds keep their meaning.
    np.testing.assert_array_equal(make_full_layer().wo[...], make_layer().wo[...])


def test_nan_stays_in_its_token():
    layer, x = make_full_layer(), make_input(2, 6)
    got, clean = forward(layer, x.at[0, 3, 5].set(jnp.nan)), forward(layer, x)
    others = np.arange(12).reshape(2, 6) != 3
    np.testing.assert_array_equal(got.output[others], clean.output[others])
    assert np.isnan(got.output[0, 3]).all()
    assert int(got.expert_load.sum()) == 12 * K


def test_sequences_have_a_loss_each():
    x = make_input(2, 6)
    apart = [forward(make_full_layer(), x[b]).aux_loss for b in range(2)]
    assert float(forward(make_full_layer(), x).aux_loss) == pytest.approx(np.mean(apart), rel=1e-5)


@pytest.mark.parametrize("leading", [(0, 6), (2, 0)])
def test_sequences_without_tokens_have_no_loss(mesh, leading):
    for mesh_or_none in None, mesh:
        out = forward(make_full_layer(mesh_or_none), make_input(*leading))
        assert out.output.shape == (*leading, out.output.shape[-1]) and float(out.aux_loss) == 0


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


def test_every_device_routes_its_own_tokens(mesh):
    """No collective holds a row of the batch: neither scores, nor those of groups, nor what their gradients need."""
    layer, tokens = make_full_layer(mesh, seq_aux=False), 8 * 11
    program = value_and_gradients.lower(layer, jnp.ones((tokens, HIDDEN)), jnp.ones(tokens, bool)).compile().as_text()
    collectives = re.findall(r"= (.*?) (?:all-gather|all-to-all|all-reduce|collective-permute)", program)
    assert collectives and not [shapes for shapes in collectives if f"[{tokens}," in shapes]


@pytest.mark.parametrize("leading", [(0,), (0, 3)])
def test_no_tokens(mesh, leading):
    for layer in make_full_layer(seq_aux=False), make_full_layer(mesh, seq_aux=False):
        _, out, (gradients, x_gradient) = value_and_gradients(layer, make_input(*leading), jnp.ones(leading, bool))
        assert out.output.shape == x_gradient.shape == (*leading, HIDDEN)
        assert not any(np.any(leaf) for leaf in jax.tree.leaves((out.expert_load, gradients)))


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
    broken = forward(make_layer(aux_loss_coeff=0.0, z_loss_coeff=0.0), x.at[0, 0].set(jnp.nan))
    assert float(broken.aux_loss) == float(broken.z_loss) == 0


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


def test_kernel_init_makes_one_expert_at_a_time(mesh):
    """Fans are those of a matrix, experts differ, a mesh changes nothing, and padding stays zero."""
    init = jax.nn.initializers.variance_scaling(1.0, "fan_in", "normal")
    changes = {"kernel_init": init, "hidden_size": 256, "intermediate_size": 64, "num_experts": 6, "use_bias": True}
    plain, padded = make_layer(**changes), make_layer(mesh, **changes)
    for kernel, fan in ((plain.gate.kernel, 256), (plain.wi_0, 256), (plain.wi_1, 256), (plain.wo, 64)):
        assert float(jnp.std(kernel[...])) == pytest.approx(fan**-0.5, rel=0.1)
    assert len({float(expert[0, 0]) for expert in plain.wi_0[...]}) == 6
    assert not plain.wi_0_bias[...].any()
    for name in ("wi_0", "wi_1", "wo"):
        weights = getattr(padded, name)[...]
        np.testing.assert_array_equal(weights[:6], getattr(plain, name)[...])
        assert weights.shape[0] == 8 and not weights[6:].any()
    assert hash(plain.settings) == hash(make_layer(**changes).settings)
    assert (make_layer(kernel_init=jax.nn.initializers.ones, num_shared_experts=1).shared_wo[...] == 1).all()


def test_kernel_init_is_a_function_that_makes_arrays():
    with pytest.raises(TypeError, match=r"kernel_init is 0\.02; it must be None or a function .*normal\(0\.02\)"):
        make_layer(kernel_init=0.02)
    boxed = linen.with_partitioning(jax.nn.initializers.ones, (None, None))
    for init in boxed, lambda key, shape, dtype: jnp.ones((3, 3), dtype):
        with pytest.raises(
            TypeError,
            match=r"kernel_init returns a \w+ \(.*\); it must return an array \(float32 \(16, 8\)\), and no box",
        ):
            make_layer(kernel_init=init)


class UnhashableInit:
    __hash__ = None

    def __call__(self, key, shape, dtype):
        return jnp.ones(shape, dtype)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"routed_scaling_factor": jnp.float32(2.5)}, "routed_scaling_factor is Array.*; it must be a Python number"),
        ({"norm_topk_prob": np.array(True)}, "norm_topk_prob is array.*; it must be hashable: .* instead of an array"),
        (
            {"expert_axis": ["data", "expert"]},
            r"expert_axis is \['data', 'expert'\]; it must be the name of .* or a tuple",
        ),
        ({"expert_axis": ()}, r"expert_axis is \(\); it must be the name of a mesh axis, or a tuple of different ones"),
        ({"expert_axis": ("expert", "expert")}, r"expert_axis is \('expert', 'expert'\); .* a tuple of different ones"),
        ({"expert_axis": None}, "expert_axis is None; it must be the name of a mesh axis"),
        ({"kernel_init": UnhashableInit()}, "kernel_init is .*; it must be hashable: .* a frozen dataclass"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_cannot_be_part_of_a_program_is_named(mesh, changes, text):
    with pytest.raises(TypeError, match=text):
        make_layer(mesh, **changes)


@pytest.mark.parametrize("name", ("aux_loss_coeff", "z_loss_coeff", "expert_bias_update_rate"))
def test_a_factor_of_a_schedule_is_multiplied_outside(name):
    out = "expert_bias_update" if "rate" in name else name.replace("_coeff", "")
    text = rf"{name} is .*; it must be a Python number, .* give 1\.0 and multiply out\.{out} by it"
    with pytest.raises(TypeError, match=text):
        make_layer(**{name: jnp.float32(0.1)})
    with pytest.raises(TypeError, match=text):
        jax.jit(lambda value: forward(make_layer(**{name: value}), make_input(3)).output)(0.1)
    assert getattr(make_layer(**{name: np.float32(0.1)}).settings, name) == np.float32(0.1)

    @jax.jit
    def scheduled(value):
        return value * getattr(make_layer(**{"expert_bias": True, name: 1.0})(make_input(3)), out)

    np.testing.assert_allclose(scheduled(0.0), 0)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"num_experts": 3},
            r"num_experts=3 must be at least the expert axis' size \(4\); the nearest is 4, or a mesh",
        ),
        ({"num_experts_per_tok": 9}, r"num_experts_per_tok=9 .* nearest is 8"),
        ({"score_function": "tanh"}, r"score_function='tanh' .*softmax"),
        ({"score_function": "sigmoid", "softmax_after_topk": True}, r"softmax_after_topk=True .*='sigmoid'; use"),
        ({"expert_axis": "model"}, r"expert_axis='model' .*'data', 'expert'"),
        ({"activation": "swigluu"}, r"activation is 'swigluu'.* nearest is 'swiglu'"),
        ({"activation_limit": -1}, r"activation_limit is -1; it must be None or a positive number"),
        ({"implementation": "cuda"}, r"implementation is 'cuda'; it must be one of 'megakernel'"),
        ({"intermediate_size": 0}, r"intermediate_size=0 .* nearest is 1"),
        ({"num_groups": 3}, r"num_groups=3 must divide .*\(8\); the nearest is 2"),
        ({"num_groups": 8}, r"group_topk=1 must be from 2 to 8: .* nearest is 2"),
        ({"num_shared_experts": -1}, r"num_shared_experts=-1 .* nearest is 0"),
        ({"num_shared_experts": 1, "shared_intermediate_size": 0}, r"shared_intermediate_size=0 .* nearest is 1"),
        ({"shared_intermediate_size": 8}, r"shared_intermediate_size=8 .*num_shared_experts=0.*num_shared_experts=1"),
        ({"shared_expert_gate": True}, r"shared_expert_gate=True .*num_shared_experts=0.*num_shared_experts=1"),
        ({"shared_activation_limit": 2}, r"shared_activation_limit=2 .*num_shared_experts=0.*num_shared_experts=1"),
        ({"num_shared_experts": 1, "shared_activation_limit": 0}, r"^shared_activation_limit is 0; .*positive number"),
    ],
)
def test_construction_errors(mesh, changes, text):
    with pytest.raises(ValueError, match=text):
        make_layer(mesh, **changes)


def test_expert_bias_is_asked_for_and_not_given():
    with pytest.raises(TypeError, match=r"expert_bias is 0\.5; it must be True, False or None"):
        make_layer(expert_bias=0.5)


@pytest.mark.parametrize("dtype", (jnp.float16, jnp.int8))
@pytest.mark.parametrize("name", ("dtype", "param_dtype"))
def test_dtypes_are_checked_before_parameters_are_made(name, dtype):
    with pytest.raises(TypeError, match=rf"^{name} is {jnp.dtype(dtype)}; it must be bfloat16 or float32"):
        make_layer(**{name: dtype})


def test_axes_of_several_types_are_refused():
    devices = np.array(jax.devices("cpu")[:8]).reshape(2, 4)
    mesh = Mesh(devices, ("data", "expert"), axis_types=(AxisType.Auto, AxisType.Explicit))
    with pytest.raises(ValueError, match=r"mesh has axes \('data', 'expert'\) of types .*; all must be of one type"):
        make_layer(mesh)


def test_weights_of_wrong_shapes_are_told_as_they_are(mesh):
    """Not as a device's share of them."""
    settings = make_layer(mesh, num_experts=6).settings
    shapes = {name: parameter.shape for name, parameter in settings.parameters().items()}
    for name, shape, text in (
        ("wo", (8, 16, 24), r"wo has shape \(8, 16, 24\); expected \(8, 24, 16\)\.$"),
        ("wi_0", (6, 16, 24), r"wi_0 has shape \(6, 16, 24\); expected \(8, 16, 24\) of 6 experts and 2 of zeros\.$"),
    ):
        weights = Weights(**{key: jnp.zeros(value) for key, value in (shapes | {name: shape}).items()})
        with pytest.raises(ValueError, match=text):
            mok_jax.layer.forward(settings, weights, make_input(8))


def test_call_errors():
    layer = make_layer()
    with pytest.raises(ValueError, match=r"x has shape \(3, 5\); expected \[..., hidden_size=16\]"):
        layer(jnp.ones((3, 5)))
    with pytest.raises(ValueError, match=r"token_mask has shape \(3,\); expected \(2, 3\)"):
        layer(make_input(2, 3), jnp.ones(3, bool))
    with pytest.raises(ValueError, match=r"expert_ids has shape \(2, 3\); expected \(2, 3, 2\), num_experts_per_tok=2"):
        layer(make_input(2, 3), expert_ids=jnp.zeros((2, 3), jnp.int32))
    with pytest.raises(TypeError, match=r"expert_ids has dtype uint32; it must be int32: expert_ids\.astype"):
        layer(make_input(2, 3), expert_ids=jnp.zeros((2, 3, 2), jnp.uint32))


def test_operations_are_named():
    """In forward and backward, so that a profile tells the parts of a layer apart."""
    layer = make_layer(num_shared_experts=1)
    step = nnx.jit(nnx.grad(lambda layer, x: layer(x).output.sum()))
    text = step.lower(layer, make_input(4)).compile().as_text()
    for name in ("router", "experts", "shared_experts"):
        for direction in (r"jvp\(jit\(moe_layer\)\)", r"transpose\(jvp\(jit\(moe_layer\)\)\)"):
            assert re.search(rf'op_name="[^"]*/{direction}/{name}/', text), (name, direction)
