"""One of several processes that run the same tests at the same time, a rank each, as `start_ranks` starts them.

Each has one GPU; they may share it. Every process makes the same inputs on its host, and compares all results.
"""

import dataclasses
import functools
import os

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mok_jax.config import MoKConfig
from support.oracle import Outputs
from support.runner import compiled_step, make_mesh, pad_tokens

RANKS = int(os.environ.get("MOK_RANKS", 1))
RANK = int(os.environ.get("MOK_RANK", 0))
SHUTDOWN_S = 60  # how long who is done waits for the others
# Multiprocessors of a GPU that are not this rank's.
RESERVED_SMS = int(os.environ.get("MOK_RESERVED_SMS", 0))


def join(meeting=0):
    """Makes this process one of them, before anything else asks JAX for devices; `meeting` counts where they meet."""
    port = os.environ["MOK_PORTS"].split(",")[meeting]
    jax.distributed.initialize(
        f"127.0.0.1:{port}", RANKS, RANK, local_device_ids=[0], shutdown_timeout_seconds=SHUTDOWN_S
    )


def own_share(config=None):
    """A `MoKConfig` that leaves the other ranks of the GPU theirs, and waits for none of them for long."""
    config = MoKConfig() if config is None else config
    reserve_sms = max(config.reserve_sms or 0, RESERVED_SMS) or None
    return dataclasses.replace(config, reserve_sms=reserve_sms, entry_timeout_s=25, timeout_s=15)


def place(array, mesh, spec):
    """A global array, of which every process has all values."""
    return jax.make_array_from_callback(array.shape, NamedSharding(mesh, spec), lambda index: array[index])


def run(inputs, ep, config=None, activation_limit=None, *, axis="expert", check_vma=True, replicas=1) -> Outputs:
    """As `runner.run`; EP 1 without replicas is this process alone, on all tokens."""
    alone = ep * replicas == 1
    devices = tuple(jax.local_devices(backend="gpu") if alone else jax.devices("gpu"))
    settings = own_share(config), "swiglu", activation_limit, axis, check_vma, "outside", replicas
    step = compiled_step(ep, "megakernel", *settings, devices)
    axes = (axis,) if isinstance(axis, str) else axis
    mesh = make_mesh(ep, axes, replicas, devices)
    tokens, experts = P(("data", *axes)), P(axes)
    specs = (tokens,) * 3 + (experts,) * 3 + (tokens,)
    padded = pad_tokens(inputs, -len(inputs.x) % (ep * replicas))
    outputs = step(*(place(array, mesh, spec) for array, spec in zip(padded, specs, strict=True)))
    outputs = jax.device_get(outputs) if alone else multihost_utils.process_allgather(outputs, tiled=True)
    return Outputs(*(np.asarray(a)[: len(inputs.x)] for a in outputs[:3]), *map(np.asarray, outputs[3:]))


@functools.cache
def mesh_of(**sizes):
    """A mesh over all ranks, axes by name."""
    return jax.sharding.Mesh(np.array(jax.devices("gpu")).reshape(tuple(sizes.values())), tuple(sizes))
