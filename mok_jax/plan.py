"""``python -m mok_jax plan``: whether a published layer fits a cluster, and what it takes of every GPU.

Sizes of the megakernel come from the functions that size a real call's buffers, given shapes instead of arrays, those
of ``"xla"`` from a trace of it (:mod:`mok_jax.xla_bytes`), so a plan needs no GPU and starts no backend. It counts
routed experts, their router and what one call of ``mok_jax.moe`` with bf16 activations needs; shared experts, expert
biases, attention and everything else of a model come on top. State is not split over the ``data`` axis.

A plan is of the implementation that ``mok_jax.moe`` would choose there. One that names an implementation which would
be refused today says so, and counts its bytes all the same: for who plans ahead.
"""

import argparse
import dataclasses
import json
import math
import re
import sys
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np

from mok_jax import checks, megakernel, native, sharding, support, xla_bytes
from mok_jax.api import Implementation
from mok_jax.command import say_refused
from mok_jax.config import SAVE_POLICIES, MoKConfig, Save, require_choice
from mok_jax.zoo import LAYERS, Layer

GIB = 2**30
PARAM_DTYPES = ("float32", "bfloat16")
IMPLEMENTATIONS: tuple[Implementation, ...] = ("megakernel", "xla")

# Exit statuses of the command; 2 is argparse's.
FITS, DOES_NOT_FIT, REFUSED_TODAY = 0, 1, 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """What is asked.

    Attributes:
      model: a name in ``mok_jax.zoo.LAYERS``.
      gpus: of the whole cluster.
      domain: GPUs in one NVLink domain; runs of this many consecutive ones.
      expert_parallelism: GPUs that share one copy of the experts; ``None`` takes a whole domain.
      allow_idle: leave GPUs idle that fill no group.
      tokens_per_gpu: ``T``, in one step.
      implementation: ``"megakernel"`` or ``"xla"``; ``None`` is what ``mok_jax.moe`` takes for None on those GPUs.
      compute_capability: of the GPUs, such as ``"9.0"``; ``None``: one that has kernels.
      save: what the megakernel's forward keeps for its backward, as in ``MoKConfig``.
      ring_rows: of the megakernel, as in ``MoKConfig``.
      layers: Mixture-of-Experts layers of the model. Their state and residuals add up; temporaries and arena do not.
      param_dtype: of parameters and gradients.
      optimizer_bytes: per parameter; 8 are Adam's two float32 moments.
      memory_gib: of one GPU.
      tflops: what a GPU reaches in matrix products, in TFLOP/s.
      bandwidth_gbs: what a GPU reaches over NVLink in one direction, in GB/s.
    """

    model: str
    gpus: int
    domain: int = sharding.LARGEST_DOMAIN
    expert_parallelism: int | None = None
    allow_idle: bool = False
    tokens_per_gpu: int = 4096
    implementation: Implementation | None = None
    compute_capability: str | None = None
    save: Save = "pre_activations"
    ring_rows: int | None = None
    layers: int = 1
    param_dtype: str = "float32"
    optimizer_bytes: int = 8
    memory_gib: float = 141.0
    tflops: float = 650.0
    bandwidth_gbs: float = 315.0

    def __post_init__(self) -> None:
        require_choice("model", self.model, tuple(LAYERS))
        if self.implementation is not None:
            require_choice("implementation", self.implementation, IMPLEMENTATIONS)
        if self.compute_capability is not None and not re.fullmatch(r"\d+\.\d", self.compute_capability):
            raise ValueError(f"compute_capability={self.compute_capability!r} must be two numbers, such as 9.0.")
        require_choice("save", self.save, SAVE_POLICIES)
        require_choice("param_dtype", self.param_dtype, PARAM_DTYPES)
        for name, least in (("gpus", 1), ("tokens_per_gpu", 1), ("layers", 1), ("optimizer_bytes", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {least}; the nearest is {least}.")
        if not 1 <= self.domain <= sharding.LARGEST_DOMAIN:
            nearest = min(max(self.domain, 1), sharding.LARGEST_DOMAIN)
            raise ValueError(
                f"domain={self.domain} must be from 1 to {sharding.LARGEST_DOMAIN}; the nearest is {nearest}."
            )
        for name in ("memory_gib", "tflops", "bandwidth_gbs"):
            if not 0 < getattr(self, name) < math.inf:
                default = Request.__dataclass_fields__[name].default
                raise ValueError(f"{name}={getattr(self, name)} must be a positive number, such as {default:g}.")


@dataclasses.dataclass(frozen=True)
class GpuMesh:
    """Where the GPUs go, and the experts on them.

    Attributes:
      data: groups that hold a copy of the experts each.
      expert: GPUs of one group.
      domains: NVLink domains.
      idle_gpus: GPUs in no group.
      experts_per_gpu: padding included.
      padding: experts of a group that the router can never choose.
      gpus_with_experts: GPUs of a group that hold more than padding.
      busiest_over_mean: work of such a GPU over the group's mean, when tokens choose experts evenly.
    """

    data: int
    expert: int
    domains: int
    idle_gpus: int
    experts_per_gpu: int
    padding: int
    gpus_with_experts: int
    busiest_over_mean: float


@dataclasses.dataclass(frozen=True)
class GpuBytes:
    """Bytes of one GPU: first what is there all the time, for all layers; then what one layer's call needs.

    Attributes:
      parameters: routed experts with padding, and the router.
      gradients: of the same.
      optimizer: of the same.
      inputs: the layers' ``x``, expert ids and router weights, kept for the backward.
      residuals: what the layers' forwards keep for their backwards besides: of the megakernel row tables and what
        ``save`` says, of ``"xla"`` what ``jax.lax.scan`` over layers keeps.
      arena: memory that peers read and write, as allocated; all layers share it. Of the megakernel, like the next two.
      workspace: schedule and counters, of either direction.
      weight_copy: the experts' weights rounded to bf16; ``"xla"`` has them among its residuals.
      forward_buffers: ring buffers of the forward, residuals left out; or what ``mok_jax.xla_bytes`` says of it.
      backward_buffers: likewise of the backward.
      forward_activations: the forward's ``y``.
      backward_activations: ``dy``, ``dx`` and the gradient of router weights.
    """

    parameters: int
    gradients: int
    optimizer: int
    inputs: int
    residuals: int
    arena: int
    workspace: int
    weight_copy: int
    forward_buffers: int
    backward_buffers: int
    forward_activations: int
    backward_activations: int

    @property
    def peak(self) -> int:
        """The most that is needed at once: in the last layer's forward or backward, whichever takes more."""
        lasting = self.parameters + self.gradients + self.optimizer + self.inputs + self.residuals + self.arena
        forward = self.forward_buffers + self.forward_activations
        backward = self.backward_buffers + self.backward_activations
        return lasting + self.workspace + self.weight_copy + max(forward, backward)


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a request comes to.

    Attributes:
      request: what was asked.
      mesh: where GPUs and experts go.
      implementation: that is planned for.
      why_not_megakernel: why it would not run there, or ``None``.
      bytes: of one GPU.
      ring_rows: rows that the megakernel's ring holds; ``None`` of ``"xla"``.
      max_rows: rows that can arrive at one GPU at most; of ``"xla"``, that always do.
      communication_over_compute: time on NVLink over time of the products, in a forward, of rows that are in use.
    """

    request: Request
    mesh: GpuMesh
    implementation: Implementation
    why_not_megakernel: str | None
    bytes: GpuBytes
    ring_rows: int | None
    max_rows: int
    communication_over_compute: float

    @property
    def refused_today(self) -> str | None:
        """Why a call of this plan would raise, or ``None``."""
        return self.why_not_megakernel if self.implementation == "megakernel" else None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        plan = dataclasses.asdict(self)
        plan["bytes"]["peak"] = self.bytes.peak
        plan["refused_today"] = self.refused_today
        return plan


def make_plan(request: Request) -> Plan:
    """Plans, or says why not.

    Raises:
      ValueError: the GPUs, the experts or the bytes do not fit; the text names the argument, its value and the nearest
        legal value.

    Example:
      >>> request = Request(model="deepseek-v3", gpus=144, implementation="megakernel", compute_capability="10.0")
      >>> plan = make_plan(request)
      >>> plan.mesh.data, plan.mesh.expert, plan.mesh.experts_per_gpu, plan.mesh.padding
      (2, 72, 4, 32)
      >>> plan.refused_today.split(";")[0]
      'no kernel for compute capability 10.0 yet, only for 9.0 (Hopper)'
    """
    layer, mesh = LAYERS[request.model], plan_mesh(request)
    refusal = _why_not_megakernel(request, layer, mesh)
    implementation = request.implementation or ("xla" if refusal else "megakernel")
    rows, sizes = _count_bytes(request, layer, mesh, implementation)
    if sizes.peak > request.memory_gib * GIB:
        text = _why_it_does_not_fit(request, layer, mesh, implementation, sizes)
        raise ValueError(
            text + (f" The megakernel would not run: {refusal}" if implementation == "xla" and refusal else "")
        )
    remote_share = (mesh.expert - 1) / mesh.expert
    ratio = communication_over_compute(
        remote_share, layer.intermediate_size, request.tflops * 1e12, request.bandwidth_gbs * 1e9
    )
    return Plan(request, mesh, implementation, refusal, sizes, *rows, ratio)


def _why_not_megakernel(request: Request, layer: Layer, mesh: GpuMesh) -> str | None:
    arrays = _Arrays.of(request, layer, mesh)
    place = support.Place("cuda", compute_capability=request.compute_capability)
    refusal = support.why_not(place, arrays.x, arrays.wi_0, mesh.expert, layer.activation)
    return None if refusal is None else str(refusal)


def plan_mesh(request: Request) -> GpuMesh:
    """The mesh that ``mok_jax.sharding.make_mesh`` would make, and the experts on it; raises as :func:`make_plan`."""
    gpus, domain = request.gpus, min(request.domain, request.gpus)
    size = domain if request.expert_parallelism is None else request.expert_parallelism
    short = gpus % domain
    if short and not request.allow_idle and 1 <= size <= domain and domain % size == 0 and short % size:
        nearest = round(gpus / domain) * domain
        raise ValueError(
            f"gpus={gpus} must be a multiple of domain={domain}, or the last {short} have no room for groups of "
            f"{size}; the nearest is {nearest} (or allow_idle)."
        )
    groups = sharding.expert_groups(range(gpus), size, domain, request.allow_idle)

    experts = LAYERS[request.model].num_experts
    if size > experts:
        lengths = {domain, short} - {0}
        legal = range(1, domain + 1) if request.allow_idle else sharding.group_sizes_without_idle(sorted(lengths))
        nearest = max(n for n in legal if n <= experts)
        raise ValueError(
            f"expert_parallelism={size} is more than the {experts} experts of {request.model}; "
            f"the nearest is {nearest}."
        )
    padded, padding = sharding.pad_experts(experts, size)
    per_gpu = padded // size
    return GpuMesh(
        data=len(groups),
        expert=size,
        domains=-(-gpus // domain),
        idle_gpus=gpus - len(groups) * size,
        experts_per_gpu=per_gpu,
        padding=padding,
        gpus_with_experts=-(-experts // per_gpu),
        busiest_over_mean=padded / experts,
    )


def communication_over_compute(
    remote_share: float, intermediate_size: int, flops_per_s: float, bytes_per_s: float
) -> float:
    """Time on NVLink over time of the products in a forward: ``(2/3) * f * P / (I * BW)``.

    A row's products are ``6 H I`` FLOPs (``mok_jax.flops``). In bf16 a remote row is ``2 H`` bytes that the expert's
    GPU receives, and later ``2 H`` that the source receives: with all GPUs alike, each receives ``4 H`` bytes a row,
    and sends as many.

    Example:
      >>> round(communication_over_compute(1 / 2, 2048, 650e12, 315e9), 2)
      0.34
    """
    return 2 / 3 * remote_share * flops_per_s / (intermediate_size * bytes_per_s)


class _Arrays(NamedTuple):
    """Shapes of a call's arrays on one GPU; ``wi_1`` is like ``wi_0``."""

    x: jax.ShapeDtypeStruct
    expert_weights: jax.ShapeDtypeStruct
    wi_0: jax.ShapeDtypeStruct
    wo: jax.ShapeDtypeStruct

    @classmethod
    def of(cls, request: Request, layer: Layer, mesh: GpuMesh) -> Self:
        like, experts = jax.ShapeDtypeStruct, mesh.experts_per_gpu
        hidden, intermediate = layer.hidden_size, layer.intermediate_size
        return cls(
            x=like((request.tokens_per_gpu, hidden), jnp.bfloat16),
            expert_weights=like((request.tokens_per_gpu, layer.num_experts_per_tok), np.float32),
            wi_0=like((experts, hidden, intermediate), np.dtype(request.param_dtype)),
            wo=like((experts, intermediate, hidden), np.dtype(request.param_dtype)),
        )


def _count_bytes(
    request: Request, layer: Layer, mesh: GpuMesh, implementation: Implementation
) -> tuple[tuple[int | None, int], GpuBytes]:
    """``ring_rows`` and ``max_rows`` of one GPU's call, and its bytes."""
    x, expert_weights, wi, wo = arrays = _Arrays.of(request, layer, mesh)
    checks.check_rows(mesh.expert, request.tokens_per_gpu, layer.num_experts_per_tok, mesh.experts_per_gpu)
    count = {"megakernel": _count_megakernel, "xla": _count_xla}[implementation]
    rows, own = count(request, layer, mesh, arrays)

    router = (layer.hidden_size + layer.router_bias) * layer.num_experts
    parameters = router + 2 * math.prod(wi.shape) + math.prod(wo.shape)
    y, router_grad = (x.shape, x.dtype), (expert_weights.shape, np.float32)
    return rows, GpuBytes(
        parameters=request.layers * parameters * wi.dtype.itemsize,
        gradients=request.layers * parameters * wi.dtype.itemsize,
        optimizer=request.layers * parameters * request.optimizer_bytes,
        inputs=request.layers * _bytes([y, (expert_weights.shape, np.int32), router_grad]),
        residuals=request.layers * own.pop("residuals"),
        forward_activations=_bytes([y]),
        backward_activations=_bytes([y, y, router_grad]),
        **own,
    )


def _count_megakernel(
    request: Request, layer: Layer, mesh: GpuMesh, arrays: _Arrays
) -> tuple[tuple[int, int], dict[str, int]]:
    x, _, wi, wo = arrays
    config = MoKConfig(save=request.save, ring_rows=request.ring_rows)
    tokens, top_k = request.tokens_per_gpu, layer.num_experts_per_tok
    shape = mesh.expert, tokens, top_k, mesh.experts_per_gpu
    call = megakernel.make_call(*shape, layer.activation, layer.activation_limit, config)
    call = dataclasses.replace(call, differentiated=True, weight_grad_dtype=megakernel.weight_grad_dtype(x, wi))
    forward, backward = megakernel.forward_results(call, arrays), megakernel.backward_results(call, arrays)
    kept = megakernel.residuals_of(call, forward)
    saved = [a for a in (kept.saved_pre_activations, kept.saved_rows) if a is not None]
    weights = [(a.shape, x.dtype) for a in (wi, wi, wo) if a.dtype != x.dtype]
    return (call.ring_rows, call.max_rows), {
        "residuals": _bytes([kept.row_table, kept.expert_rows, *saved]),
        "arena": _arena_bytes(mesh.expert, tokens, top_k, layer.hidden_size),
        "workspace": _bytes([forward.workspace]),
        "weight_copy": _bytes(weights),
        "forward_buffers": _bytes(forward.rings) - _bytes(saved),
        "backward_buffers": _bytes(backward.scratch),
    }


def _arena_bytes(ranks: int, tokens: int, top_k: int, hidden: int) -> int:
    """Of what peers read and write, outside XLA's memory; alone, a rank has it in its workspace."""
    if ranks == 1:
        return 0
    return native.library().arena_bytes(ranks=ranks, tokens=tokens, top_k=top_k, hidden=hidden)


def _count_xla(
    request: Request, layer: Layer, mesh: GpuMesh, arrays: _Arrays
) -> tuple[tuple[None, int], dict[str, int]]:
    shape = xla_bytes.Shape(
        ranks=mesh.expert,
        tokens=request.tokens_per_gpu,
        top_k=layer.num_experts_per_tok,
        local_experts=mesh.experts_per_gpu,
        hidden=layer.hidden_size,
        intermediate=layer.intermediate_size,
        dtype=arrays.x.dtype,
        param_dtype=arrays.wi_0.dtype,
        activation=layer.activation,
        activation_limit=layer.activation_limit,
    )
    sizes = xla_bytes.count(shape)
    return (None, shape.rows), {
        "residuals": sizes.kept,
        "arena": 0,
        "workspace": 0,
        "weight_copy": 0,
        "forward_buffers": sizes.forward,
        "backward_buffers": sizes.backward,
    }


def _bytes(results: Iterable[tuple[tuple[int, ...], Any]]) -> int:
    return sum(math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in results)


def _why_it_does_not_fit(
    request: Request, layer: Layer, mesh: GpuMesh, implementation: Implementation, sizes: GpuBytes
) -> str:
    def fits(**changes: Any) -> bool:
        changed = dataclasses.replace(request, **changes)
        return _count_bytes(changed, layer, mesh, implementation)[1].peak <= request.memory_gib * GIB

    tokens = _most(lambda n: fits(tokens_per_gpu=n), request.tokens_per_gpu)
    layers = _most(lambda n: fits(layers=n), request.layers)
    needed = sizes.peak / GIB
    if tokens:
        nearest = f"tokens_per_gpu={request.tokens_per_gpu} is {tokens}"
    elif layers:
        nearest = f"layers={request.layers} is {layers}"
    else:
        nearest = f"memory_gib is {math.ceil(needed * 10) / 10}"
    state = (sizes.parameters + sizes.gradients + sizes.optimizer) / GIB
    kept = (sizes.inputs + sizes.residuals) / GIB
    return (
        f"memory_gib={request.memory_gib:g}: a GPU needs {needed:.1f} GiB with {implementation!r} ({state:.1f} of "
        f"parameters, gradients and optimizer, {kept:.1f} kept for the backward, {needed - state - kept:.1f} of "
        f"temporaries); the nearest legal value of {nearest}."
    )


def _most(holds: Callable[[int], bool], below: int) -> int:
    """The largest of 1 to ``below - 1`` that ``holds``, given that all smaller ones do; 0 for none."""
    low, high = 0, below
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds an option for every field of :class:`Request`."""
    parser.epilog = (
        f"Exit status: {FITS}, it fits; {DOES_NOT_FIT}, it does not; {REFUSED_TODAY}, it fits, but the implementation "
        "that was asked for would be refused today."
    )
    parser.add_argument("--model", required=True, help=f"one of {', '.join(LAYERS)}")
    parser.add_argument("--gpus", required=True, type=int, help="of the whole cluster")
    options: list[tuple[str, Any, str]] = [
        ("domain", int, "GPUs in one NVLink domain"),
        ("expert_parallelism", int, "GPUs that share one copy of the experts (default: a domain)"),
        ("tokens_per_gpu", int, "tokens of one step"),
        ("implementation", str, f"one of {', '.join(IMPLEMENTATIONS)} (default: what would run on such GPUs today)"),
        ("compute_capability", str, "of the GPUs, such as 9.0 (default: one that has kernels)"),
        ("save", str, f"what the megakernel's forward keeps: {', '.join(SAVE_POLICIES)}"),
        ("ring_rows", int, "rows that the megakernel's ring holds (default: MoKConfig's)"),
        ("layers", int, "Mixture-of-Experts layers of the model"),
        ("param_dtype", str, f"of parameters and gradients: {', '.join(PARAM_DTYPES)}"),
        ("optimizer_bytes", int, "bytes of optimizer state per parameter"),
        ("memory_gib", float, "memory of one GPU, in GiB"),
        ("tflops", float, "what a GPU reaches in matrix products, in TFLOP/s"),
        ("bandwidth_gbs", float, "what a GPU reaches over NVLink in one direction, in GB/s"),
    ]
    for name, kind, text in options:
        default = Request.__dataclass_fields__[name].default
        text += "" if default is None else " (%(default)s)"
        parser.add_argument("--" + name.replace("_", "-"), type=kind, default=default, metavar="X", help=text)
    parser.add_argument("--allow-idle", action="store_true", help="leave GPUs idle that fill no group")
    parser.add_argument("--json", action="store_true", help="for machines: JSON, refusals too")


def run(arguments: argparse.Namespace) -> int:
    """Prints the plan of parsed arguments; returns the exit status."""
    fields = {field.name: getattr(arguments, field.name) for field in dataclasses.fields(Request)}
    try:
        plan = make_plan(Request(**fields))
    except ValueError as refusal:
        say_refused(refusal, as_json=arguments.json)
        return DOES_NOT_FIT
    if arguments.json:
        print(json.dumps(plan.as_dict(), indent=2))
    else:
        print_table(plan)
    if plan.refused_today is None:
        return FITS
    print(f"refused today: {plan.refused_today}", file=sys.stderr)
    return REFUSED_TODAY


def print_table(plan: Plan) -> None:
    """Shows a plan to a person."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        raise SystemExit("The table needs the package rich (pip install rich); --json does without") from None
    request, mesh = plan.request, plan.mesh
    table = Table(title=f"{request.model} on {request.gpus} GPUs, {request.tokens_per_gpu} tokens each")
    for heading, justify in (("per GPU", "left"), ("", "right"), ("", "left")):
        table.add_column(heading, justify=justify)  # type: ignore[arg-type]
    for row in _mesh_rows(plan):
        table.add_row(*row)
    table.add_section()
    for name, size, note in _byte_rows(plan):
        if size:
            table.add_row(name, f"{size / GIB:.3f} GiB", note)
    table.add_section()
    table.add_row("at most at once", f"{plan.bytes.peak / GIB:.3f} GiB", f"of {request.memory_gib:g}")
    table.add_row(
        "communication / compute",
        f"{plan.communication_over_compute:.2f}",
        f"forward, {mesh.expert - 1}/{mesh.expert} remote, {request.tflops:g} TFLOP/s, {request.bandwidth_gbs:g} GB/s",
    )
    Console().print(table)


def _mesh_rows(plan: Plan) -> list[tuple[str, str, str]]:
    request, mesh = plan.request, plan.mesh
    padding = f"{mesh.padding} of {mesh.expert * mesh.experts_per_gpu} are padding" if mesh.padding else "no padding"
    if mesh.gpus_with_experts < mesh.expert:
        padding += f"; {mesh.expert - mesh.gpus_with_experts} of {mesh.expert} GPUs hold nothing else"
    rows = f"at most {plan.max_rows} can arrive; what does not fit is recomputed"
    if plan.ring_rows is None:
        rows = "in every exchange: room for all slots of all ranks"
    note = "runs on such GPUs" if plan.implementation == "megakernel" else "runs everywhere"
    if plan.why_not_megakernel:
        reason = "[bold red]refused today[/]" if plan.refused_today else "not the megakernel"
        note = f"{reason}: {plan.why_not_megakernel}"
    return [
        ("implementation", plan.implementation, note),
        ("mesh", f"{mesh.data} x {mesh.expert}", f"data x expert; domains: {mesh.domains}, idle: {mesh.idle_gpus}"),
        ("experts", str(mesh.experts_per_gpu), padding),
        ("busiest over mean", f"{mesh.busiest_over_mean:.3f}", "work, when tokens choose experts evenly"),
        ("rows", str(plan.ring_rows or plan.max_rows), rows),
        ("layers", str(request.layers), "routed experts and router; the rest of a model comes on top"),
    ]


def _byte_rows(plan: Plan) -> list[tuple[str, int, str]]:
    sizes, request = plan.bytes, plan.request
    kept, buffers = f"row table and save={request.save}", "rings; one layer at a time"
    if plan.implementation == "xla":
        kept, buffers = "what jax.lax.scan keeps", "a masked copy of all rows for each expert; one layer at a time"
    return [
        ("parameters", sizes.parameters, request.param_dtype),
        ("gradients", sizes.gradients, request.param_dtype),
        ("optimizer", sizes.optimizer, f"{request.optimizer_bytes} bytes a parameter"),
        ("inputs kept", sizes.inputs, "x, expert ids and router weights"),
        ("residuals", sizes.residuals, kept),
        ("arena", sizes.arena, "one for all layers"),
        ("buffers, forward", sizes.forward_buffers, buffers),
        ("buffers, backward", sizes.backward_buffers, buffers),
        ("schedule workspace", sizes.workspace, "one layer at a time"),
        ("weights in bf16", sizes.weight_copy, "one layer at a time"),
        ("y; dy, dx", sizes.backward_activations, "one layer at a time"),
    ]
