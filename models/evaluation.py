"""What a trained model does: its loss on held-out text, with and without its experts, text that it writes, its bits."""

import hashlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from models.step import next_byte_loss

_SAMPLE_TEMPERATURE = 0.7

# (state, crops int32 [B, S + 1]) -> mean loss in nats per byte.
Evaluation = Callable[[nnx.State, list[jax.Array]], float]


def make_evaluation(graph: nnx.GraphDef, *, with_experts: bool) -> Evaluation:
    """The mean loss over crops, with or without what the experts add; compiled when it is first called."""

    @jax.jit
    def loss(state, crop):
        model, _ = nnx.merge(graph, state)
        return next_byte_loss(model(crop[:, :-1], with_experts=with_experts).logits, crop[:, 1:])

    return lambda state, crops: float(np.mean([float(loss(state, crop)) for crop in crops]))


def generate(
    graph: nnx.GraphDef, state: nnx.State, prompt: bytes, length: int, window: int, mesh: Mesh, seed: int
) -> bytes:
    """Continues ``prompt`` by ``length`` bytes and returns the new ones; the model sees the last ``window`` bytes."""

    @jax.jit
    def next_byte(state, tokens, last, key):
        model, _ = nnx.merge(graph, state)
        # As many equal rows as devices, because every batch is split over all of them.
        logits = model(jnp.broadcast_to(tokens, (mesh.size, window))).logits[0, last]
        return jax.random.categorical(jax.random.wrap_key_data(key), logits / _SAMPLE_TEMPERATURE)

    keys = np.asarray(jax.random.key_data(jax.random.split(jax.random.key(seed), length)))
    text = list(prompt)
    for key in keys:
        recent = text[-window:]
        # What follows the last byte is never seen by it: attention is causal, and no expert has a capacity to use up.
        tokens = np.array(recent + [0] * (window - len(recent)), np.int32)
        text.append(int(next_byte(state, tokens, len(recent) - 1, key)))
    return bytes(text[len(prompt) :])


def parameters_sha256(graph: nnx.GraphDef, state: nnx.State) -> str:
    """Digest of all parameters' bytes, in the order of their names: two runs compared to the bit."""
    model, _ = nnx.merge(graph, state)
    digest = hashlib.sha256()
    for parameter in jax.tree.leaves(nnx.state(model, nnx.Param)):
        digest.update(on_host(parameter).tobytes())
    return digest.hexdigest()


def on_host(array: jax.Array) -> np.ndarray:
    """All of an array, of which other processes may have a part."""
    if array.is_fully_addressable:
        return np.asarray(array)
    return multihost_utils.process_allgather(array, tiled=True)
