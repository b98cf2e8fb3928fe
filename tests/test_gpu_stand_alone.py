"""The kernels without JAX: `csrc/cuda/test/stand_alone.cu` runs steps on virtual ranks and compares their bits."""

import re

import pytest

from support import cuda_programs
from support.sanitize_gpu import TOOLS, arguments, sanitize

pytestmark = pytest.mark.gpu

# Each is a set of values to combine; see Options in stand_alone.cu. In poisoned memory nothing can be inherited. "wide"
# has an expert whose weight gradients pairs share, but not in its small ring.
STEPS = {
    "schedules": {"ranks": "1,2,8", "ring-rows": "128,512,0", "comm-ctas": "0,2", "save": "0,1,2", "poison": 1},
    "repeats": {"ranks": 2, "ring-rows": 256, "comm-ctas": "0,3", "repeats": 50, "poison": 1},
    "reserved": {"ranks": "1,4", "comm-ctas": "0,1", "reserve": 116, "repeats": 5, "poison": 1},
    "rack": {"ranks": "1,64", "tokens": 384, "experts": 64, "comm-ctas": "0,1", "ring-rows": "128,0", "poison": 1},
    "master-weights": {"ranks": "1,2", "f32-grads": 1, "save": "0,1", "poison": 1},
    "wide": {"ranks": "1,2", "hidden": 1408, "intermediate": 2880, "tokens": 1200, "ring-rows": "512,0", "poison": 1},
    "narrow": {"ranks": "1,2", "hidden": 8, "intermediate": 16, "poison": 1},
}


@pytest.mark.parametrize("step", STEPS)
def test_same_bits(step):
    status, output = cuda_programs.run(cuda_programs.build("stand_alone"), *arguments(STEPS[step]), timeout_s=200)
    assert status == 0, output
    assert "relative error" in output


# So many rows for one communication CTA that products wait for them longer than it takes until a waiter looks at the
# time (0.2 ms).
SLOW_PULLS = {"tokens": 4096, "hidden": 4096, "intermediate": 256, "comm-ctas": 1, "ring-rows": 0, "repeats": 1}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("fails", "limits", "products"), [(1, "1,30000000", "gate_up|down"), (2, "30000000,1", "hidden_grad|row_grad")]
)
def test_a_product_that_waits_too_long_ends_the_call(ranks, fails, limits, products):
    step = SLOW_PULLS | {"ranks": ranks, "fails": fails, "timeout-us": limits}
    status, output = cuda_programs.run(cuda_programs.build("stand_alone"), *arguments(step), timeout_s=60)
    assert status == 0, output
    text = rf"all NaN, GPU 0, rank \d waited longer than timeout_s before a ({products}) task "
    assert re.search(text, output), output


@pytest.mark.skipif(not cuda_programs.find_tool("compute-sanitizer"), reason="compute-sanitizer is not on the path")
@pytest.mark.parametrize("tool", TOOLS)
def test_sanitizer_finds_nothing(tool):
    clean, output = sanitize(tool)
    assert clean, output
