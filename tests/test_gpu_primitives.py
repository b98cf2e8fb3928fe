"""The instructions that the GPU kernels are made of, and the tile interface of each architecture: each function of
`csrc/cuda/ptx.cuh`, `copy_ring.cuh`, and of an architecture's `tile.cuh` every layout with matrices that
reveal indices.

The tests themselves are in `csrc/cuda/test` and in the `test` of each architecture, beside what they test.
"""

import re

import pytest

from support import cuda_programs

PROGRAMS = ("primitives", "copy_ring", "tile")
TIMEOUT_S = 60  # a kernel that never ends is among what may be wrong


def names(program):
    source = cuda_programs.CSRC / cuda_programs.TESTS[program]
    return re.findall(r"^TEST\((\w+)\)", source.read_text(), re.MULTILINE)


@pytest.mark.gpu
@pytest.mark.parametrize(("program", "name"), [(program, name) for program in PROGRAMS for name in names(program)])
def test_on_device(program, name):
    status, output = cuda_programs.run(cuda_programs.build(program), name, timeout_s=TIMEOUT_S)
    assert status == 0, output
    assert output == f"{name}: ok\n"


@pytest.mark.skipif(not cuda_programs.find_tool("nvcc"), reason="there is no nvcc")
@pytest.mark.parametrize("name", cuda_programs.TESTS)
def test_compiles_without_a_gpu(name):
    """The algorithm, which is tied to no architecture, for the next ones, too."""
    ours = list(cuda_programs.ARCHITECTURES.values())
    architectures = ours + cuda_programs.NEXT_ARCHITECTURES if name == "algorithm" else ours
    assert cuda_programs.compile_alone(cuda_programs.TESTS[name], architectures).stat().st_size > 0
