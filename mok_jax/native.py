"""The compiled extension: found when first needed, so that the other implementations work where it was not built."""

import functools
import importlib.util
import os
import sys
import threading
from importlib.machinery import PathFinder
from types import ModuleType

import jax
import jax.ffi

# Of what these sources and the extension expect of each other: its functions, and the buffers of its calls in their
# order. Raise it with every change to those; CMake reads it here, and an extension with another number is refused.
INTERFACE = 10

_EXTENSION = "mok_jax._native"
# A package that travels has several, by what a processor must have (in Linux's words); the first that fits is loaded.
_AVX2 = {"avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"}
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_BUILDS: dict[str, set[str]] = {"avx512": _AVX512, "avx2": _AVX2, "baseline": set()}
# Names one of them, to be loaded whatever the processor has.
BUILD_VARIABLE = "MOK_JAX_CPU_BUILD"
_registration = threading.Lock()


@functools.cache
def library() -> ModuleType:
    """The extension module.

    Raises:
      ImportError: it was not built, or from other sources; the text says how to build it.
    """
    try:
        extension = _import_extension()
    except ImportError as error:
        raise ImportError(
            f'implementation="megakernel" needs the compiled extension {_EXTENSION}, which cannot be imported '
            f"({error}). Build it with `make build` or `pip install .`; "
            'or use implementation="xla", which needs none'
        ) from error
    interface = getattr(extension, "INTERFACE", 0)
    if interface != INTERFACE:
        raise ImportError(
            f"{extension.__file__} was built from other sources than {__file__} belongs to: its interface is "
            f"{interface}, not {INTERFACE}. Build it again with `make build` or `pip install .`; "
            'or use implementation="xla", which needs none'
        )
    return extension


def _import_extension() -> ModuleType:
    """Imports the extension that was built for this machine or, of a package that travels, the best that runs here."""
    missing: ModuleNotFoundError | None = None
    of_this_machine = [] if BUILD_VARIABLE in os.environ else [_EXTENSION]
    for name in (*of_this_machine, *(f"{_EXTENSION}_{build}" for build in _fitting_builds())):
        try:
            return _import_by_name(name)
        except ModuleNotFoundError as error:
            missing = missing or error
    assert missing is not None
    raise missing


def _fitting_builds() -> list[str]:
    """The names of those that this processor runs, the best first.

    Raises:
      ImportError: the user's choice is none of them.
    """
    chosen = os.environ.get(BUILD_VARIABLE)
    if chosen is not None:
        if chosen not in _BUILDS:
            raise ImportError(f"{BUILD_VARIABLE}={chosen} is none of {', '.join(_BUILDS)}")
        return [chosen]
    return [build for build, wanted in _BUILDS.items() if wanted <= _processor_flags()]


@functools.cache
def _processor_flags() -> set[str]:
    """What Linux says that the processor has; nothing elsewhere."""
    try:
        with open("/proc/cpuinfo") as file:
            lines = [line.split(":", 1)[1] for line in file if line.startswith("flags")]
    except OSError:
        return set()
    return set(lines[0].split()) if lines else set()


def _import_by_name(name: str) -> ModuleType:
    """From this package's folder or, where that has none, from an installed copy of the package.

    After ``pip install .`` a Python that is started in the checkout finds these sources there before those installed,
    and the extension only beside the latter.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        spec = PathFinder.find_spec(name, [os.path.join(entry, "mok_jax") for entry in sys.path])
        if name in sys.modules or spec is None or spec.loader is None:
            raise
        extension = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(extension)
        sys.modules[name] = extension
        return extension


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


def architectures() -> dict[str, str]:
    """The GPU architectures for which there are kernels: names by compute capability, such as ``"9.0"``."""
    return dict(library().architectures())


def has_cuda() -> bool:
    """Whether the extension was built with its kernels for GPUs."""
    return bool(library().cuda_handlers())


def check() -> None:
    """Raises what a GPU has reported of an earlier call of ``mok_jax.moe``. Reads host memory only: microseconds.

    A wait that runs out of time on the device (see ``MoKConfig.timeout_s``) makes the call's float results NaN; every
    later call then fails, and so does this.

    Raises:
      RuntimeError: with process, GPU, rank, task and counter.

    Example:
      >>> check()
    """
    text = None if missing() else library().failure_text()
    if text:
        of_process = f"process {jax.process_index()}, " if jax.process_count() > 1 else ""
        raise RuntimeError(f"mok_jax: {of_process}{text}")


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
