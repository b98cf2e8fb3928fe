"""Ranks on streams of one GPU without JAX: `csrc/cuda/test/streams.cu` launches each by itself, also late, in another
call, or not at all."""

import pytest

from support import cuda_programs

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    "test",
    [
        "calls_in_a_row",
        "a_late_rank",
        "a_larger_shape_between_graphs",
        "a_rank_that_does_not_come",
        "a_rank_that_ends_in_the_middle",
        "ranks_in_different_calls",
        "a_host_error",
    ],
)
def test_streams(test):
    status, output = cuda_programs.run(cuda_programs.build("streams"), test, timeout_s=60)
    assert status == 0, output
