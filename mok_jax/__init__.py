"""Mixture-of-Experts for JAX: dispatch, expert MLP and combine in one persistent kernel per direction.

Importing this package starts no backend. The layer for Flax models is in ``mok_jax.nnx`` and ``mok_jax.linen``,
meshes are in ``mok_jax.sharding``, routing functions in ``mok_jax.routing``.
"""

from mok_jax.api import moe
from mok_jax.config import MoKConfig
from mok_jax.megakernel import remat_policy
from mok_jax.native import check, register_ffi_targets
from mok_jax.stats import MoEStats
from mok_jax.work import flops

__all__ = ["MoEStats", "MoKConfig", "check", "flops", "moe", "register_ffi_targets", "remat_policy"]
