"""A small decoder-only Mixture-of-Experts transformer over bytes, in Flax NNX.

It exists to show :class:`mok_jax.nnx.MoE` inside an ordinary model: everything around the layer is plain JAX, with the
batch split over all axes of the mesh and the rest of the weights on every device.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

import mok_jax
from models import presets
from models.config import BYTE_VOCABULARY, ModelConfig
from mok_jax import routing
from mok_jax.api import Implementation
from mok_jax.config import MoKConfig
from mok_jax.nnx import MoE
from mok_jax.work import Direction, product_flops

# The axis that stacking adds to parameters has no name: no rule splits it.
_LAYERS = {nnx.PARTITION_NAME: None}


class ModelOutput(NamedTuple):
    """Attributes:
    logits: f32 ``[B, S, 256]``, for the byte after each position.
    router_loss: f32 scalar; scaled load-balancing and z losses of all layers, to be added to the loss.
    expert_load: int32 ``[layers, E]``; tokens that went to each expert.
    """

    logits: jax.Array
    router_loss: jax.Array
    expert_load: jax.Array


class Attention(nnx.Module):
    """Causal self-attention with rotary positions: ``[B, S, H] -> [B, S, H]``."""

    def __init__(self, config: ModelConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.num_heads = config.num_heads
        self.rope_base = config.rope_base
        hidden = config.hidden_size
        self.qkv = nnx.Linear(hidden, 3 * hidden, use_bias=False, dtype=dtype, rngs=rngs)
        self.out = nnx.Linear(hidden, hidden, use_bias=False, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        batch, length, hidden = x.shape
        heads = (batch, length, self.num_heads, hidden // self.num_heads)
        q, k, v = (part.reshape(heads) for part in jnp.split(self.qkv(x), 3, axis=-1))
        q, k = rotate(q, self.rope_base), rotate(k, self.rope_base)
        return self.out(jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape))


class Block(nnx.Module):
    """Attention, then experts, each behind a norm and added to the stream."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: DTypeLike,
        mesh: Mesh | None,
        implementation: Implementation | None,
        kernel: MoKConfig | None = None,
        rngs: nnx.Rngs,
    ):
        self.attention_norm = nnx.RMSNorm(config.hidden_size, dtype=dtype, rngs=rngs)
        self.attention = Attention(config, dtype=dtype, rngs=rngs)
        self.moe_norm = nnx.RMSNorm(config.hidden_size, dtype=dtype, rngs=rngs)
        if config.preset:
            rules = presets.rules(config.preset, config.intermediate_size)
        else:
            rules = {"score_function": config.score_function}
        self.moe = MoE(
            config.hidden_size,
            config.intermediate_size,
            config.num_experts,
            config.num_experts_per_tok,
            **rules,
            aux_loss_coeff=config.aux_loss_coeff,
            z_loss_coeff=config.z_loss_coeff,
            dtype=dtype,
            mesh=mesh,
            implementation=implementation,
            config=kernel,
            rngs=rngs,
        )

    def __call__(self, x: jax.Array, *, with_experts: bool):
        x = x + self.attention(self.attention_norm(x))
        moe = self.moe(self.moe_norm(x))
        return (x + moe.output if with_experts else x), moe


def stack_blocks(blocks: Sequence[Block]) -> Block:
    """One block for ``nnx.scan``: every parameter along a new first axis, split over devices as those of a block are.

    Example:
      >>> options = {"dtype": jnp.float32, "mesh": None, "implementation": "reference"}
      >>> blocks = [Block(ModelConfig(), **options, rngs=nnx.Rngs(seed)) for seed in range(3)]
      >>> stack_blocks(blocks).moe.wi_0.shape
      (3, 8, 128, 128)
    """
    graph, _ = nnx.split(blocks[0])
    state = jax.tree.map(lambda *layers: jnp.stack(layers), *(nnx.state(block) for block in blocks))
    return nnx.merge(graph, nnx.spmd.add_axis(state, 0, _LAYERS))


