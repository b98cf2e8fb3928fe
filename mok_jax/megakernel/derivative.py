"""``mok_jax.moe`` as the megakernel computes it: its ``custom_vjp``, and what its forward saves for its backward.

Names of residuals, for ``jax.checkpoint`` policies: ``mok_residuals`` and ``mok_output`` (see ``remat_policy``).
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from mok_jax.megakernel.buffers import BackwardOperands, ForwardOperands, residuals_of, weight_grad_dtype
from mok_jax.megakernel.call import make_call
from mok_jax.megakernel.lowering import backward, forward
from mok_jax.semantics import axis_names, group_size, vary_alike
from mok_jax.stats import MoEStats

RESIDUALS_NAME = "mok_residuals"
OUTPUT_NAME = "mok_output"


def remat_policy(*args, **params) -> bool:
    """A policy for ``jax.checkpoint`` that keeps what the layer saved, so that its forward runs once.

    Plain ``jax.checkpoint`` runs dispatch, experts and combine again in the backward; with this policy only what
    surrounds the layer is recomputed.

    Example:
      >>> block = jax.checkpoint(lambda x: x, policy=remat_policy)
    """
    return jax.checkpoint_policies.save_only_these_names(RESIDUALS_NAME, OUTPUT_NAME)(*args, **params)


def moe(x, expert_ids, expert_weights, wi_0, wi_1, wo, *, axis_name, activation, activation_limit, config):
    """As ``mok_jax.moe``, on checked arguments. Returns ``(y, MoEStats)``."""
    ranks = group_size(axis_name)
    shape = ranks, x.shape[0], expert_ids.shape[1], wi_0.shape[0]
    call = make_call(*shape, activation, activation_limit, config)
    call = dataclasses.replace(call, axes=axis_names(axis_name))
    arguments = x, expert_ids, expert_weights, wi_0, wi_1, wo
    varied = vary_alike(*arguments, axis_name=axis_name)
    y, expert_rows, bad_tokens = _moe(call, axis_name, arguments, *varied)
    return y, MoEStats(expert_rows.sum(dtype=jnp.int32), expert_rows, bad_tokens)


def coordinates(axis_name):
    """int32 ``[2]``: this rank within its expert-parallel group, and the number of the group in the mesh."""
    if axis_name is None:
        return jnp.zeros(2, jnp.int32)
    axes = axis_names(axis_name)
    others = tuple(axis for axis in jax.sharding.get_abstract_mesh().manual_axes if axis not in axes)
    group = jax.lax.axis_index(others) if others else 0
    return jnp.stack([jax.lax.axis_index(axes), group]).astype(jnp.int32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _moe(call, axis_name, kept, *arguments):
    """``arguments`` vary alike; ``kept`` are the same as they came, of which the backward's residuals are."""
    del kept
    results = forward(call, ForwardOperands.of(coordinates(axis_name), *arguments))
    return results.y, results.expert_rows, results.bad_tokens


def _moe_forward(call, axis_name, kept, *arguments):
    """The forward that saves. Residuals are the arguments as they came, and what ``call.save`` names.

    Cast to vary like the others, weights that are replicated over a data axis would no longer be the arrays that a
    scan over layers already holds, and it would keep a second copy of all.
    """
    call = dataclasses.replace(call, differentiated=True)
    results = forward(call, ForwardOperands.of(coordinates(axis_name), *arguments))
    saved = checkpoint_name(residuals_of(call, results), RESIDUALS_NAME)
    y = checkpoint_name(results.y, OUTPUT_NAME)
    return (y, results.expert_rows, results.bad_tokens), (kept, saved)


def _moe_backward(call, axis_name, residuals, cotangents):
    kept, saved = residuals
    where = coordinates(axis_name)  # no residual: it varies over axes of a shard_map around, which JAX does not lower
    dy, x, expert_ids, expert_weights, *weights = vary_alike(cotangents[0], *kept, axis_name=None)
    call = dataclasses.replace(call, differentiated=True, weight_grad_dtype=weight_grad_dtype(x, weights[0]))
    operands = ForwardOperands.of(where, x, expert_ids, expert_weights, *weights)
    dx, router_grads, *weight_grads = backward(call, BackwardOperands.of(operands, dy, saved)).gradients
    return None, dx, None, router_grads, *(d.astype(weights[0].dtype) for d in weight_grads)


_moe.defvjp(_moe_forward, _moe_backward)
