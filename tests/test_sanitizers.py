"""The CPU executor under ThreadSanitizer, and under AddressSanitizer with UndefinedBehaviorSanitizer.

Both run `csrc/verify/stress.cc`, which also compares the bits of many schedules.
"""

import platform
import subprocess

import pytest

from support.verifier import finish_compiling, start_compiling

SOURCES = ("verify/stress.cc", *(f"host/{name}.cc" for name in ("executor", "group", "matmul", "tiles", "workers")))
SANITIZERS = {
    "thread": ("-fsanitize=thread",),
    "address-undefined": ("-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
}
TIMEOUT_S = 240


@pytest.fixture(scope="module")
def compiling():
    """One compiler for each sanitizer, at the same time: the second one is done when the first program has run."""
    return {name: start_compiling(name, SOURCES, "-O1", "-g", *flags) for name, flags in SANITIZERS.items()}


@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_stress(compiling, sanitizer):
    program = finish_compiling(*compiling[sanitizer])
    result = _run([str(program)])
    if "unexpected memory mapping" in result.stdout:  # gcc's ThreadSanitizer where addresses are very random
        result = _run(["setarch", platform.machine(), "-R", str(program)])
    assert result.returncode == 0, result.stdout[-10000:]
    assert "a failure reaches all ranks" in result.stdout


def _run(command):
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=TIMEOUT_S)
