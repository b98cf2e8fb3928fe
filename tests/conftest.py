"""What all tests need before they start: virtual devices, the CPU as default, what becomes of `gpu` tests, a guard
against hanging.

Tests run on the CPU unless `JAX_PLATFORMS` names a GPU (`JAX_PLATFORMS=cuda,cpu pytest`). XLA's persistent compilation
cache stays off: a test must not pass because of what an earlier run has left behind.
"""

import collections
import faulthandler
import os

import jax
import pytest

from support import ranks

RACK_SIZE = 72

GPU_IS_REQUESTED = any(name in os.environ.get("JAX_PLATFORMS", "") for name in ("cuda", "gpu"))

# Both must be set before the first backend exists, hence here and not in a fixture. The CPU tests run beside a GPU too.
jax.config.update("jax_platforms", "cuda,cpu" if GPU_IS_REQUESTED else "cpu")
jax.config.update("jax_num_cpu_devices", RACK_SIZE)

# Processes that run tests together, a rank each (`support.start_ranks`).
IS_RANK = "MOK_RANKS" in os.environ
HANG_LIMIT_S = 100 if IS_RANK else 300
if IS_RANK:
    ranks.join()

_real_stderr = pytest.StashKey()
_left_out = pytest.StashKey()


def pytest_configure(config):
    config.stash[_left_out] = collections.Counter()
    # Capturing replaces file descriptor 2 while tests run; the guard must write to the one that a person sees.
    config.stash[_real_stderr] = os.fdopen(os.dup(2), "w")


def pytest_collection_modifyitems(config, items):
    lacking = {}
    if not (GPU_IS_REQUESTED and jax.devices("gpu")):
        lacking["gpu"] = "needs a GPU: set JAX_PLATFORMS=cuda,cpu"
    if not IS_RANK:
        lacking["ranks"] = "needs several processes with GPUs: make gpu-test-ranks"
    for item in items:
        for marker, reason in lacking.items():
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))
                config.stash[_left_out][marker] += 1


@pytest.fixture(autouse=True)
def default_device(request):
    """Programs of tests that do not ask for a GPU run on the CPU, beside a GPU too."""
    if request.node.get_closest_marker("gpu") or request.node.get_closest_marker("ranks"):
        yield
    else:
        with jax.default_device(jax.devices("cpu")[0]):
            yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Ends the process with every thread's stack if a test hangs: that is inside XLA, where no exception helps."""
    faulthandler.dump_traceback_later(HANG_LIMIT_S, exit=True, file=item.config.stash[_real_stderr])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


def pytest_terminal_summary(terminalreporter, config):
    needs = {"gpu": "a GPU", "ranks": "several processes with GPUs"}
    for marker, count in config.stash[_left_out].items():
        terminalreporter.write_line(f"{count} tests need {needs[marker]} and were not run", yellow=True)
