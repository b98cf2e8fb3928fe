"""The machine's ceiling ``C``: the rate of one large square matrix product of the vendor's library."""

import jax
import jax.numpy as jnp

from benchmarks.implementations import compiled
from benchmarks.implementations.base import Program
from benchmarks.implementations.unfused import product

# What fills the device and is far beyond its caches, and yet takes milliseconds.
GPU_SIZE = 8192
CPU_SIZE = 1024
OPERAND_SETS = 2


def make_ceiling(device: jax.Device, dtype: jnp.dtype) -> tuple[Program, int]:
    """The program on one device, and its floating-point operations."""
    size = CPU_SIZE if device.platform == "cpu" else GPU_SIZE
    keys = jax.random.split(jax.random.key(3), 2 * OPERAND_SETS)
    matrices = [jax.device_put(jax.random.normal(key, (size, size), dtype), device) for key in keys]
    run = jax.jit(product).lower(*matrices[:2]).compile()
    pairs = [matrices[2 * i : 2 * i + 2] for i in range(OPERAND_SETS)]
    return Program(lambda i: run(*pairs[i % OPERAND_SETS]), compiled.wait, compiled.peak_bytes(run)), 2 * size**3
