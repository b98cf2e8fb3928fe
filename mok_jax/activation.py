"""What an expert does between its products: the activations by name, and the clamp that may come before them."""

from typing import Literal, get_args

import jax
import jax.numpy as jnp

Activation = Literal["swiglu", "gpt_oss"]
ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)


def swiglu(gate, up):
    """``silu(gate) * up`` (Shazeer 2020, "GLU Variants Improve Transformer")."""
    return jax.nn.silu(gate) * up


def gpt_oss(gate, up):
    """``gate * sigmoid(1.702 * gate) * (up + 1)``, of OpenAI's gpt-oss (``swiglu`` in its ``gpt_oss/torch/model.py``).

    That model clamps at 7. In its checkpoints the columns of gate and up alternate.
    """
    return gate * jax.nn.sigmoid(1.702 * gate) * (up + 1)


def activate(activation, gate, up, limit):
    """The hidden activations, clamped first unless ``limit`` is None.

    The gate is clamped from above, up from both sides: no gradient where it clamps; NaN passes through.
    """
    if limit is not None:
        limit = jnp.asarray(limit, gate.dtype)
        gate = jnp.where(gate > limit, limit, gate)
        up = jnp.where(up > limit, limit, jnp.where(up < -limit, -limit, up))
    return {"swiglu": swiglu, "gpt_oss": gpt_oss}[activation](gate, up)
