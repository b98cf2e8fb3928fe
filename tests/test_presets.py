"""Published layers in the small model: each one trains."""

import jax
import numpy as np
import pytest
from flax import nnx

from models import presets
from models.config import ModelConfig
from models.options import parse_arguments
from models.step import compile_train_step, make_optimizer, make_state
from models.transformer import Transformer
from mok_jax import zoo
from mok_jax.nnx import ExpertBias
from mok_jax.sharding import make_mesh

STEPS = 50


@pytest.mark.parametrize("scan", (True, False))
@pytest.mark.parametrize("preset", ("deepseek-v3", "qwen3-30b-a3b"))
def test_biases_of_all_layers_are_moved(preset, scan):
    """Up for experts with less than the mean load, where a layer has them; by the load of a step."""
    config = ModelConfig(preset=preset, num_layers=2, scan=scan, **presets.sizes(preset, "tiny"))
    model = Transformer(config, implementation="reference", rngs=nnx.Rngs(0))
    load = np.zeros((2, config.num_experts), np.int32)
    load[0, 3], load[1, 5] = 7, 9
    model.balance(load)
    blocks = [model.blocks] if scan else model.blocks
    biases = [np.asarray(block.moe.expert_bias[...]) for block in blocks if block.moe.expert_bias is not None]
    assert len(biases) == (0 if preset.startswith("qwen") else len(blocks))
    if biases:
        np.testing.assert_array_equal(np.sign(biases).reshape(load.shape), np.where(load > 0, -1, 1))


# Of layers that differ only in sizes, a tiny one is the same.
DIFFERENT = {repr((presets.sizes(name, "tiny"), presets.rules(name, 32))): name for name in presets.PRESETS}.values()


@pytest.mark.parametrize("preset", DIFFERENT)
def test_every_layer_trains(preset):
    mesh = make_mesh(expert_parallelism=1, devices=jax.devices("cpu")[:1])
    config = ModelConfig(preset=preset, num_layers=1, **presets.sizes(preset, "tiny"))
    model = Transformer(config, mesh=mesh, implementation="reference", rngs=nnx.Rngs(0))
    graph, state = make_state(model, make_optimizer(1e-2, STEPS)[0], mesh)
    crops = jax.numpy.asarray(np.random.default_rng(0).integers(97, 105, (1, 4, 17)).astype(np.int32))
    step, losses = compile_train_step(graph, state, crops, mesh), []
    for _ in range(STEPS):
        state, metrics = step(state, crops)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.05 * losses[0]
    model, _ = nnx.merge(graph, state)
    biases = jax.tree.leaves(nnx.state(model, ExpertBias))
    assert len(biases) == bool(zoo.LAYERS[preset].selection_bias)
    assert all(np.abs(bias).max() > 0 for bias in biases)


def test_sizes_on_the_command_line():
    """A preset brings its own, unless an option says another; its rules stay."""
    tiny = parse_arguments(["--preset", "mixtral-8x7b", "--hidden-size", "128"])
    assert (tiny.hidden_size, tiny.intermediate_size, tiny.num_experts, tiny.num_experts_per_tok) == (128, 32, 8, 2)
    full = parse_arguments(["--preset", "qwen3-30b-a3b", "--scale", "full"])
    assert (full.hidden_size, full.intermediate_size, full.num_experts, full.num_experts_per_tok) == (2048, 768, 128, 8)
    assert parse_arguments([]).hidden_size == ModelConfig().hidden_size
