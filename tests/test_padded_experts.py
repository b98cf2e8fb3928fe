"""Experts that the ranks do not divide: padded with zeros they give the same bits, and train, on a rack of 72."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mok_jax.nnx import MoE
from mok_jax.sharding import LARGEST_DOMAIN, make_mesh, pad_experts
from support import runner
from support.cases import Case, make, zipf
from support.compare import differences

EXPERTS, HIDDEN, K = 80, 24, 3
CASE = Case("padded", 200, K, EXPERTS, HIDDEN, 40, zipf)
WEIGHTS = ("wi_0", "wi_1", "wo")


def run_padded(inputs, ep, replicas=1):
    """The megakernel's outputs with weights padded to what ``ep`` ranks share, and the gradients of the padding."""
    padded, padding = pad_experts(EXPERTS, ep)
    weights = {name: np.pad(getattr(inputs, name), ((0, padding), (0, 0), (0, 0))) for name in WEIGHTS}
    outputs = runner.run(inputs._replace(**weights), ep, replicas=replicas, implementation="megakernel")
    assert all(gradient.shape[0] == padded for gradient in outputs[3:])
    rest = [gradient[EXPERTS:] for gradient in outputs[3:]]
    return outputs._replace(**{f"d_{name}": getattr(outputs, f"d_{name}")[:EXPERTS] for name in WEIGHTS}), rest


@functools.cache
def inputs_and_outputs_of_one_rank():
    inputs = make(CASE, "float32")
    return inputs, runner.run(inputs, 1, implementation="megakernel")


@pytest.mark.parametrize(("ep", "replicas"), [(72, 1), (36, 2), (9, 8)])
def test_same_bits_as_one_rank(ep, replicas):
    """144 experts on 72 ranks, of which 32 hold nothing but padding, 108 on groups of 36, and 81 on groups of 9."""
    inputs, expected = inputs_and_outputs_of_one_rank()
    actual, rest = run_padded(inputs, ep, replicas)
    different = differences(actual, expected)
    if replicas > 1:
        # Those are sums over the groups, which is another order of adding than one rank's.
        different = {name: different[name] for name in ("y", "dx", "d_expert_weights")}
    assert not any(different.values()), f"elements that differ: {different}"
    assert not any(gradient.any() for gradient in rest)


def train(mesh):
    """Losses of a few steps of gradient descent, and the layer."""
    layer = MoE(HIDDEN, 16, EXPERTS, K, aux_loss_coeff=0.01, mesh=mesh, implementation="megakernel", rngs=nnx.Rngs(0))
    rng = np.random.default_rng(0)
    x, target = (jnp.asarray(rng.normal(size=(4, 36, HIDDEN)), jnp.float32) for _ in range(2))

    @nnx.jit
    def step(layer):
        def loss(layer):
            out = layer(x)
            return jnp.sum(jnp.square(x + out.output - target)) / x.shape[1] + out.aux_loss

        value, gradient = nnx.value_and_grad(loss)(layer)
        state = nnx.state(layer, nnx.Param)
        nnx.update(layer, jax.tree.map(lambda p, g: p - 0.05 * g, state, gradient))
        return value

    return np.array([step(layer) for _ in range(4)]), layer


def test_training_on_a_rack():
    """As one domain and as 8 groups, from the same start and along the same way."""
    devices = jax.devices("cpu")[:LARGEST_DOMAIN]
    (rack, rack_layer), (groups, groups_layer) = (
        train(make_mesh(expert_parallelism=ep, devices=devices)) for ep in (72, 9)
    )
    assert rack_layer.wi_0.shape[0] == 144 and groups_layer.wi_0.shape[0] == 81
    assert np.all(np.diff(rack) < -0.01 * rack[0])
    np.testing.assert_allclose(groups, rack, rtol=1e-5)
    for layer in rack_layer, groups_layer:
        assert not any(getattr(layer, name)[EXPERTS:].any() for name in WEIGHTS)
