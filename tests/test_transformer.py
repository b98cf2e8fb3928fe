"""The demonstration model: what rematerialisation and the scan over layers change, and what they must not."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from models.config import ModelConfig
from models.evaluation import parameters_sha256
from models.step import compile_train_step, make_optimizer, make_state
from models.transformer import Transformer, batch_sharding
from mok_jax.sharding import make_mesh
from support.compare import relative_l2

LAYERS, STEPS = 2, 4
EXPERT_PARALLELISM = 4
F32_TOLERANCE = 1e-5
CONFIG = ModelConfig(num_layers=LAYERS, hidden_size=16, num_heads=2, intermediate_size=8)
VARIANTS = list(itertools.product((False, True), repeat=2))


def make_test_mesh():
    return make_mesh(expert_parallelism=EXPERT_PARALLELISM, devices=jax.devices("cpu")[:8])


def make_model(remat, scan, mesh=None, seed=0):
    config = dataclasses.replace(CONFIG, remat=remat, scan=scan)
    return Transformer(config, mesh=mesh, implementation="megakernel", rngs=nnx.Rngs(seed))


def stacked_parameters(model):
    """By name, a layer's parameters along a first axis, whether the model has them so or not."""
    state = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    if not model.scan:
        layers = state["blocks"].values()
        state["blocks"] = jax.tree.map(lambda *layers: np.stack(layers), *layers)
    return jax.tree.map(np.asarray, state)


class Trained:
    """A few steps of training: before, on the way and after."""

    def __init__(self, remat, scan):
        mesh = make_test_mesh()
        model = make_model(remat, scan, mesh)
        self.initial = stacked_parameters(model)
        crop = np.random.default_rng(0).integers(0, 256, (8, 33)).astype(np.int32)
        crop = jax.device_put(crop, batch_sharding(mesh))
        # Not Adam, which makes much of the rounding of gradients near 0.
        graph, state = make_state(model, optax.sgd(0.3), mesh)
        crops = crop[None]
        self.step = compile_train_step(graph, state, crops, mesh)
        self.metrics = []
        for _ in range(STEPS):
            state, metrics = self.step(state, crops)
            self.metrics.append(jax.tree.map(np.asarray, metrics))
        self.model, _ = nnx.merge(graph, state)

    def count_calls(self):
        """Forward and backward calls in the compiled step; a loop's body counts once."""
        text = self.step.as_text()
        return tuple(text.count(f'custom_call_target="mok_{name}"') for name in ("forward", "backward"))


@pytest.fixture(scope="module")
def trained():
    return {variant: Trained(*variant) for variant in VARIANTS}


@pytest.mark.parametrize("variant", VARIANTS[1:])
def test_neither_changes_what_is_computed(trained, variant):
    plain, actual = trained[False, False], trained[variant]
    jax.tree.map(np.testing.assert_array_equal, actual.initial, plain.initial)
    for step, expected in zip(actual.metrics, plain.metrics, strict=True):
        np.testing.assert_array_equal(step["expert_load"], expected["expert_load"])
        np.testing.assert_allclose(step["loss"], expected["loss"], rtol=F32_TOLERANCE)
        np.testing.assert_allclose(step["router_loss"], expected["router_loss"], rtol=F32_TOLERANCE)
    errors = jax.tree.map(relative_l2, stacked_parameters(actual.model), stacked_parameters(plain.model))
    assert max(jax.tree.leaves(errors)) < F32_TOLERANCE, errors


def test_every_layer_trains_alike(trained):
    """What the comparison above compares has moved, all of it."""
    one = trained[True, True]
    moved = jax.tree.map(relative_l2, stacked_parameters(one.model), one.initial)
    assert min(jax.tree.leaves(moved)) > 100 * F32_TOLERANCE, moved
    assert one.metrics[0]["loss"] > one.metrics[-1]["loss"]


@pytest.mark.parametrize("scan", (False, True))
def test_remat_keeps_the_experts_and_recomputes_the_rest(trained, scan):
    """The expert step runs once forward and once backward whatever is recomputed; in a scan one block is compiled."""
    plain, remat = trained[False, scan], trained[True, scan]
    assert plain.count_calls() == remat.count_calls() == ((1, 1) if scan else (LAYERS, LAYERS))
    plain, remat = (one.step.memory_analysis().temp_size_in_bytes for one in (plain, remat))
    assert remat < plain


def test_stacked_experts_stay_split(trained):
    """Made under jit or, before training, outside; inside a step no device has a whole layer's."""
    mesh = make_test_mesh()
    jitted, after = nnx.jit(lambda: make_model(True, True, mesh))(), trained[True, True]
    hidden, width, experts = CONFIG.hidden_size, CONFIG.intermediate_size, CONFIG.num_experts
    text = after.step.as_text()
    for name, matrix in {"wi_0": (hidden, width), "wi_1": (hidden, width), "wo": (width, hidden)}.items():
        of_rank = (LAYERS, experts // EXPERT_PARALLELISM, *matrix)
        for model in jitted, after.model:
            parameter = getattr(model.blocks.moe, name)[...]
            assert parameter.shape == (LAYERS, experts, *matrix)
            assert parameter.sharding.shard_shape(parameter.shape) == of_rank
        assert "f32[{},{},{},{}]".format(*of_rank) in text
        assert "f32[{},{},{},{}]".format(LAYERS, experts, *matrix) not in text


def test_all_but_norms_decay():
    """Without gradients nothing else moves a parameter; a stacked scale looks like a matrix."""
    optimizer, _ = make_optimizer(1e-2, STEPS)
    parameters = nnx.state(make_model(False, True), nnx.Param)
    state, zeros = optimizer.init(parameters), jax.tree.map(jnp.zeros_like, parameters)
    for _ in range(2):  # The first step of the warm-up has a rate of 0.
        updates, state = jax.jit(optimizer.update)(zeros, state, parameters)
    moved = {path: bool(jnp.any(update[...] != 0)) for path, update in nnx.to_flat_state(updates)}
    assert moved == {path: path[-1] != "scale" for path in moved}


def test_the_digest_is_of_every_parameter():
    def digest(model):
        return parameters_sha256(*nnx.split((model, None)))

    first = digest(make_model(False, True))
    assert digest(make_model(False, True)) == first
    others = {digest(make_model(False, True, seed=1))}
    for path, parameter in nnx.to_flat_state(nnx.state(make_model(False, True), nnx.Param)):
        model = make_model(False, True)
        last = (-1,) * parameter.ndim
        nudged = parameter[...].at[last].set(jnp.nextafter(parameter[last], jnp.inf))
        nnx.update(model, nnx.from_flat_state([(path, parameter.replace(nudged))]))
        others.add(digest(model))
    assert first not in others and len(others) == 12


@pytest.mark.parametrize("scan", (True, False))
def test_work_of_a_step(scan):
    """Products of [rows, width] @ [width, columns], three times: for the forward and twice for the backward."""
    config = ModelConfig(num_layers=3, hidden_size=8, num_heads=2, intermediate_size=5, num_experts=4, scan=scan)
    model = Transformer(config, implementation="reference", rngs=nnx.Rngs(0))
    tokens, length, h, i, e, k = 12, 6, 8, 5, 4, 2
    attention = h * 3 * h + h * h + 2 * h * length / 2
    experts = h * e + k * 3 * h * i
    assert model.flops(2, length) == 3 * 2 * tokens * (3 * (attention + experts) + h * 256)