class Transformer(nnx.Module):
    """The language model.

    Example:
      >>> model = Transformer(ModelConfig(num_layers=1), implementation="reference", rngs=nnx.Rngs(0))
      >>> model(jnp.zeros((2, 16), jnp.int32)).logits.shape
      (2, 16, 256)
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: DTypeLike = jnp.float32,
        mesh: Mesh | None = None,
        implementation: Implementation | None = None,
        kernel: MoKConfig | None = None,
        rngs: nnx.Rngs,
    ):
        """Makes the model; parameters are f32.

        Args:
          config: its shape.
          dtype: of the activations, bf16 or f32.
          mesh: the devices; batches are split over all its axes, experts over ``expert``. ``None`` for one device.
          implementation: of the expert step, see :func:`mok_jax.moe`.
          kernel: how that is run, likewise.
          rngs: the key for the parameters.
        """
        self.mesh, self.num_layers = mesh, config.num_layers
        self.tie_embeddings, self.remat, self.scan = config.tie_embeddings, config.remat, config.scan
        self.embedding = nnx.Embed(BYTE_VOCABULARY, config.hidden_size, dtype=dtype, rngs=rngs)
        blocks = [
            Block(config, dtype=dtype, mesh=mesh, implementation=implementation, kernel=kernel, rngs=rngs)
            for _ in range(config.num_layers)
        ]
        self.blocks: Any = stack_blocks(blocks) if config.scan else nnx.List(blocks)
        self.norm = nnx.RMSNorm(config.hidden_size, dtype=dtype, rngs=rngs)
        if not config.tie_embeddings:
            self.head = nnx.Linear(config.hidden_size, BYTE_VOCABULARY, use_bias=False, dtype=dtype, rngs=rngs)

    def __call__(self, tokens: jax.Array, *, with_experts: bool = True) -> ModelOutput:
        """Predicts the next byte at every position.

        Args:
          tokens: int32 ``[B, S]``, bytes. With a mesh ``B`` is a multiple of its size.
          with_experts: ``False`` leaves the experts' output out of the stream: what is lost then is what they learned.

        Returns:
          A :class:`ModelOutput`.
        """
        x = self._over_mesh(self.embedding(tokens))
        x, (router_losses, loads) = self._apply_blocks(x, with_experts=with_experts)
        x = self.norm(x)
        logits = self.embedding.attend(x) if self.tie_embeddings else self.head(x)
        return ModelOutput(logits.astype(jnp.float32), router_losses.sum(), loads)

    def flops(self, batch: int, length: int) -> int:
        """Floating-point operations of all products of a training step on ``[batch, length]`` bytes; of attention those
        that causality leaves.
        """
        tokens = batch * length
        direction: Direction = "forward+backward"
        hidden = self.embedding.features
        block = self.blocks if self.scan else self.blocks[0]
        of_block = (
            block.moe.settings.flops(tokens, direction)
            + product_flops(tokens, hidden, 4 * hidden, direction)
            + product_flops(tokens, hidden, length, direction)  # twice, over half of the positions
        )
        return self.num_layers * of_block + product_flops(tokens, hidden, BYTE_VOCABULARY, direction)

    def balance(self, expert_load: jax.Array) -> None:
        """Moves the biases that steer routers' choices, where there are any, by a step's load int32 ``[layers, E]``."""
        of_blocks = [(self.blocks, expert_load)] if self.scan else zip(self.blocks, expert_load, strict=True)
        for moe, load in ((block.moe, load) for block, load in of_blocks):
            if moe.expert_bias is not None:
                update = functools.partial(routing.expert_bias_update, rate=moe.settings.expert_bias_update_rate)
                moe.expert_bias[...] += jnp.vectorize(update, signature="(e)->(e)")(load)

    def _apply_blocks(self, x: jax.Array, *, with_experts: bool) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """The stream after all blocks; their losses, f32 ``[layers]``, and loads, int32 ``[layers, E]``."""

        def apply(x, block):
            x, moe = block(x, with_experts=with_experts)
            return self._over_mesh(x), (moe.aux_loss + moe.z_loss, moe.expert_load)

        if self.remat:
            # A scan has no need of the barriers that keep XLA from merging what is recomputed with the forward.
            apply = nnx.remat(apply, policy=mok_jax.remat_policy, prevent_cse=not self.scan)
        if self.scan:
            return nnx.scan(apply, transform_metadata=_LAYERS)(x, self.blocks)
        of_layers = []
        for block in self.blocks:
            x, of_layer = apply(x, block)
            of_layers.append(of_layer)
        return x, jax.tree.map(lambda *layers: jnp.stack(layers), *of_layers)

    def _over_mesh(self, x: jax.Array) -> jax.Array:
        # Said here, not left to the partitioner: attention has no need of the expert axis, and without this hint
        # it may well compute every sequence once for each rank of it.
        if self.mesh is None:
            return x
        return jax.lax.with_sharding_constraint(x, batch_sharding(self.mesh))


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """The leading dimension split over all axes of ``mesh``."""
    return NamedSharding(mesh, P(mesh.axis_names))


def rotate(x: jax.Array, base: float) -> jax.Array:
    """Rotary positions (Su et al. 2021): turns pairs of ``x [B, S, heads, D]`` by angles that grow along ``S``."""
    length, half = x.shape[1], x.shape[-1] // 2
    angles = jnp.arange(length, dtype=jnp.float32)[:, None] * base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    cos, sin = jnp.cos(angles)[:, None, :], jnp.sin(angles)[:, None, :]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
