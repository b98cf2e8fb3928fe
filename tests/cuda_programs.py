"""Builds the programs of `csrc/cuda/test` with nvcc, for one run of the tests: they are no part of the package.

A program runs in a process of its own, so that what one test does to a GPU ends with it.
"""

import functools
import os
import pathlib
import shutil
import subprocess
import tempfile

CSRC = pathlib.Path(__file__).parents[1] / "csrc"
ARCHITECTURE = ("-gencode", "arch=compute_90a,code=sm_90a")
NEXT_ARCHITECTURE = ("-gencode", "arch=compute_100f,code=sm_100f")
HOST = [f"cuda/runtime/{name}.cc" for name in ("arguments", "device", "launch", "report", "tensor_map")]
LAYER = (*HOST, "cuda/schedule.cu", *(f"cuda/sm90/{name}" for name in ("forward.cu", "backward.cu", "tensor_maps.cc")))
# By program, its sources besides cuda/test/<program>.cu.
SOURCES = {
    "primitives": ("cuda/runtime/tensor_map.cc",),
    "pieces": (),
    "sm90_tile": ("cuda/runtime/tensor_map.cc",),
    "task_lists": ("cuda/test/algorithm.cu", "verify/enumerate.cc"),
    "schedules": ("cuda/schedule.cu",),
    "stand_alone": LAYER,
}


@functools.cache
def find_tool(name):
    """A program of the CUDA toolkit, or None."""
    beside = [str(pathlib.Path(os.environ[key]).parent) for key in ("CUDACXX",) if key in os.environ]
    return shutil.which(name, path=os.pathsep.join([*beside, os.environ["PATH"], "/usr/local/cuda/bin"]))


@functools.cache
def _directory():
    return tempfile.TemporaryDirectory(prefix="mok_jax_cuda_")  # removed when the interpreter exits


def _compile(output, sources, *flags):
    nvcc = find_tool("nvcc")
    assert nvcc, "building a device test needs nvcc"
    path = pathlib.Path(_directory().name) / output
    command = [nvcc, "-std=c++20", "-O2", f"-I{CSRC}", *ARCHITECTURE, "--threads", "0", *flags]
    command += ["-Xptxas", "-warn-spills,-warn-lmem-usage,--warning-as-error"]
    command += [str(CSRC / source) for source in sources]
    result = subprocess.run([*command, "-o", str(path)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert result.returncode == 0, result.stdout
    return path


@functools.cache
def build(name, *flags):
    """The program's path. A kernel that spills or keeps anything in local memory does not build."""
    output = "-".join([name, *(flag.strip("-") for flag in flags)])
    return _compile(output, (f"cuda/test/{name}.cu", *SOURCES[name]), *flags)


def sources_of_tests():
    """What is in cuda/test, without its suffix."""
    return sorted(path.stem for path in (CSRC / "cuda" / "test").glob("*.cu"))


def compile_alone(name, *flags):
    """Compiles cuda/test/<name>.cu without linking it."""
    return _compile(f"{name}.o", (f"cuda/test/{name}.cu",), "-c", *flags)


def start(program):
    """A process that answers lines with lines."""
    return subprocess.Popen([str(program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def run(program, *arguments, timeout_s=120, under=()):
    """Runs it, perhaps under another program, and returns exit status and output."""
    command = [*map(str, under), str(program), *map(str, arguments)]
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout_s)
    return result.returncode, result.stdout
