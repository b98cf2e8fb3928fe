"""The Mixture-of-Experts layer as a function of arrays: router, losses, sharding and :func:`mok_jax.moe`.

What :mod:`mok_jax.nnx` and :mod:`mok_jax.linen` share, and all that they do apart from holding parameters:
:class:`Settings` says what a layer is and which parameters it has, :func:`forward` computes it on global arrays. The
``shard_map`` that the expert step needs is inside.
"""

from mok_jax.layer.compute import MoEOutput, Weights, forward
from mok_jax.layer.settings import GATE_BIAS, GATES, Parameter, Settings

__all__ = ["GATES", "GATE_BIAS", "MoEOutput", "Parameter", "Settings", "Weights", "forward"]
