"""Where the megakernel runs, and why it does not elsewhere.

Choosing an implementation, refusing one and planning all ask :func:`why_not`, so that they cannot disagree. What is
known of a place grows from trace to lowering: while tracing, JAX shows what kind of devices a mesh has, but neither
whose processes they are of nor which ones the arguments of a ``jit`` are committed to; lowering shows all that.
"""

import dataclasses
import functools
import importlib.metadata
import os
from typing import Any

import jax
import jax.numpy as jnp

from mok_jax import native

# Of the schedule kernel's shared memory, 4 * (10 * E_local + 1) bytes (schedule_shared_bytes in csrc/cuda/schedule.cu)
# beside 1,040 for its claims, in the 227 KiB that a block can have.
MOST_LOCAL_EXPERTS_ON_GPU = ((227 * 1024 - 1040) // 4 - 1) // 10

# Ranks of a group, kMaxRanks in csrc/cuda/workspace.h.
LARGEST_GROUP = 72
# kLeastVersion in csrc/cuda/runtime/nccl.h.
LEAST_NCCL = "2.29"

# In the words of `jax.Device.platform`, which does not tell NVIDIA's GPUs from others: their compute capability does.
_LOWERED_PLATFORMS = {"gpu": "cuda"}


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a call would run, as far as is known: nothing is refused for what is not.

    Attributes:
      platform: a name of JAX's for lowering: ``"cpu"``, ``"cuda"`` or another; ``None``: not known.
      processes: that the devices of the call may belong to.
      compute_capability: of the GPUs, such as ``"9.0"``; ``None``: not known.
      has_kernels: whether the extension there was built with its kernels for GPUs.
      nccl: version of the package whose NCCL XLA loads there, such as ``"2.29.2"``; ``None``: not known.
    """

    platform: str | None = None
    processes: int = 1
    compute_capability: str | None = None
    has_kernels: bool = True
    nccl: str | None = None


def why_not(place: Place, x: Any, wi_0: Any, ranks: int, activation: str) -> Exception | None:
    """Why ``implementation="megakernel"`` cannot run a call there.

    Args:
      place: where.
      x: ``[T, H]``, like all of a call's arrays of one rank: anything with a shape and a dtype.
      wi_0: ``[E_local, H, I]``.
      ranks: ``EP``.
      activation: as for ``mok_jax.moe``.

    Returns:
      The exception to raise, which names the argument, its value and the remedy; ``None``: it can.

    Example:
      >>> x, wi_0 = jnp.ones((4, 20), jnp.bfloat16), jnp.ones((2, 20, 8))
      >>> why_not(Place("cpu"), x, wi_0, 1, "swiglu")
      >>> str(why_not(Place("cuda"), x, wi_0, 1, "swiglu")).split(";")[0]
      'H, of x (hidden_size of a layer), is 20'
    """
    if x.dtype not in (jnp.float32, jnp.bfloat16):
        return TypeError(
            f'x has dtype {x.dtype}; implementation="megakernel" takes float32 or bfloat16: x.astype(jnp.float32), or '
            'implementation="xla"'
        )
    if place.platform is None:
        return None
    if place.platform == "cuda":
        return _why_not_on(place, ranks) or _why_not_on_gpus(x, wi_0, ranks, activation)
    if place.platform != "cpu":
        return NotImplementedError(
            f'implementation="megakernel" has no kernel for platform {place.platform!r}; use implementation="xla"'
        )
    if ranks > 1 and place.processes > 1:
        return ValueError(
            f'EP is {ranks}, in {place.processes} processes; on CPUs the ranks of implementation="megakernel" are of '
            "one: use one process with more virtual devices, a mesh of one process' devices (jax.local_devices()), or "
            'implementation="xla"'
        )
    return None


def _why_not_on(place: Place, ranks: int) -> Exception | None:
    """Of the machine with GPUs, whatever the call but for its ranks."""
    if not place.has_kernels:
        return NotImplementedError(
            'the extension was built without CUDA, and implementation="megakernel" has no kernel for GPUs then: build '
            'it with nvcc on the path, or use implementation="xla"'
        )
    if place.compute_capability is not None and place.compute_capability not in native.architectures():
        known = ", ".join(f"{capability} ({name})" for capability, name in native.architectures().items())
        return NotImplementedError(
            f"no kernel for compute capability {place.compute_capability} yet, only for {known}; use "
            'implementation="xla"'
        )
    if ranks > 1 and place.nccl is not None and _numbers(place.nccl) < _numbers(LEAST_NCCL):
        return NotImplementedError(
            f'EP is {ranks}; on several GPUs implementation="megakernel" wants NCCL {LEAST_NCCL} or newer, and '
            f'{place.nccl} is installed: pip install -U nvidia-nccl-cu13, or use implementation="xla"'
        )
    return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in version.split(".")[:2])


def _why_not_on_gpus(x: Any, wi_0: Any, ranks: int, activation: str) -> Exception | None:
    """Of the call, whatever the machine with GPUs. What the kernels' host code would refuse is refused here."""
    if x.dtype != jnp.bfloat16:
        return TypeError(
            f'x has dtype {x.dtype}; on GPUs implementation="megakernel" computes in bfloat16: x.astype(jnp.bfloat16), '
            'or dtype=jnp.bfloat16 of a layer (weights may stay float32), or implementation="xla"'
        )
    for name, argument, size in (
        ("H", "x (hidden_size of a layer)", x.shape[1]),
        ("I", "wi_0 (intermediate_size of a layer)", wi_0.shape[2]),
    ):
        if size % 8:
            return ValueError(
                f'{name}, of {argument}, is {size}; on GPUs implementation="megakernel" wants a multiple of 8, and the '
                f'nearest legal value is {max(8, round(size / 8) * 8)}; or use implementation="xla"'
            )
    if wi_0.shape[0] > MOST_LOCAL_EXPERTS_ON_GPU:
        return ValueError(
            f'E_local, of wi_0 (num_experts of a layer), is {wi_0.shape[0]}; on GPUs implementation="megakernel" has '
            f'room for {MOST_LOCAL_EXPERTS_ON_GPU}, the nearest legal value; or use implementation="xla"'
        )
    if activation != "swiglu":
        return NotImplementedError(
            f"activation is {activation!r}; on GPUs implementation=\"megakernel\" has 'swiglu' only so far: "
            "activation='swiglu', or implementation=\"xla\""
        )
    if ranks > LARGEST_GROUP:
        return ValueError(
            f'EP is {ranks}; on GPUs implementation="megakernel" has room for the {LARGEST_GROUP} of an NVLink domain, '
            'the nearest legal value; or use implementation="xla"'
        )
    return None


def why_not_here(x: Any, wi_0: Any, ranks: int, activation: str) -> Exception | None:
    """:func:`why_not`, of what is being traced and where it will probably run."""
    return native.missing() or why_not(_place_of_trace(x), x, wi_0, ranks, activation)


def check(place: Place, x: Any, wi_0: Any, ranks: int, activation: str) -> None:
    """Raises what :func:`why_not` returns."""
    refusal = why_not(place, x, wi_0, ranks, activation)
    if refusal is not None:
        raise refusal


def place_of_program(module_context: Any, platform: str) -> Place:
    """Where a program that is being lowered will run; of another machine, only the platform is known."""
    devices = _devices_of_program(module_context)
    here = [d for d in devices if _LOWERED_PLATFORMS.get(d.platform, d.platform) == platform]
    return _place_of(platform, here[0], len({d.process_index for d in here})) if here else Place(platform)


def _devices_of_program(module_context: Any) -> list[Any]:
    context = module_context.axis_context
    if hasattr(context, "manual_axes"):
        return list(context.mesh.devices.flat) if isinstance(context.mesh, jax.sharding.Mesh) else []
    if context.device_assignment is not None:
        return list(context.device_assignment)
    return [] if module_context.backend is None else module_context.backend.local_devices()[:1]


def _place_of_trace(x: Any) -> Place:
    """As far as a trace shows it: a ``jit`` of arguments that are committed elsewhere does not show that."""
    device = _likely_device(x)
    # Nor does it show which processes' devices a mesh has.
    return _place_of(_LOWERED_PLATFORMS.get(device.platform, device.platform), device, jax.process_count())


def _likely_device(x: Any) -> Any:
    if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer):
        return next(iter(x.devices()))
    of_mesh = jax.sharding.get_abstract_mesh().abstract_device
    if of_mesh is not None:
        try:
            known = jax.devices(of_mesh.platform)
        except RuntimeError:  # a mesh of devices that are elsewhere
            known = []
        return next((d for d in known if d.device_kind == of_mesh.device_kind), of_mesh)
    default = jax.config.jax_default_device
    if default is None or isinstance(default, str):
        return jax.devices(default)[0]
    return default


def _place_of(platform: str, device: Any, processes: int) -> Place:
    if platform != "cuda":
        return Place(platform, processes)
    return Place(platform, processes, getattr(device, "compute_capability", None), native.has_cuda(), _nccl())


@functools.cache
def _nccl() -> str | None:
    """Of the package that JAX's CUDA extra installs; not known where another library is loaded in its place."""
    if "nccl" in os.environ.get("LD_PRELOAD", ""):
        return None
    try:
        return importlib.metadata.version("nvidia-nccl-cu13")
    except importlib.metadata.PackageNotFoundError:
        return None
