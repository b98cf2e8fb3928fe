"""Runs one step of `mok_jax.moe` under `jax.shard_map` on virtual CPU devices, from global arrays to global arrays.

Tests compare what comes back with `oracle.forward_backward`, or two runs with each other. Every option is a way in
which a user may write the same step, so none of them may change the outcome.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from support.cases import Inputs
from support.oracle import Outputs


def run(
    inputs,
    ep,
    *,
    implementation,
    config=None,
    activation="swiglu",
    activation_limit=None,
    axis="expert",
    check_vma=True,
    grad="outside",
    replicas=1,
) -> Outputs:
    """``y`` and the gradients of ``sum(y * dy)``, as global NumPy arrays of the dtypes that the layer gives them.

    Args:
      inputs: global arrays. Tokens are padded with tokens of id -1 to what the ranks can share, and cut off again.
      ep: number of ranks that share the experts: a mesh of the first ``ep`` CPU devices.
      implementation: "megakernel", "xla" or "reference".
      config: a ``mok_jax.MoKConfig``, or None for the default.
      activation: as for ``mok_jax.moe``.
      activation_limit: likewise.
      axis: name of the mesh axis, or a pair of names for a mesh of ``2 x ep / 2``.
      check_vma: as for ``jax.shard_map``.
      grad: "outside" differentiates the ``shard_map``, "inside" each rank's own loss within it.
      replicas: number of such groups, along one more axis "data"; each has its share of the tokens and all experts.
    """
    num_tokens = len(inputs.x)
    step = compiled_step(ep, implementation, config, activation, activation_limit, axis, check_vma, grad, replicas)
    # Without this JAX would narrow float64 to float32; it is part of the key under which jit caches.
    with jax.enable_x64(inputs.x.dtype == np.float64):
        outputs = jax.device_get(step(*pad_tokens(inputs, -num_tokens % (ep * replicas))))
    return Outputs(*(a[:num_tokens] for a in outputs[:3]), *outputs[3:])


def run_stats(inputs, ep, *, implementation):
    """``MoEStats`` of all ranks: ``rows [ep]``, ``rows_per_expert [E]``, ``bad_tokens [ep]``."""
    import mok_jax

    def stats_of_rank(*arguments):
        _, stats = mok_jax.moe(*arguments, axis_name="expert", implementation=implementation, return_stats=True)
        return jax.tree.map(jnp.atleast_1d, stats)

    everything = jax.shard_map(
        stats_of_rank, mesh=make_mesh(ep, ("expert",), 1), in_specs=P("expert"), out_specs=P("expert")
    )
    return jax.device_get(jax.jit(everything)(*pad_tokens(inputs, -len(inputs.x) % ep)[:-1]))


def pad_tokens(inputs, count):
    """Adds ``count`` tokens without an expert. Their data are NaN: nobody may look at them."""

    def pad(array, value):
        return np.concatenate([array, np.full((count, array.shape[1]), value, array.dtype)])

    return inputs._replace(
        x=pad(inputs.x, np.nan),
        expert_ids=pad(inputs.expert_ids, -1),
        expert_weights=pad(inputs.expert_weights, np.nan),
        dy=pad(inputs.dy, np.nan),
    )


@functools.cache
def compiled_step(
    ep, implementation, config, activation, activation_limit, axis, check_vma, grad, replicas, devices=None
):
    """The jitted step; cached, so that tests which differ in data only do not compile again."""
    import mok_jax

    moe = functools.partial(
        mok_jax.moe,
        axis_name=axis,
        activation=activation,
        activation_limit=activation_limit,
        config=mok_jax.MoKConfig() if config is None else config,
        implementation=implementation,
    )
    axes = (axis,) if isinstance(axis, str) else axis
    tokens, experts = P(("data", *axes)), P(axes)
    inputs = Inputs(tokens, tokens, tokens, experts, experts, experts, tokens)
    outputs = Outputs(tokens, tokens, tokens, experts, experts, experts)
    shard_map = functools.partial(jax.shard_map, mesh=make_mesh(ep, axes, replicas, devices), check_vma=check_vma)
    if grad == "inside":
        return jax.jit(shard_map(_differentiated(moe), in_specs=tuple(inputs), out_specs=outputs))
    return jax.jit(_differentiated(shard_map(moe, in_specs=tuple(inputs)[:-1], out_specs=outputs.y)))


def _differentiated(moe):
    """``moe`` to a step ``(*Inputs) -> Outputs``; only the ids and the cotangent have no gradient."""

    def loss(x, expert_ids, expert_weights, wi_0, wi_1, wo, dy):
        y = moe(x, expert_ids, expert_weights, wi_0, wi_1, wo)
        wide = jnp.promote_types(y.dtype, jnp.float32)
        return jnp.sum(y.astype(wide) * dy.astype(wide)), y

    def step(*inputs):
        gradients, y = jax.grad(loss, argnums=(0, 2, 3, 4, 5), has_aux=True)(*inputs)
        return Outputs(y, *gradients)

    return step


def make_mesh(ep, axes, replicas, devices=None):
    """A mesh ``("data", *axes)`` over the first of the devices, by default CPU devices."""
    devices = devices or jax.devices("cpu")
    if len(devices) < ep * replicas:
        raise RuntimeError(f"{replicas} x {ep} ranks need as many devices, and there are {len(devices)}")
    sizes = (ep,) if len(axes) == 1 else (2, ep // 2)
    return Mesh(np.array(devices[: ep * replicas]).reshape(replicas, *sizes), ("data", *axes))
