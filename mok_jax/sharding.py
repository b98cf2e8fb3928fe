"""Meshes for expert parallelism: where ``expert``, ``tensor`` and ``data`` axes go, and which weights lie along them.

An expert-parallel group must stay inside one NVLink domain (a host, or a rack of 72), because its ranks read and write
each other's memory. :func:`make_mesh` puts the ``expert`` axis there and ``data`` around it; any other mesh with such
an axis works as well. What is not here: moving arrays. That is what JAX does with the shardings.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from mok_jax.semantics import axis_names

DATA_AXIS = "data"
EXPERT_AXIS = "expert"
TENSOR_AXIS = "tensor"

# GB200 and GB300 NVL72. A run with fewer devices is one domain.
LARGEST_DOMAIN = 72


def make_mesh(
    *,
    expert_parallelism: int | None = None,
    tensor_parallelism: int = 1,
    domain_size: int = LARGEST_DOMAIN,
    devices: Sequence[jax.Device] | None = None,
    allow_idle: bool = False,
) -> Mesh:
    """Makes a ``("data", "expert")`` mesh whose expert groups each lie inside one NVLink domain.

    Domains are runs of ``domain_size`` consecutive devices, the last one possibly shorter. Where XLA knows better, on
    several hosts, a domain is what it found connected by a fast network: devices of one ``slice_index`` (openxla/xla
    pull requests 23320 and 24473; ``jax.distributed.initialize`` can set it), in the order in which they are listed,
    and runs of those if there are more. Each domain is cut into groups of ``expert_parallelism * tensor_parallelism``
    consecutive devices.

    Args:
      expert_parallelism: devices that share one copy of the experts; ``None`` takes a whole domain.
      tensor_parallelism: if above 1, the size of one more axis, ``"tensor"``, of consecutive devices, for the weights
        of the rest of a model. Experts are whole along it, and the layers split tokens that are replicated over it.
      domain_size: devices in one NVLink domain at most.
      devices: the devices in domain order; ``None`` means ``jax.devices()``, which starts the backend.
      allow_idle: leave out devices at the end of a domain that do not fill a group (64 of 72, say), instead of raising.

    Returns:
      A :class:`jax.sharding.Mesh` of shape ``[groups, expert_parallelism]``, or ``[groups, expert_parallelism,
      tensor_parallelism]``, with automatic axes.

    Raises:
      ValueError: a number is below 1, a group is larger than a domain, or devices would be idle without ``allow_idle``.

    Example:
      >>> mesh = make_mesh(expert_parallelism=1, devices=jax.devices()[:1])
      >>> mesh.axis_names, mesh.devices.shape
      (('data', 'expert'), (1, 1))
    """
    devices = jax.devices() if devices is None else list(devices)
    if not devices:
        raise ValueError("devices=[] must hold at least 1 device.")
    groups = np.array(expert_groups(devices, expert_parallelism, domain_size, allow_idle, tensor_parallelism))
    axes: tuple[str, ...] = (DATA_AXIS, EXPERT_AXIS)
    if tensor_parallelism > 1:
        groups, axes = groups.reshape(len(groups), -1, tensor_parallelism), (*axes, TENSOR_AXIS)
    return Mesh(groups, axes, axis_types=(AxisType.Auto,) * len(axes))


def logical_axis_rules(
    mesh: Mesh, expert_axis: str | tuple[str, ...] = EXPERT_AXIS
) -> tuple[tuple[str, str | tuple[str, ...] | None], ...]:
    """Rules from the logical axes of the layers' parameters (``exp``, ``embed``, ``mlp``) to axes of ``mesh``.

    Experts are split over ``expert_axis``; hidden and intermediate dimensions are whole on every device.

    Args:
      mesh: any mesh with ``expert_axis``.
      expert_axis: the mesh axis, or axes, that the experts are split over.

    Returns:
      Pairs for ``flax.core.spmd.logical_axis_rules`` or a parameter's ``sharding_rules``.

    Raises:
      ValueError: the mesh has no such axis.

    Example:
      >>> logical_axis_rules(make_mesh(devices=jax.devices()[:1]))
      (('exp', 'expert'), ('embed', None), ('mlp', None))
    """
    axis_size(mesh, expert_axis)
    return (("exp", expert_axis), ("embed", None), ("mlp", None))


class PaddedExperts(NamedTuple):
    """What :func:`pad_experts` returns.

    Attributes:
      num_experts: with padding; what the weights' first dimension must be.
      padding: how many of them, the last ids, are padding.
    """

    num_experts: int
    padding: int


def pad_experts(num_experts: int, expert_parallelism: int) -> PaddedExperts:
    """Rounds the number of experts up to a multiple of the expert axis' size.

    The padding has the last ids. A router keeps its ``num_experts`` columns, so it can never choose them: no id
    changes, nor does any result. For :func:`mok_jax.moe`, pad ``wi_0``, ``wi_1`` and ``wo`` with zeros along their
    first dimension; their gradients there are exact zeros. The Flax layers do so by themselves. It costs memory, and
    the last ranks hold fewer experts than the others, or none.

    Args:
      num_experts: ``E``, that the router can choose.
      expert_parallelism: ranks that share them, at most ``E``.

    Returns:
      A :class:`PaddedExperts`.

    Raises:
      ValueError: a number is below 1, or there are fewer experts than ranks.

    Example:
      >>> pad_experts(256, 72)
      PaddedExperts(num_experts=288, padding=32)
    """
    if num_experts < 1:
        raise ValueError(f"num_experts={num_experts} must be at least 1; the nearest is 1.")
    if not 1 <= expert_parallelism <= num_experts:
        raise ValueError(
            f"expert_parallelism={expert_parallelism} must be from 1 to the number of experts ({num_experts}); "
            f"the nearest is {min(max(expert_parallelism, 1), num_experts)}."
        )
    padding = -num_experts % expert_parallelism
    return PaddedExperts(num_experts + padding, padding)


def axis_size(mesh: Mesh, expert_axis: str | tuple[str, ...]) -> int:
    """The size of a mesh axis, or of several together; raises ValueError for one that ``mesh`` does not have."""
    size = 1
    for name in axis_names(expert_axis):
        if name not in mesh.shape:
            raise ValueError(f"expert_axis={expert_axis!r} is not in the mesh; its axes are {mesh.axis_names}.")
        size *= mesh.shape[name]
    return size


def expert_groups[D](
    devices: Sequence[D],
    expert_parallelism: int | None,
    domain_size: int,
    allow_idle: bool,
    tensor_parallelism: int = 1,
) -> list[list[D]]:
    """The rows of :func:`make_mesh`'s mesh, for anything that stands for devices; raises ValueError as it does.

    Example:
      >>> expert_groups(range(6), 2, 3, allow_idle=True)
      [[0, 1], [3, 4]]
    """
    domains = _domains(devices, domain_size)
    domain_size = max(map(len, domains))
    if not 1 <= tensor_parallelism <= domain_size:
        raise ValueError(
            f"tensor_parallelism={tensor_parallelism} must be from 1 to the {domain_size} devices of one domain; "
            f"the nearest is {min(max(tensor_parallelism, 1), domain_size)}."
        )
    largest = domain_size // tensor_parallelism
    ranks = largest if expert_parallelism is None else expert_parallelism
    if not 1 <= ranks <= largest:
        room = f"{largest} devices" if tensor_parallelism == 1 else f"{domain_size} / {tensor_parallelism} devices"
        raise ValueError(
            f"expert_parallelism={ranks} must be from 1 to the {room} of one domain; "
            f"the nearest is {min(max(ranks, 1), largest)}."
        )
    if not allow_idle:
        _check_no_idle(ranks, tensor_parallelism, sorted({len(domain) for domain in domains}))
    size = ranks * tensor_parallelism
    return [d[start : start + size] for d in domains for start in range(0, len(d) - size + 1, size)]


def _domains[D](devices: Sequence[D], domain_size: int) -> list[list[D]]:
    if domain_size < 1:
        raise ValueError(f"domain_size={domain_size} must be at least 1; the nearest is 1.")
    slices: dict[int | None, list[D]] = {}
    for device in devices:
        slices.setdefault(getattr(device, "slice_index", None), []).append(device)
    return [s[start : start + domain_size] for s in slices.values() for start in range(0, len(s), domain_size)]


def group_sizes_without_idle(sizes: Sequence[int]) -> list[int]:
    """The sizes of groups, ascending, that fill domains of each of ``sizes`` exactly."""
    return [n for n in range(1, min(sizes) + 1) if all(size % n == 0 for size in sizes)]


def _check_no_idle(expert_parallelism: int, tensor_parallelism: int, sizes: list[int]) -> None:
    groups = group_sizes_without_idle(sizes)
    if expert_parallelism * tensor_parallelism in groups:
        return
    name, value = "expert_parallelism", expert_parallelism
    legal = [size // tensor_parallelism for size in groups if size % tensor_parallelism == 0]
    if not legal:
        name, value, legal = "tensor_parallelism", tensor_parallelism, groups
    nearest = min(legal, key=lambda n: (abs(n - value), -n))
    raise ValueError(
        f"{name}={value} would leave devices idle in a domain of {' or '.join(map(str, sizes))}; "
        f"the nearest that does not is {nearest} (or pass allow_idle=True)."
    )
