"""Builds the C++ programs of `csrc/verify` with the machine's compiler, and talks to the one that answers questions.

They are compiled for a test session and thrown away after it: they are no part of the package.
"""

import functools
import json
import os
import pathlib
import subprocess
import tempfile

CSRC = pathlib.Path(__file__).parents[2] / "csrc"
COMPILER = os.environ.get("CXX", "c++")


@functools.cache
def _directory():
    return tempfile.TemporaryDirectory(prefix="mok_jax_verify_")  # removed when the interpreter exits


def start_compiling(name, sources, *flags):
    """Returns the program's path and the running compiler; paths of sources are relative to csrc/."""
    program = pathlib.Path(_directory().name) / name
    command = [COMPILER, "-std=c++20", f"-I{CSRC}", *flags, "-pthread"]
    command += [str(CSRC / source) for source in sources]
    return program, subprocess.Popen([*command, "-o", str(program)], stderr=subprocess.PIPE, text=True)


def finish_compiling(program, compiler):
    _, errors = compiler.communicate()
    assert compiler.returncode == 0, errors
    return program


@functools.cache
def _process():
    sources = [f"verify/{name}.cc" for name in ("main", "enumerate", "order", "mutate", "footprint", "protocol")]
    program = finish_compiling(*start_compiling("verify", sources, "-O1"))
    return subprocess.Popen([str(program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def ask(*words):
    """One question of csrc/verify/main.cc; words may be iterables of words."""
    process = _process()
    print(*flat(words), file=process.stdin, flush=True)
    answer = process.stdout.readline()
    assert answer, f"the verifier died of {words}"
    return json.loads(answer)


def flat(words):
    """Words, of which some are iterables of words, one after the other."""
    for word in words:
        if isinstance(word, str) or not hasattr(word, "__iter__"):
            yield word
        else:
            yield from flat(word)
