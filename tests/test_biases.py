"""Biases of the routed experts: against a layer in float64 NumPy whose gradients are written out by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mok_jax.nnx import MoE
from mok_jax.sharding import make_mesh
from support.compare import relative_l2

TOKENS, HIDDEN, INTERMEDIATE, EXPERTS, K = 21, 16, 24, 6, 2
EACH = ("wi_0", "wi_1", "wo", "wi_0_bias", "wi_1_bias", "wo_bias")
PRESENT = np.arange(TOKENS) % 5 != 3


def make_layer(mesh=None, **changes):
    """A layer with biases that are as large as what they are added to."""
    layer = MoE(HIDDEN, INTERMEDIATE, EXPERTS, K, use_bias=True, mesh=mesh, rngs=nnx.Rngs(0), **changes)
    rng = np.random.default_rng(1)
    for name in EACH[3:]:
        bias = getattr(layer, name)
        bias[...] = bias[...].at[:EXPERTS].set(rng.normal(size=(EXPERTS, bias.shape[1])))
    return layer


def make_input():
    x, dy = np.random.default_rng(2).normal(size=(2, TOKENS, HIDDEN)).astype(np.float32)
    return x, dy


def numpy_layer(weights, x, dy):
    """``y`` and the gradients of ``sum(y * dy)`` by all weights and ``x``; tokens that are not present have none."""
    x, dy, kernel = x.astype(np.float64), dy.astype(np.float64), weights["gate/kernel"]
    logits = x @ kernel
    ids = np.where(PRESENT[:, None], np.argsort(-logits, axis=1, kind="stable")[:, :K], -1)
    router = np.exp(np.take_along_axis(logits, ids, axis=1))
    router /= router.sum(axis=1, keepdims=True)
    y, d_router, d_logits = np.zeros_like(x), np.zeros_like(router), np.zeros_like(logits)
    d = {name: np.zeros_like(weight) for name, weight in weights.items()} | {"x": np.zeros_like(x)}
    for e in range(EXPERTS):
        wi_0, wi_1, wo, wi_0_bias, wi_1_bias, wo_bias = (weights[name][e] for name in EACH)
        token, k = np.nonzero(ids == e)
        rows, weight = x[token], router[token, k][:, None]
        gate, up = rows @ wi_0 + wi_0_bias, rows @ wi_1 + wi_1_bias
        sigmoid = 1 / (1 + np.exp(-gate))
        hidden = gate * sigmoid * up
        down = hidden @ wo + wo_bias
        y[token] += weight * down
        d_router[token, k] = (dy[token] * down).sum(axis=1)
        d_down = weight * dy[token]
        d_hidden = d_down @ wo.T
        d_gate, d_up = d_hidden * up * sigmoid * (1 + gate * (1 - sigmoid)), d_hidden * gate * sigmoid
        d["x"][token] += d_gate @ wi_0.T + d_up @ wi_1.T
        products = rows.T @ d_gate, rows.T @ d_up, hidden.T @ d_down
        for name, gradient in zip(EACH, (*products, d_gate.sum(0), d_up.sum(0), d_down.sum(0)), strict=True):
            d[name][e] = gradient
    # Normalised softmax weights are a softmax over the chosen logits.
    slots = router * (d_router - (router * d_router).sum(axis=1, keepdims=True))
    np.put_along_axis(d_logits, ids, np.where(PRESENT[:, None], slots, 0), axis=1)
    d["x"] += d_logits @ kernel.T
    d["gate/kernel"] = x.T @ d_logits
    return y, d


def flat(state):
    return {"/".join(map(str, path)): np.asarray(leaf) for path, leaf in nnx.to_flat_state(state)}


@nnx.jit
def step(layer, x, dy):
    graph, state = nnx.split(layer)
    y, pullback = jax.vjp(lambda state, x: nnx.merge(graph, state)(x, jnp.asarray(PRESENT)).output, state, x)
    return y, *pullback(dy)


@pytest.mark.parametrize("implementation", ["reference", "megakernel"])
def test_against_numpy(implementation):
    """By megakernel over four ranks, six experts padded to eight. Absent tokens are NaN, and so is their cotangent."""
    mesh = None
    if implementation == "megakernel":
        mesh = make_mesh(expert_parallelism=4, devices=jax.devices("cpu")[:8])
    layer, (x, dy) = make_layer(mesh, implementation=implementation), make_input()
    weights = {name: w if "gate" in name else w[:EXPERTS] for name, w in flat(nnx.state(layer)).items()}
    want_y, want = numpy_layer({name: w.astype(np.float64) for name, w in weights.items()}, x, dy)
    y, gradients, dx = step(layer, *(np.where(PRESENT[:, None], a, np.nan) for a in (x, dy)))
    got = flat(gradients) | {"x": dx}
    assert relative_l2(y, want_y) < 1e-5
    for name, gradient in want.items():
        assert relative_l2(got[name][: len(gradient)], gradient) < 1e-5, name
        assert not np.any(got[name][len(gradient) :])
    # The biases matter: without one of them it is another layer.
    for name in EACH[3:]:
        without = numpy_layer(weights | {name: np.zeros_like(weights[name])}, x, dy)[0]
        assert relative_l2(without, want_y) > 0.1


def test_bfloat16_activations_and_f32_biases():
    layer, (x, dy) = make_layer(dtype=jnp.bfloat16, implementation="megakernel"), make_input()
    want_y, want = numpy_layer(flat(nnx.state(layer)), x, dy)
    y, gradients, _ = step(layer, x, dy.astype(jnp.bfloat16))
    assert y.dtype == jnp.bfloat16 and relative_l2(y, want_y) < 2e-2
    for name in EACH:
        assert flat(gradients)[name].dtype == np.float32 and relative_l2(flat(gradients)[name], want[name]) < 2e-2


def test_program():
    """No scatter-add, which GPUs add in any order; one forward; no copy of the weights waits for the backward."""
    layer, (x, dy) = make_layer(implementation="megakernel"), make_input()
    program = step.lower(layer, x, dy).as_text()
    assert "scatter" not in program
    assert program.count("@mok_forward(") == program.count("@mok_backward(") == 1
    graph, state = nnx.split(layer)
    kept = jax.eval_shape(lambda state, x: jax.vjp(lambda s, x: nnx.merge(graph, s)(x).output, state, x)[1], state, x)
    shapes = {leaf.shape for leaf in jax.tree.leaves(kept)}
    assert {(EXPERTS, HIDDEN, INTERMEDIATE), (EXPERTS, INTERMEDIATE, HIDDEN)} < shapes
    assert not shapes & {(EXPERTS, HIDDEN + 8, INTERMEDIATE), (EXPERTS, INTERMEDIATE, HIDDEN + 8)}


def test_parameters():
    """Zeros, as in Flax, with axis names, created after all others, so that seeds keep their meaning."""
    layer, plain = (
        MoE(HIDDEN, INTERMEDIATE, EXPERTS, K, use_bias=use_bias, num_shared_experts=1, rngs=nnx.Rngs(0))
        for use_bias in (True, False)
    )
    assert layer.wi_0_bias.shape == layer.wi_1_bias.shape == (EXPERTS, INTERMEDIATE)
    assert layer.wo_bias.shape == (EXPERTS, HIDDEN)
    assert layer.wi_1_bias.get_metadata("out_sharding") == ("exp", "mlp")
    assert layer.wo_bias.get_metadata("out_sharding") == ("exp", "embed")
    with_biases, without = flat(nnx.state(layer)), flat(nnx.state(plain))
    assert {name for name in with_biases if name not in without} == set(EACH[3:])
    assert not any(with_biases[name].any() for name in EACH[3:])
    for name, value in without.items():
        np.testing.assert_array_equal(with_biases[name], value)
