"""Mixture-of-Experts for JAX: dispatch, expert MLP and combine in one persistent kernel per direction.

Importing this package starts no backend. The layer for Flax models is in ``mok_jax.nnx`` and ``mok_jax.linen``,
meshes are in ``mok_jax.sharding``, routing functions in ``mok_jax.routing``, published layers in ``mok_jax.zoo`` and
their weights in ``mok_jax.interop``: all there as attributes of the package, each imported when it is first named.
"""

import importlib
import sys
from typing import Any

if sys.version_info < (3, 12):  # noqa: UP036 - a checkout may meet an older Python, which cannot read what follows.
    _TEXT = "mok_jax needs Python >= 3.12; this is {}.{}".format(*sys.version_info)
    # While `python -m` looks for its module, argv[0] is "-m". One line is enough there.
    raise (SystemExit if sys.argv[:1] == ["-m"] else ImportError)(_TEXT)

from mok_jax.api import moe
from mok_jax.config import MoKConfig
from mok_jax.megakernel import remat_policy
from mok_jax.native import check, register_ffi_targets
from mok_jax.stats import MoEStats
from mok_jax.work import flops

__all__ = ["MoEStats", "MoKConfig", "check", "flops", "moe", "register_ffi_targets", "remat_policy"]

_IMPORTED_WHEN_NAMED = "interop", "linen", "nnx", "routing", "sharding", "zoo"


def __getattr__(name: str) -> Any:
    if name in _IMPORTED_WHEN_NAMED:
        return importlib.import_module(f"{__name__}.{name}")
    if name == "__version__":
        return _version()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_IMPORTED_WHEN_NAMED, "__version__"})


def _version() -> str:
    from importlib import metadata  # Takes a while, and few ask.

    try:
        return metadata.version("mok-jax")
    except metadata.PackageNotFoundError:
        return "0+checkout"  # Nothing is installed; for those who compare, older than every release.
