"""``python -m mok_jax preflight``: whether a machine is ready, before a run finds out.

Every probe says what it found; one that finds a problem says what to do about it, and the others go on.
"""

import argparse
import importlib.metadata
import json
import os
import platform
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mok_jax import native, support, verify
from mok_jax.command import add_process_options, join_processes

READY, NOT_READY = 0, 1
PACKAGES = ("mok-jax", "jax", "jaxlib", "flax", "jax-cuda13-plugin", "nvidia-nccl-cu13")
# What changes how a program runs, by the beginnings of their names.
VARIABLES = ("XLA_", "JAX_", "NCCL_", "CUDA_VISIBLE_DEVICES", "LD_PRELOAD")
# Of the call that is tried: small, and no multiples of tiles.
SIZES: dict[str, Any] = {
    "hidden_size": 136,
    "intermediate_size": 72,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "tokens": 64,
}


class Finding(NamedTuple):
    """What a probe found; with a remedy it is a problem."""

    name: str
    found: str
    remedy: str = ""


def probe_versions() -> Iterator[Finding]:
    """Python and packages."""
    yield Finding("python", platform.python_version())
    for package in PACKAGES:
        try:
            yield Finding(package, importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:
            continue


def probe_extension() -> Iterator[Finding]:
    """Whether the compiled extension is there and belongs to these sources."""
    missing = native.missing()
    if missing:
        yield Finding("extension", str(missing).split(". ")[0], "build it: `make build` or `pip install .`")
        return
    known = [f"{capability} ({name})" for capability, name in native.architectures().items() if native.has_cuda()]
    name = native.library().__name__.rpartition(".")[2]
    yield Finding("extension", f"{name}, interface {native.INTERFACE}; kernels for GPUs: {', '.join(known) or 'none'}")


def probe_devices() -> Iterator[Finding]:
    """What JAX computes on."""
    devices = jax.devices()
    kinds = sorted({device.device_kind for device in devices})
    here = f"in {jax.process_count()} processes; {len(jax.local_devices())} are here"
    yield Finding("devices", f"{len(devices)} x {', '.join(kinds)}, {here}")
    for device in jax.local_devices():
        limit = (device.memory_stats() or {}).get("bytes_limit")
        if limit:
            yield Finding(f"memory of {device}", f"{limit / 2**30:.1f} GiB in XLA's pool")


def probe_implementation() -> Iterator[Finding]:
    """Whether ``implementation=None`` would choose the megakernel, for one rank and for all devices as ranks."""
    sizes = SIZES["hidden_size"], SIZES["intermediate_size"]
    x = jax.ShapeDtypeStruct((SIZES["tokens"], sizes[0]), jnp.bfloat16)
    wi = jax.ShapeDtypeStruct((SIZES["num_experts"], *sizes), jnp.bfloat16)
    for ranks in sorted({1, len(jax.devices())}):
        refusal = support.why_not_here(x, wi, ranks, "swiglu")
        name = f"megakernel on {ranks} rank{'s' if ranks > 1 else ''}"
        yield Finding(name, "runs" if refusal is None else f"xla runs instead: {refusal}")


def probe_nccl() -> Iterator[Finding]:
    """Whether a collective of XLA's works, which loads NCCL, and whether that lets GPUs share memory."""
    if native.missing() or len(jax.devices()) == 1 or jax.devices()[0].platform != "gpu":
        return
    found = f"a sum over all devices is {_sum_over_devices():g}"
    yield Finding("collective", found)
    missing = native.library().nccl_missing()
    yield Finding("NCCL", missing or "has windows", "pip install -U nvidia-nccl-cu13" if missing else "")


def _sum_over_devices() -> float:
    """Of a one on each, by an all-reduce."""
    devices = np.array(jax.devices())
    everywhere = NamedSharding(Mesh(devices, ("all",)), PartitionSpec("all"))
    ones = jax.make_array_from_callback(devices.shape, everywhere, np.ones(devices.shape).__getitem__)
    return float(jax.jit(jnp.sum)(ones))


def probe_environment() -> Iterator[Finding]:
    """Variables that change how programs run."""
    for name in sorted(os.environ):
        if name.startswith(VARIABLES):
            yield Finding(name, os.environ[name])


def probe_call() -> Iterator[Finding]:
    """A call on one device of this process, forward and backward, against float64 and against itself."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16" if jax.devices()[0].platform != "cpu" else "float32"
    try:
        checks = list(verify.verify(verify.Request(**SIZES, dtype=dtype)))
    except (ImportError, ValueError, TypeError, NotImplementedError) as refusal:
        yield Finding("a call", f"refused: {refusal}", 'use implementation="xla", or what the text names')
        return
    except Exception as error:
        yield Finding("a call", f"{type(error).__name__}: {error}", "nothing else will run; mend this first")
        return
    wrong = [f"{check.name}: {check.found}" for check in checks if not check.holds]
    remedy = "do not train on this machine; python -m mok_jax verify shows more" if wrong else ""
    yield Finding("a call", "; ".join(wrong) or f"right in {len(checks)} ways", remedy)


def probe_failures() -> Iterator[Finding]:
    """What a GPU has reported by now."""
    try:
        native.check()
    except RuntimeError as error:
        yield Finding("reports", str(error), "restart the process")


PROBES: tuple[Callable[[], Iterator[Finding]], ...] = (
    probe_versions,
    probe_extension,
    probe_devices,
    probe_implementation,
    probe_nccl,
    probe_environment,
    probe_call,
    probe_failures,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    parser.epilog = f"Exit status: {READY}, no problem was found; {NOT_READY}, some were."
    add_process_options(parser)
    parser.add_argument("--json", action="store_true", help="for machines")


def run(arguments: argparse.Namespace) -> int:
    """Prints what the probes find; returns the exit status."""
    join_processes(arguments)
    findings = []
    for probe in PROBES:
        for finding in probe():
            findings.append(finding)
            if not arguments.json:
                print(f"{'PROBLEM' if finding.remedy else '':8}{finding.name:28}{finding.found}", flush=True)
                if finding.remedy:
                    print(f"{'':36}{finding.remedy}", flush=True)
    if arguments.json:
        print(json.dumps([finding._asdict() for finding in findings], indent=2))
    return NOT_READY if any(finding.remedy for finding in findings) else READY
