"""Floating-point operations against XLA's own count of plain products."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mok_jax
from mok_jax.layer import Settings

ROWS, H, I = 64, 48, 80  # noqa: E741


def counted(function, *shapes):
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return jax.jit(function).lower(*arrays).compile().cost_analysis()["flops"]


def expert(x, wi_0, wi_1, wo):
    return ((x @ wi_0) * (x @ wi_1)) @ wo


@pytest.mark.parametrize(
    ("direction", "function"),
    (
        ("forward", expert),
        ("forward+backward", jax.value_and_grad(lambda *a: jnp.square(expert(*a)).sum(), range(4))),
    ),
)
def test_flops_are_those_of_products(direction, function):
    ours = mok_jax.flops(ROWS, H, I, direction)
    assert 0 <= counted(function, (ROWS, H), (H, I), (H, I), (I, H)) - ours < 0.05 * ours
    assert mok_jax.flops(ROWS, H, I, "backward") == 2 * mok_jax.flops(ROWS, H, I)


def test_flops_of_a_layer():
    """Experts, shared experts, and the products with the router, the last bias and the shared experts' gate."""
    settings = Settings(H, I, 4, 3, num_shared_experts=2, shared_expert_gate=True, use_bias=True)
    experts = mok_jax.flops(ROWS * 3, H, I) + mok_jax.flops(ROWS, H, 2 * I)
    assert settings.flops(ROWS) == experts + 2 * ROWS * H * (4 + 4 + 1)
    assert settings.flops(ROWS, "forward+backward") == 3 * settings.flops(ROWS)


def test_xla_does_not_know_our_calls():
    """Should this fail, XLA has learnt to ask, and the docstring of ``mok_jax.flops`` is to say how."""
    shapes = (ROWS, H), (ROWS, 1), (2, H, I), (2, H, I), (2, I, H)

    def call(x, weights, *experts):
        ids = jnp.zeros((ROWS, 1), jnp.int32)
        return mok_jax.moe(x, ids, weights, *experts, implementation="megakernel")

    assert counted(call, *shapes) < 0


def test_unknown_direction():
    with pytest.raises(ValueError, match=r"direction is 'forwards'; .* nearest is 'forward'"):
        mok_jax.flops(1, 1, 1, "forwards")


@pytest.mark.parametrize("integer", (np.int32, jnp.int32))
def test_counts_of_a_device_do_not_overflow(integer):
    rows, hidden, intermediate = 2**20, 7168, 2048
    assert mok_jax.flops(integer(rows), hidden, intermediate) == mok_jax.flops(rows, hidden, intermediate) > 2**33
    settings = Settings(hidden, intermediate, num_experts=8, num_experts_per_tok=8)
    assert settings.flops(integer(2**29)) == settings.flops(2**29)
