"""The compiled extension: found when first needed, so that the other implementations work where it was not built."""

import functools
import threading
from types import ModuleType

import jax
import jax.ffi

_registration = threading.Lock()


@functools.cache
def library() -> ModuleType:
    """The extension module.

    Raises:
      ImportError: it was not built; the text says how to build it.
    """
    try:
        from mok_jax import _native  # type: ignore[attr-defined]
    except ImportError as error:
        raise ImportError(
            'implementation="megakernel" needs the compiled extension mok_jax._native, which cannot be imported '
            f"({error}). Build it with `make build` or `pip install .`; "
            'or use implementation="xla", which needs none'
        ) from error
    return _native


def missing() -> ImportError | None:
    """Why there is no extension; ``None``: there is one."""
    try:
        library()
    except ImportError as error:
        return error
    return None


def register_ffi_targets() -> None:
    """Makes programs runnable that another process has exported; starts the backend.

    Lowering ``mok_jax.moe`` does the same, so that only a process that never does has to call this: one that gets its
    program from ``jax.export.deserialize``. The exporting process lists the two targets as safe::

        safe = [jax.export.DisabledSafetyCheck.custom_call(name) for name in ("mok_forward", "mok_backward")]
        jax.export.export(jitted, disabled_checks=safe)

    Example:
      >>> register_ffi_targets()
    """
    jax.devices("cpu")
    register_cpu_targets()
    register_cuda_targets()


def has_cuda() -> bool:
    """Whether the extension was built with its kernels for GPUs."""
    return bool(library().cuda_handlers())


def check() -> None:
    """Raises what a GPU has reported of an earlier call of ``mok_jax.moe``. Reads host memory only: microseconds.

    A wait that runs out of time on the device (see ``MoKConfig.timeout_s``) makes the call's float results NaN; every
    later call then fails, and so does this.

    Raises:
      RuntimeError: with rank, task and counter.

    Example:
      >>> check()
    """
    text = library().failure_text()
    if text:
        raise RuntimeError(f"mok_jax: {text}")


@functools.cache
def register_cuda_targets() -> None:
    """Registers the FFI calls for GPUs, once; nothing where the extension was built without CUDA."""
    for name, stages in library().cuda_handlers().items():
        jax.ffi.register_ffi_target(f"mok_{name}", stages, platform="CUDA")


def register_cpu_targets() -> None:
    """Registers the FFI calls for CPUs, once.

    Called while lowering for a CPU: a stateful target that is registered before the CPU backend exists would make that
    backend fail to start.
    """
    with _registration:
        _register_cpu_targets()


@functools.cache
def _register_cpu_targets() -> None:
    handlers = library().cpu_handlers()
    jax.ffi.register_ffi_type("mok_call_site", library().call_site_type(), platform="cpu")
    for name in ("forward", "backward"):
        stages = {"instantiate": handlers["instantiate"], "execute": handlers[name]}
        jax.ffi.register_ffi_target(f"mok_{name}", stages, platform="cpu")
