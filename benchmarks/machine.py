"""What a figure depends on besides the code: device, clocks, power, versions and commit."""

import datetime
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

_PACKAGES = ("mok-jax", "jax", "jaxlib", "jax-cuda13-plugin", "numpy", "torch", "triton", "tokamax", "nvidia-cublas")
_SMI = ("nvidia-smi", "--format=csv,noheader", "--id=0")
_CLOCKS = ("clocks.sm", "clocks.mem", "clocks.max.sm")
_POWER = ("power.draw", "power.limit", "temperature.gpu")


def describe(commit_there: str | None = None) -> dict[str, Any]:
    """The ``meta`` of a run as far as it is known at its start; the commit is asked of git unless it is given."""
    device = jax.devices()[0]
    return {
        "device": cpu_name() if device.platform == "cpu" else device.device_kind,
        "platform": device.platform,
        "devices": len(jax.devices()),
        "host_cores": _usable_cores(),
        "clocks": [],
        "power": [],
        "versions": versions(),
        "commit": commit_there or commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def read_state(meta: dict[str, Any], load: Callable[[], None]) -> None:
    """Adds to ``meta`` the clocks and power, with units, that the first GPU has while ``load`` runs.

    Does nothing on a machine without NVIDIA GPUs.
    """
    query = [*_SMI, f"--query-gpu={','.join(_CLOCKS + _POWER)}"]
    try:
        smi = subprocess.Popen(query, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    except OSError:
        return
    load()
    values = [value.strip() for value in smi.communicate()[0].split(",")]
    if smi.returncode == 0 and len(values) == len(_CLOCKS + _POWER):
        found = dict(zip(_CLOCKS + _POWER, values, strict=True))
        meta["clocks"].append({field: found[field] for field in _CLOCKS})
        meta["power"].append({field: found[field] for field in _POWER})


def versions() -> dict[str, str]:
    """Of Python, the packages that matter and the GPU's driver, where they are there."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    driver = _output(*_SMI, "--query-gpu=driver_version")
    return found | ({"driver": driver} if driver else {})


def commit() -> str:
    """Of the checkout, with ``-dirty`` if files differ from it; "unknown" outside one."""
    here = str(Path(__file__).parent)
    name = _output("git", "-C", here, "rev-parse", "HEAD")
    if not name:
        return "unknown"
    return name + ("-dirty" if _output("git", "-C", here, "status", "--porcelain") else "")


def cpu_name() -> str:
    """As Linux names the processor, with the number of cores this process may use."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {_usable_cores()} cores"


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
