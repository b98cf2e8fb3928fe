"""A decoder as large training codes write it, around the layer: plain JAX with explicit shardings, no module system.

The mesh has two axes. Tokens are split over both. Experts are split over ``expert``, each of their matrices over
``fsdp``; all other parameters over both. What is split over ``fsdp`` is made whole where it is used, one layer at a
time (ZeRO-3), and its gradient is summed into the same parts. A scan runs over the layers, so that one is compiled,
and recomputes them in the backward: all but the experts.

Run ``python -m models.sharded_decoder`` on any number of devices; `tests/test_sharded_decoder.py` compares with one.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import mok_jax
from models import data
from mok_jax.layer import Settings, Weights
from mok_jax.layer import forward as moe_layer

MESH_AXES = FSDP, EXPERT = "fsdp", "expert"
VOCABULARY = 256
BATCH_SIZE, LENGTH, LEARNING_RATE = 32, 64, 3e-3

Parameters = dict[str, jax.Array]
BY_TOKEN = P(MESH_AXES)

# Of each layer's arrays, which have a dimension of layers in front: where they are kept, and where they are used.
KEPT = {
    "norms": P(),
    "qkv": P(None, MESH_AXES),
    "out": P(None, MESH_AXES),
    "gate": P(),
    "wi_0": P(None, EXPERT, FSDP),
    "wi_1": P(None, EXPERT, FSDP),
    "wo": P(None, EXPERT, FSDP),
}
EXPERTS = ("wi_0", "wi_1", "wo")


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes. ``hidden_size`` is a multiple of ``heads`` and of the number of devices, ``experts`` of those that share
    them, and ``intermediate_size`` of the others.
    """

    layers: int = 4
    hidden_size: int = 128
    heads: int = 4
    intermediate_size: int = 64
    experts: int = 8
    experts_per_token: int = 2
    aux_loss_coeff: float = 0.01

    def settings(self, mesh: Mesh) -> Settings:
        """Of the layer of each block."""
        return Settings(
            self.hidden_size,
            self.intermediate_size,
            self.experts,
            self.experts_per_token,
            aux_loss_coeff=self.aux_loss_coeff,
            mesh=mesh,
        )


def make_mesh(expert_parallelism: int, devices: list[jax.Device] | None = None) -> Mesh:
    """All devices, with explicit axes: every array's type says how it is split, and what does not fit is an error."""
    devices = jax.devices() if devices is None else devices
    shape = len(devices) // expert_parallelism, expert_parallelism
    return jax.make_mesh(shape, MESH_AXES, axis_types=(AxisType.Explicit,) * 2, devices=devices)


def init(config: Config, key: jax.Array, mesh: Mesh) -> tuple[Parameters, jax.Array]:
    """All layers' arrays ``[layers, ...]``, f32, and the embedding ``[256, H]``; made in parts, never whole."""
    layers, hidden, inner, experts = config.layers, config.hidden_size, config.intermediate_size, config.experts
    shapes = {
        "norms": (layers, 2, hidden),
        "qkv": (layers, hidden, 3 * hidden),
        "out": (layers, hidden, hidden),
        "gate": (layers, hidden, experts),
        "wi_0": (layers, experts, hidden, inner),
        "wi_1": (layers, experts, hidden, inner),
        "wo": (layers, experts, inner, hidden),
    }
    shardings = {name: NamedSharding(mesh, KEPT[name]) for name in shapes}

    @functools.partial(jax.jit, out_shardings=(shardings, NamedSharding(mesh, P())))
    def make(key):
        def normal(key, shape):
            return jax.random.normal(key, shape, out_sharding=P()) * shape[-2] ** -0.5

        keys = dict(zip(shapes, jax.random.split(key, len(shapes)), strict=True))
        arrays = {name: normal(keys[name], shape) for name, shape in shapes.items()}
        return arrays | {"norms": jnp.ones(shapes["norms"])}, 0.02 * normal(key, (VOCABULARY, hidden))

    return make(key)


