"""Fresh interpreters: for what depends on a process's first steps, on several processes, or on devices of their own."""

import os
import socket
import subprocess
import sys
from pathlib import Path

LIMIT_S = 100
CPU_DEVICES = 4

# So that the tests' own modules, which set up 72 devices only under pytest, can be used there.
PREAMBLE = f"""
import sys
import jax
import numpy as np
jax.config.update("jax_num_cpu_devices", {CPU_DEVICES})
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
"""


def cpu_environment(**changes):
    """Variables for a process that runs on the CPU, whatever else there is, with devices of its own choice."""
    inherited = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    return inherited | {"JAX_PLATFORMS": "cpu"} | changes


def start_python(code, *arguments, **environment):
    """A fresh interpreter that runs ``code``."""
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        env=cpu_environment(**environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_python(code, *, preamble=PREAMBLE, **environment):
    """What a fresh interpreter prints."""
    process = start_python(preamble + code, **environment)
    try:
        output, errors = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
    assert process.returncode == 0, output + errors
    return output


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
