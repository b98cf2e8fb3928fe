"""A small Mixture-of-Experts language model over bytes in Flax Linen, its experts written out.

``models/flax_moe.py`` writes out its experts in plain JAX, ``models/flax_moe_with_mok_jax.py`` has our layer in their
place. All that this changes in a model is what `diff` says of the two files. Both are trained by `python -m`.
"""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.training.train_state import TrainState

from models import data, losses

LENGTH, BATCH_SIZE = 64, 16  # bytes in a sequence, sequences in a step
AUX_LOSS_COEFF = 0.01


class Experts(nn.Module):
    """SwiGLU experts, of which every token has its own few: ``[B, S, H] -> [B, S, H]`` and a load-balancing loss."""

    num_experts: int = 8
    num_experts_per_tok: int = 2
    width: int = 128

    @nn.compact
    def __call__(self, x):
        probs = nn.softmax(nn.Dense(self.num_experts, use_bias=False, name="gate")(x))
        weights, ids = jax.lax.top_k(probs, self.num_experts_per_tok)
        chosen = jax.nn.one_hot(ids, self.num_experts)  # [B, S, K, E]
        combine = jnp.einsum("bsk,bske->bse", weights / weights.sum(-1, keepdims=True), chosen)
        aux_loss = self.num_experts * jnp.sum(chosen.mean((0, 1, 2)) * probs.mean((0, 1)))

        init, wide = nn.initializers.lecun_normal(batch_axis=0), (self.num_experts, x.shape[-1], self.width)
        wi_0, wi_1 = self.param("wi_0", init, wide), self.param("wi_1", init, wide)
        wo = self.param("wo", init, (self.num_experts, self.width, x.shape[-1]))
        hidden = nn.silu(jnp.einsum("bsh,ehi->bsei", x, wi_0)) * jnp.einsum("bsh,ehi->bsei", x, wi_1)
        return jnp.einsum("bse,bsei,eih->bsh", combine, hidden, wo), aux_loss


class Block(nn.Module):
    """Causal attention, then experts, each behind a norm and added to the stream."""

    @nn.compact
    def __call__(self, x):
        attention = nn.MultiHeadDotProductAttention(num_heads=4, use_bias=False)
        x = x + attention(nn.RMSNorm()(x), mask=nn.make_causal_mask(x[..., 0]))
        output, aux_loss = Experts()(nn.RMSNorm()(x))
        return x + output, aux_loss


class LanguageModel(nn.Module):
    """Predicts the next byte: ``int32 [B, S] -> f32 [B, S, 256]`` and the load-balancing loss, a mean over blocks.

    Example:
      >>> tokens = jnp.zeros((2, 16), jnp.int32)
      >>> logits, aux_loss = LanguageModel().init_with_output(jax.random.key(0), tokens)[0]
      >>> logits.shape
      (2, 16, 256)
    """

    num_blocks: int = 2
    hidden_size: int = 64

    @nn.compact
    def __call__(self, tokens):
        positions = nn.Embed(LENGTH, self.hidden_size)(jnp.arange(tokens.shape[1]))
        x, aux_losses = nn.Embed(256, self.hidden_size)(tokens) + positions, []
        for _ in range(self.num_blocks):
            x, aux_loss = Block()(x)
            aux_losses.append(aux_loss)
        return nn.Dense(256)(nn.RMSNorm()(x)), jnp.stack(aux_losses).mean()


@jax.jit
def train_step(state: TrainState, crop: jax.Array) -> tuple[TrainState, jax.Array]:
    """One step on ``int32 [B, S + 1]``: the next state, and the cross-entropy in nats per byte before it."""

    def loss_function(params):
        logits, aux_loss = state.apply_fn({"params": params}, crop[:, :-1])
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, crop[:, 1:]).mean()
        return loss + AUX_LOSS_COEFF * aux_loss, loss

    gradients, loss = jax.grad(loss_function, has_aux=True)(state.params)
    return state.apply_gradients(grads=gradients), loss


def train(steps: int) -> Iterator[float]:
    """Trains on the Python standard library's sources; yields the loss of each step."""
    crops = data.random_crops(data.load_corpus().train, BATCH_SIZE, LENGTH + 1, seed=0)
    model = LanguageModel()
    params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((BATCH_SIZE, LENGTH), jnp.int32))["params"]
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(3e-3))
    for _ in range(steps):
        state, loss = train_step(state, next(crops))
        yield float(loss)


if __name__ == "__main__":
    losses.main(__spec__.name, __doc__, train)