def used(name: str, array: jax.Array) -> jax.Array:
    """One layer's array as it is used: experts on the devices that have them, all else on every device."""
    return jax.sharding.reshard(array, P(EXPERT) if name in EXPERTS else P())


def block(config: Config, settings: Settings, x: jax.Array, kept: Parameters) -> tuple[jax.Array, jax.Array]:
    """One layer on the stream ``[B, S, H]``; returns it, and the loss that balances the experts."""
    layer = {name: used(name, array) for name, array in kept.items()}
    x += attention(config, normalise(x, layer["norms"][0]), layer["qkv"], layer["out"])
    weights = Weights(**{name: layer[name] for name in ("gate", *EXPERTS)})
    experts = moe_layer(settings, weights, normalise(x, layer["norms"][1]))
    return x + experts.output, experts.aux_loss


def attention(config: Config, x: jax.Array, qkv: jax.Array, out: jax.Array) -> jax.Array:
    """Causal self-attention ``[B, S, H] -> [B, S, H]``."""
    batch, length, hidden = x.shape
    heads = (batch, length, config.heads, hidden // config.heads)
    q, k, v = (part.reshape(heads) for part in jnp.split(x @ qkv, 3, axis=-1))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(heads[-1])
    scores = jnp.where(jnp.tri(length, dtype=bool), scores, -jnp.inf)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v).reshape(x.shape) @ out


def normalise(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Root mean square norm."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale


def loss_of(config: Config, mesh: Mesh, parameters: tuple[Parameters, jax.Array], crop: jax.Array) -> jax.Array:
    """Cross-entropy in nats per byte of the next byte, ``crop`` int32 ``[B, S + 1]``, and the balancing loss."""
    layers, embedding = parameters
    one_layer = functools.partial(block, config, config.settings(mesh))
    # A scan has no need of the barriers that keep XLA from merging what is recomputed with the forward.
    step = jax.checkpoint(one_layer, policy=mok_jax.remat_policy, prevent_cse=False)
    x = embedding.at[crop[:, :-1]].get(out_sharding=BY_TOKEN)
    x, aux_losses = jax.lax.scan(step, x, layers)
    logits = x @ embedding.T
    return optax.softmax_cross_entropy_with_integer_labels(logits, crop[:, 1:]).mean() + aux_losses.sum()


def make_step(config: Config, mesh: Mesh, optimizer: optax.GradientTransformation) -> Any:
    """Jits ``(parameters, optimizer's state, crop) -> the same, and the loss``; what is given is donated."""

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(parameters, state, crop):
        loss, gradients = jax.value_and_grad(functools.partial(loss_of, config, mesh))(parameters, crop)
        updates, state = optimizer.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state, loss

    return step


def train(config: Config, mesh: Mesh, steps: int) -> Iterator[float]:
    """Yields each step's loss, in nats per byte."""
    with jax.set_mesh(mesh):
        parameters = init(config, jax.random.key(0), mesh)
        optimizer = optax.adamw(LEARNING_RATE)
        state, step = optimizer.init(parameters), make_step(config, mesh, optimizer)
        crops = data.random_crops(data.load_corpus().train, BATCH_SIZE, LENGTH + 1, seed=0)
        for _, crop in zip(range(steps), crops, strict=False):
            parameters, state, loss = step(parameters, state, jax.device_put(crop, NamedSharding(mesh, BY_TOKEN)))
            yield float(loss)


if __name__ == "__main__":
    if jax.config.jax_num_cpu_devices < 1:
        jax.config.update("jax_num_cpu_devices", 8)
    for number, value in enumerate(train(Config(), make_mesh(math.gcd(4, len(jax.devices()))), 50)):
        if number % 10 == 0:
            print(f"step {number:4d}  loss {value:.3f}", flush=True)
