"""The schedule kernel without JAX: `csrc/cuda/test/schedules.cu` compares it with the host's algorithm."""

import pytest

from support import cuda_programs

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    "test",
    [
        "grids",
        "beside_a_spinning_kernel",
        "a_call_after_a_failure",
        "a_peer_that_does_not_come",
        "ranks_in_different_calls",
        "a_rank_in_two_calls",
        "a_rank_in_another_place",
    ],
)
def test_schedules(test):
    status, output = cuda_programs.run(cuda_programs.build("schedules"), test, timeout_s=300)
    assert status == 0, output
