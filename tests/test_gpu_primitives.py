"""The instructions that the GPU kernels are made of, and the tile interface of each architecture: each function of
`csrc/cuda/ptx.cuh`, the ring of `pieces.cuh`, and of `csrc/cuda/sm90/wgmma.cuh` and `tile.cuh` every layout with
matrices that reveal indices.

The tests themselves are in `csrc/cuda/test`, where they can be read beside what they test.
"""

import re

import pytest

from support import cuda_programs

PROGRAMS = ("primitives", "pieces", "sm90_tile")
TIMEOUT_S = 60  # a kernel that never ends is among what may be wrong


def names(program):
    source = cuda_programs.CSRC / "cuda" / "test" / f"{program}.cu"
    return re.findall(r"^TEST\((\w+)\)", source.read_text(), re.MULTILINE)


@pytest.mark.gpu
@pytest.mark.parametrize(("program", "name"), [(program, name) for program in PROGRAMS for name in names(program)])
def test_on_device(program, name):
    status, output = cuda_programs.run(cuda_programs.build(program), name, timeout_s=TIMEOUT_S)
    assert status == 0, output
    assert output == f"{name}: ok\n"


@pytest.mark.skipif(not cuda_programs.find_tool("nvcc"), reason="there is no nvcc")
@pytest.mark.parametrize("source", cuda_programs.sources_of_tests())
def test_compiles_without_a_gpu(source):
    """The algorithm, which is tied to no architecture, for the next one, too."""
    flags = cuda_programs.NEXT_ARCHITECTURE if source == "algorithm" else ()
    assert cuda_programs.compile_alone(source, *flags).stat().st_size > 0
