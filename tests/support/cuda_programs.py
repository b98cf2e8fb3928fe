"""Builds the programs of `csrc/cuda/test` with nvcc, for one run of the tests: they are no part of the package.

A program runs in a process of its own, so that what one test does to a GPU ends with it.
"""

import functools
import os
import pathlib
import re
import shutil
import subprocess
import tempfile

CSRC = pathlib.Path(__file__).parents[2] / "csrc"
# Of the architectures that have kernels: folder, and what nvcc calls it. And what shared code is compiled for besides.
_TABLE = (CSRC / "cuda" / "architectures.h").read_text()
ARCHITECTURES = dict(re.findall(r"^ *ROW\(.*, (\w+), (\w+)\)", _TABLE, re.MULTILINE))
NEXT_ARCHITECTURES = re.search(r'^#define MOK_NEXT_ARCHITECTURES "(.*)"', _TABLE, re.MULTILINE)[1].split()


def _sources(*patterns):
    return tuple(path.relative_to(CSRC) for pattern in patterns for path in sorted((CSRC / "cuda").glob(pattern)))


# By name, the sources with tests or programs, which are in cuda/test and in the `test` of each architecture.
TESTS = {path.stem: path for path in _sources("**/test/*.cu")}
LAYER = _sources("runtime/*.cc", "schedule.cu", *(f"{folder}/*.c[cu]" for folder in ARCHITECTURES))
# Of programs that need more than their own source.
SOURCES = {
    "primitives": _sources("runtime/tensor_map.cc"),
    "tile": _sources("runtime/tensor_map.cc"),
    "task_lists": ("cuda/test/algorithm.cu", "verify/enumerate.cc"),
    "schedules": ("cuda/schedule.cu",),
    "stand_alone": LAYER,
    "streams": LAYER,
}


@functools.cache
def find_tool(name):
    """A program of the CUDA toolkit, or None."""
    beside = [str(pathlib.Path(os.environ[key]).parent) for key in ("CUDACXX",) if key in os.environ]
    return shutil.which(name, path=os.pathsep.join([*beside, os.environ["PATH"], "/usr/local/cuda/bin"]))


@functools.cache
def _directory():
    return tempfile.TemporaryDirectory(prefix="mok_jax_cuda_")  # removed when the interpreter exits


def _code_for(architectures):
    return [flag for name in architectures for flag in ("-gencode", f"arch=compute_{name},code=sm_{name}")]


def _compile(output, sources, *flags, architectures=None):
    nvcc = find_tool("nvcc")
    assert nvcc, "building a device test needs nvcc"
    path = pathlib.Path(_directory().name) / output
    code = _code_for(architectures or ARCHITECTURES.values())
    command = [nvcc, "-std=c++20", "-O2", f"-I{CSRC}", *code, "--threads", "0", *flags]
    command += ["-Xptxas", "-warn-spills,-warn-lmem-usage,--warning-as-error"]
    command += [str(CSRC / source) for source in sources]
    result = subprocess.run([*command, "-o", str(path)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert result.returncode == 0, result.stdout
    return path


@functools.cache
def build(name, *flags):
    """The program's path. A kernel that spills or keeps anything in local memory does not build."""
    output = "-".join([name, *(flag.strip("-") for flag in flags)])
    return _compile(output, (TESTS[name], *SOURCES.get(name, ())), *flags)


def compile_alone(source, architectures):
    """Compiles a source of csrc without linking it."""
    return _compile("alone.o", (source,), "-c", architectures=architectures)


def start(program):
    """A process that answers lines with lines."""
    return subprocess.Popen([str(program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def run(program, *arguments, timeout_s=120, under=()):
    """Runs it, perhaps under another program, and returns exit status and output."""
    command = [*map(str, under), str(program), *map(str, arguments)]
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout_s)
    return result.returncode, result.stdout
