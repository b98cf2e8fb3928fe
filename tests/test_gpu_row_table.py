"""The row table that the GPU builds in parallel, and its counts, against their definition, bit for bit."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mok_jax
from mok_jax import megakernel
from mok_jax.config import MoKConfig
from support import cases
from support.cases import CASES, Case
from support.row_table import ROW_BLOCK, clean, row_table
from support.runner import pad_tokens

pytestmark = pytest.mark.gpu

# By EP size, local experts. A rank needs two multiprocessors: 64 are the largest power of two that one GPU runs.
SIZES = {1: 16, 2: 8, 8: 3, 32: 2, 64: 1}
ROUTINGS = ("uniform", "zipf", "one_expert", "one_rank", "some_absent", "all_absent", "duplicates", "bad_ids")


def shape(name, tokens, top_k, experts, routing):
    """A case whose data hardly matter: the narrowest rows that there are."""
    return Case(name, tokens, top_k, experts, 8, 8, routing)


def run(inputs, ep):
    """The forward's row table ``[ep, max_rows, 2]``, rows per expert ``[ep, E / ep]`` and bad tokens ``[ep]``."""
    padded = pad_tokens(inputs, -len(inputs.x) % ep)
    tokens, top_k, experts = len(padded.x) // ep, inputs.expert_ids.shape[1], len(inputs.wi_0) // ep
    call = megakernel.make_call(ep, tokens, top_k, experts, "swiglu", None, MoKConfig(ring_rows=512))
    call = dataclasses.replace(call, virtual_ranks=ep)
    with jax.default_device(jax.devices("gpu")[0]):
        table, rows, bad = jax.device_get(_forward(*padded[:-1], call=call))
    return table.reshape(ep, -1, 2), rows.reshape(ep, -1), bad.reshape(ep), padded.expert_ids.reshape(ep, tokens, -1)


@functools.partial(jax.jit, static_argnames="call")
def _forward(*operands, call):
    results = megakernel.forward(call, megakernel.ForwardOperands.of(jnp.zeros(2, jnp.int32), *operands))
    return results.row_table, results.expert_rows, results.bad_tokens


def check(case, ep):
    table, rows, bad, ids = run(cases.make(case, "bfloat16"), ep)
    good = clean(ids, case.E)
    np.testing.assert_array_equal(bad, ((ids < -1) | (ids >= case.E)).any(-1).sum(-1))
    np.testing.assert_array_equal(rows.ravel(), np.bincount(good[good >= 0], minlength=case.E))
    for rank in range(ep):
        expected = row_table(good, rank, case.E // ep)
        assert len(expected) == (-(-rows[rank] // ROW_BLOCK) * ROW_BLOCK).sum()
        np.testing.assert_array_equal(table[rank, : len(expected)], expected)


# Of all sizes, those whose ranks can share the experts.
SHARED = [pytest.param(case, ep, id=f"{case}-{ep}") for case in CASES for ep in SIZES if case.E % ep == 0]


@pytest.mark.parametrize(("case", "ep"), SHARED)
def test_case(case, ep):
    check(case, ep)


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("ep", SIZES)
def test_routing(ep, routing):
    check(shape(routing, 41 * ep + 1, 3, SIZES[ep] * ep, getattr(cases, routing)), ep)


@pytest.mark.parametrize(
    "case",
    (
        shape("many tokens", 40000, 4, 64, cases.zipf),  # several rounds of every warp of every CTA
        shape("many experts", 3000, 8, 512, cases.uniform),
        shape("one slot", 1, 1, 8, cases.uniform),
    ),
    ids=str,
)
@pytest.mark.parametrize("ep", (1, 8))
def test_extremes(case, ep):
    check(case, ep)


def test_order_of_rows_is_the_same_at_every_ep():
    """The rows of each expert, as slots of all tokens in one line, whatever the number of ranks that hold them."""
    case = shape("global order", 576, 4, 576, cases.zipf)
    orders = {}
    for ep in SIZES:
        table, rows, _, _ = run(cases.make(case, "bfloat16"), ep)
        slots = table[..., 0] * (case.tokens // ep * case.K) + table[..., 1]
        begins = np.cumsum(-(-rows // ROW_BLOCK) * ROW_BLOCK, axis=1) - (-(-rows // ROW_BLOCK) * ROW_BLOCK)
        orders[ep] = [
            slots[rank, begin : begin + count].tolist()
            for rank in range(ep)
            for begin, count in zip(begins[rank], rows[rank], strict=True)
        ]
    assert sum(map(len, orders[1])) == case.tokens * case.K
    assert all(order == orders[1] for order in orders.values())


def test_more_ranks_than_the_gpu_runs_at_once_are_refused():
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"there are 256 virtual ranks; this device runs at most \d+"):
        run(cases.make(shape("too many ranks", 256, 1, 256, cases.uniform), "bfloat16"), 256)


def test_no_failure_was_reported():
    mok_jax.check()
