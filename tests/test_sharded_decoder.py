"""The decoder with explicit shardings: parts where they should be, and the losses of one device."""

import functools
import re

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding

from models import sharded_decoder as decoder

CONFIG = decoder.Config(layers=3, hidden_size=16, heads=2, intermediate_size=16)
STEPS = 3


@functools.cache
def run(devices, expert_parallelism):
    """Losses of a few steps, the parameters after them, and the compiled step's text."""
    mesh = decoder.make_mesh(expert_parallelism, jax.devices("cpu")[:devices])
    crop = np.random.default_rng(0).integers(0, 256, (8, 9)).astype(np.int32)
    with jax.set_mesh(mesh):
        parameters = decoder.init(CONFIG, jax.random.key(0), mesh)
        optimizer = optax.sgd(0.3)
        state = optimizer.init(parameters)
        crop = jax.device_put(crop, NamedSharding(mesh, decoder.BY_TOKEN))
        step = decoder.make_step(CONFIG, mesh, optimizer).lower(parameters, state, crop).compile()
        losses = []
        for _ in range(STEPS):
            parameters, state, loss = step(parameters, state, crop)
            losses.append(float(loss))
    return losses, parameters, step.as_text()


def test_losses_are_those_of_one_device():
    assert set(decoder.make_mesh(4, jax.devices("cpu")[:8]).axis_types) == {jax.sharding.AxisType.Explicit}
    losses, (layers, embedding), _ = run(8, 4)
    expected, (expected_layers, expected_embedding), _ = run(1, 1)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert losses[-1] < losses[0]
    for name, array in (layers | {"embedding": embedding}).items():
        wanted = np.asarray((expected_layers | {"embedding": expected_embedding})[name])
        assert np.linalg.norm(np.asarray(array) - wanted) < 1e-4 * np.linalg.norm(wanted), name


def test_every_device_keeps_its_part():
    """Before and after a step, of parameters and so of what an optimizer keeps of them."""
    _, (layers, _), _ = run(8, 4)
    shares = {name: array.size // array.addressable_shards[0].data.size for name, array in layers.items()}
    assert shares == {"norms": 1, "qkv": 8, "out": 8, "gate": 1, "wi_0": 8, "wi_1": 8, "wo": 8}


def test_layers_are_compiled_once_and_experts_run_once():
    """A forward and a backward of the experts, in loops: recomputation leaves them out. Weights are gathered there."""
    _, _, text = run(8, 4)
    assert [text.count(f'custom_call_target="mok_{name}"') for name in ("forward", "backward")] == [1, 1]
    assert re.search(r'all-gather[^\n]*op_name="[^"]*while', text)
