"""Runs one step of the megakernel with several virtual ranks on one GPU: real protocol, entry flags included, and the
numerics of expert parallelism, without a second device. From global arrays to global arrays, like `runner`.

Each kernel is launched once for all ranks, whose arrays lie one after the other: the global arrays as they are.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from mok_jax import megakernel
from mok_jax.config import MoKConfig
from mok_jax.stats import MoEStats
from support.oracle import Outputs
from support.runner import pad_tokens


def run(inputs, ep, config=None, activation_limit=None) -> Outputs:
    """``y`` and the gradients of ``sum(y * dy)``, as global NumPy arrays of the dtypes that the layer gives them."""
    return run_with_stats(inputs, ep, config, activation_limit)[0]


def run_with_stats(inputs, ep, config=None, activation_limit=None) -> tuple[Outputs, MoEStats]:
    """The same, and ``MoEStats`` of all ranks: ``rows [ep]``, ``rows_per_expert [E]``, ``bad_tokens [ep]``."""
    num_tokens = len(inputs.x)
    padded = pad_tokens(inputs, -num_tokens % ep)
    call = megakernel.make_call(
        ep,
        len(padded.x) // ep,
        inputs.expert_ids.shape[1],
        len(inputs.wi_0) // ep,
        "swiglu",  # all that there is on GPUs
        activation_limit,
        MoKConfig() if config is None else config,
    )
    call = dataclasses.replace(call, virtual_ranks=ep, differentiated=True)
    with jax.default_device(jax.devices("gpu")[0]):
        outputs, rows, bad = jax.device_get(_step(*padded, call=call))
    stats = MoEStats(rows.reshape(ep, -1).sum(axis=1), rows, np.reshape(bad, ep))
    return Outputs(*(a[:num_tokens] for a in outputs[:3]), *outputs[3:]), stats


@functools.partial(jax.jit, static_argnames="call")
def _step(x, expert_ids, expert_weights, wi_0, wi_1, wo, dy, *, call):
    where = jnp.zeros(2, jnp.int32)
    operands = megakernel.ForwardOperands.of(where, x, expert_ids, expert_weights, wi_0, wi_1, wo)
    results = megakernel.forward(call, operands)
    saved = megakernel.residuals_of(call, results)
    call = dataclasses.replace(call, weight_grad_dtype=megakernel.weight_grad_dtype(x, wi_0))
    gradients = megakernel.backward(call, megakernel.BackwardOperands.of(operands, dy, saved)).gradients
    return Outputs(results.y, *gradients), results.expert_rows, results.bad_tokens
