"""What a JAX user may write around a call of the megakernel: transformations, meshes, threads, processes, accidents.

Programs are tiny; values are compared with the oracle where the way of writing could change them, with another run of
our own where it may not. Refusals are in `test_refusals`.
"""

import functools
import re
import threading

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import mok_jax
from mok_jax.config import SAVE_POLICIES, MoKConfig
from support.cases import Case, make, uniform
from support.compare import assert_close, relative_l2
from support.oracle import Outputs, forward_backward
from support.processes import CPU_DEVICES, free_port, run_python
from support.runner import run

CASE = Case("contract", 16, 2, 8, 16, 24, uniform)
TOLERANCE = 1e-5
EP = CPU_DEVICES
BY_EXPERT = P("expert")


@functools.cache
def inputs(seed=0):
    return make(CASE, "float32", seed)


def expert_mesh(shape=(EP,), axes=("expert",)):
    return Mesh(np.array(jax.devices("cpu")[: int(np.prod(shape))]).reshape(shape), axes)


def over_ranks(function, mesh=None, tokens=BY_EXPERT, experts=BY_EXPERT, **options):
    """``function(x, ids, weights, wi_0, wi_1, wo)`` under ``shard_map`` over all of ``mesh``."""
    mesh = expert_mesh() if mesh is None else mesh
    return jax.shard_map(function, mesh=mesh, in_specs=(tokens,) * 3 + (experts,) * 3, out_specs=tokens, **options)


moe = functools.partial(mok_jax.moe, implementation="megakernel")
moe_of_rank = functools.partial(moe, axis_name="expert")


def scalar(y):
    return jnp.sum(jnp.sin(y))


def gradients(function):
    """The gradients of ``scalar(function(...))`` in all that has one."""
    return jax.grad(lambda *operands: scalar(function(*operands)), argnums=(0, 2, 3, 4, 5))


def assert_same(actual, expected):
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def count_calls(function, *operands):
    """FFI calls in the compiled program, forward and backward; a loop's body counts once."""
    text = jax.jit(function).lower(*operands).compile().as_text()
    return tuple(text.count(f'custom_call_target="mok_{name}"') for name in ("forward", "backward"))


# Transformations


@pytest.mark.parametrize("ranks", (1, 2))
def test_eager_is_jitted(ranks):
    """Operation by operation, outside `shard_map` and inside it, forward and backward."""
    operands = inputs()[:6]
    step = moe if ranks == 1 else over_ranks(moe_of_rank, expert_mesh((2,)))
    assert_same(step(*operands), jax.jit(step)(*operands))
    # The sine outside is compiled differently, so that the last bit may differ.
    for actual, expected in zip(gradients(step)(*operands), jax.jit(gradients(step))(*operands), strict=True):
        assert relative_l2(actual, expected) < TOLERANCE


def test_numpy_arrays_are_arrays():
    operands = inputs()[:6]
    assert_same(moe(*operands), moe(*map(jnp.asarray, operands)))


def stacked_weights(layers):
    return tuple(np.stack(w) for w in zip(*(inputs(seed)[3:6] for seed in range(layers)), strict=True))


def layers_in_a_scan(block, x, ids, weights, *stacked):
    return jax.lax.scan(lambda x, w: (block(x, ids, weights, *w), None), x, stacked)[0]


def layers_in_a_loop(block, x, ids, weights, *stacked):
    for w in zip(*stacked, strict=True):
        x = block(x, ids, weights, *w)
    return x


def residual_block(x, *others):
    return x + jnp.tanh(moe_of_rank(x, *others))


def test_scan_over_layers():
    operands = *inputs()[:3], *stacked_weights(3)
    results = []
    for layers in (layers_in_a_scan, layers_in_a_loop):
        step = over_ranks(functools.partial(layers, residual_block), experts=P(None, "expert"))
        results.append(jax.jit(gradients(step))(*operands))
    for actual, expected in zip(*results, strict=True):
        assert relative_l2(actual, expected) < TOLERANCE


def scan_outputs(jaxpr):
    """Shapes of what each ``scan`` of a program, inner programs included, returns."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "scan":
            yield [variable.aval.shape for variable in equation.outvars]
        else:
            for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda p: hasattr(p, "jaxpr")):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from scan_outputs(inner)


def test_scan_keeps_no_second_copy_of_the_weights():
    """Replicated over a data axis they are cast to vary over it; the residual must still be the array that is there."""
    operands = *inputs()[:3], *stacked_weights(3)
    step = over_ranks(
        functools.partial(layers_in_a_scan, residual_block),
        expert_mesh((2, EP), ("data", "expert")),
        P(("data", "expert")),
        P(None, "expert"),
    )
    forward, backward = scan_outputs(jax.make_jaxpr(gradients(step))(*operands).jaxpr)
    weights = {(3, CASE.E // EP, *w.shape[-2:]) for w in operands[3:]}
    assert not weights & set(forward)
    assert weights <= set(backward)  # their gradients: the check above looks at the right shapes


BLOCKS = {
    "linear": lambda x, *others: x + moe(x, *others),
    "non-linear": lambda x, *others: x + jnp.sin(moe(x, *others)),
}


@pytest.mark.parametrize("use", BLOCKS)
@pytest.mark.parametrize("layers", (layers_in_a_scan, layers_in_a_loop))
def test_remat_policy_runs_the_forward_once(layers, use):
    """Of two layers in a loop, each call counts; in a scan the bodies count once."""
    block, operands = BLOCKS[use], (*inputs()[:3], *stacked_weights(2))
    times = 1 if layers is layers_in_a_scan else 2
    plain, recomputed, kept = (
        gradients(functools.partial(layers, b))
        for b in (block, jax.checkpoint(block), jax.checkpoint(block, policy=mok_jax.remat_policy))
    )
    assert count_calls(plain, *operands) == (times, times)
    assert count_calls(recomputed, *operands) == (2 * times, times)
    assert count_calls(kept, *operands) == (times, times)
    assert_same(jax.jit(kept)(*operands), jax.jit(recomputed)(*operands))


@pytest.mark.parametrize("save", SAVE_POLICIES)
def test_remat_of_every_save_policy(save):
    block = functools.partial(moe, config=MoKConfig(save=save))
    step = gradients(jax.checkpoint(lambda *operands: jnp.sin(block(*operands)), policy=mok_jax.remat_policy))
    assert count_calls(step, *inputs()[:6]) == (1, 1)


def test_calls_are_pure():
    """Unused calls vanish, identical ones merge, and nothing is saved where nothing is differentiated."""
    operands = inputs()[:6]
    assert count_calls(lambda *a: (moe(*a), a[0] + 1)[1], *operands) == (0, 0)
    assert count_calls(lambda *a: moe(*a) + 2 * moe(*a), *operands) == (1, 0)
    assert count_calls(moe, *operands) == (1, 0)
    assert count_calls(gradients(moe), *operands) == (1, 1)


def test_donation():
    """A step that gives its weights away computes what one that keeps them does."""

    def update(x, ids, weights, *matrices):
        step = over_ranks(moe_of_rank)
        return tuple(
            w - 0.1 * g for w, g in zip(matrices, gradients(step)(x, ids, weights, *matrices)[2:], strict=True)
        )

    tokens, shard = inputs()[:3], NamedSharding(expert_mesh(), P("expert"))
    kept, given = (tuple(jax.device_put(w, shard) for w in inputs()[3:6]) for _ in range(2))
    keep, give = jax.jit(update), jax.jit(update, donate_argnums=(3, 4, 5))
    for _ in range(3):
        kept, before, given = keep(*tokens, *kept), given, give(*tokens, *given)
        assert all(w.is_deleted() for w in before)
    assert_same(given, kept)


# Many calls, collectives, threads


@pytest.mark.parametrize("delay_seed", (0, 5))
def test_independent_calls_in_one_program(delay_seed):
    """Nothing orders them, and every rank may run them in an order and at a time of its own."""
    config = MoKConfig(host_delay_seed=delay_seed)
    many = [inputs(seed)[:6] for seed in range(8)]
    one = jax.jit(over_ranks(moe_of_rank))

    @jax.jit
    def all_at_once(many):
        return [over_ranks(functools.partial(moe_of_rank, config=config))(*operands) for operands in many]

    expected = [one(*operands) for operands in many]
    for _ in range(5):
        assert_same(all_at_once(many), expected)


def collectives_and_calls(layer):
    """Calls between collectives that depend on them and collectives that do not."""

    def of_rank(x, ids, weights, wi_0, wi_1, wo):
        y = layer(x, ids, weights, wi_0, wi_1, wo)
        mean = jax.lax.pmean(x, "expert")
        z = layer(jnp.tanh(y + mean), ids, weights, wi_0, wi_1, wo)
        gathered = jax.lax.all_gather(z, "expert", tiled=True)
        return (
            z
            + jax.lax.psum_scatter(gathered, "expert", tiled=True)
            + jax.lax.psum(layer(x, ids, weights, wi_0, wi_1, wo), "expert")
        )

    return over_ranks(of_rank)


def test_calls_mixed_with_collectives():
    operands = inputs()[:6]
    reference = functools.partial(mok_jax.moe, axis_name="expert", implementation="reference")
    expected = jax.jit(gradients(collectives_and_calls(reference)))(*operands)
    step = jax.jit(gradients(collectives_and_calls(moe_of_rank)))
    for _ in range(20):
        for actual, wanted in zip(step(*operands), expected, strict=True):
            assert relative_l2(actual, wanted) < TOLERANCE


def test_several_threads():
    """Python threads that run one compiled step, and each other's, at once: each gets the bits of its own data."""
    steps = [jax.jit(gradients(collectives_and_calls(moe_of_rank))), jax.jit(gradients(over_ranks(moe_of_rank)))]
    jobs = [(steps[seed % 2], inputs(seed)[:6]) for seed in range(4)]
    expected = [step(*operands) for step, operands in jobs]
    wrong = []

    def work(job):
        step, operands = jobs[job]
        for _ in range(8):
            if any((np.asarray(a) != np.asarray(e)).any() for a, e in zip(step(*operands), expected[job], strict=True)):
                wrong.append(job)

    threads = [threading.Thread(target=work, args=(job,)) for job in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# Meshes


@pytest.mark.parametrize("grad", ("outside", "inside"))
@pytest.mark.parametrize("check_vma", (True, False))
def test_subgroups(check_vma, grad):
    """Two groups of four ranks, weights replicated over the groups."""
    if grad == "inside" and not check_vma:
        actual = subgroups_summed_by_the_caller()
    else:
        actual = run(inputs(), EP, implementation="megakernel", replicas=2, check_vma=check_vma, grad=grad)
    assert_like_oracle(actual)


def subgroups_summed_by_the_caller():
    """What the documentation asks for where JAX does not know what varies: sum weight gradients over the data axis."""
    tokens, experts = P(("data", "expert")), P("expert")

    def step(x, ids, weights, wi_0, wi_1, wo, dy):
        y, pullback = jax.vjp(lambda *a: moe_of_rank(a[0], ids, *a[1:]), x, weights, wi_0, wi_1, wo)
        dx, d_weights, *of_experts = pullback(dy)
        return Outputs(y, dx, d_weights, *(jax.lax.psum(d, "data") for d in of_experts))

    sharded = jax.shard_map(
        step,
        mesh=expert_mesh((2, EP), ("data", "expert")),
        in_specs=(tokens,) * 3 + (experts,) * 3 + (tokens,),
        out_specs=Outputs(*(tokens,) * 3, *(experts,) * 3),
        check_vma=False,
    )
    return jax.device_get(jax.jit(sharded)(*inputs()))


def assert_like_oracle(actual):
    assert_close(actual, forward_backward(*inputs().for_oracle()), TOLERANCE)


@pytest.mark.parametrize(
    ("shape", "axes", "axis_name"),
    (
        ((EP, 2), ("expert", "data"), "expert"),  # groups that are strided in the mesh
        ((2, 2, 2), ("data", "inner", "outer"), ("outer", "inner")),  # ranks counted against the mesh's order
        ((2, 2, 2), ("outer", "data", "inner"), ("outer", "inner")),
    ),
)
def test_order_of_axes(shape, axes, axis_name):
    """The experts lie along the axes as named, first major, wherever those are in the mesh."""
    names = (axis_name,) if isinstance(axis_name, str) else axis_name
    mesh, tokens = expert_mesh(shape, axes), P(("data", *names))
    step = over_ranks(functools.partial(moe, axis_name=axis_name), mesh, tokens, P(names))

    @jax.jit
    def everything(x, ids, weights, wi_0, wi_1, wo, dy):
        y, pullback = jax.vjp(lambda *a: step(a[0], ids, *a[1:]), x, weights, wi_0, wi_1, wo)
        return Outputs(y, *pullback(dy))

    assert_like_oracle(jax.device_get(everything(*inputs())))


def test_one_rank_on_every_device():
    """Without an axis each device is a layer of its own, in the same program."""
    operands = inputs()[:6]
    alone = over_ranks(moe, tokens=P("expert"), experts=P())
    assert_same(jax.jit(alone)(*operands), jax.jit(moe)(*operands))


# Accidents


def step_with_a_late_rank(config, sum_afterwards):
    """Rank 2 computes for about a second before it gets to the call."""

    def idle(x):
        # Values decay to exactly x: the loop cannot be folded, and what it adds is zero.
        return x + 0 * jax.lax.fori_loop(0, 2_500_000, lambda _, v: jnp.cos(v), x)

    def of_rank(x, *others):
        x = jax.lax.cond(jax.lax.axis_index("expert") == 2, idle, lambda x: x, x)
        y = moe_of_rank(x, *others, config=config)
        return y + jax.lax.psum(y, "expert") if sum_afterwards else y

    return jax.jit(over_ranks(of_rank))


@pytest.mark.parametrize("sum_afterwards", (False, True))
def test_a_late_rank_is_an_error(sum_afterwards):
    """All ranks return it, even with a collective behind the call; then the same process computes on."""
    operands = inputs()[:6]
    step = step_with_a_late_rank(MoKConfig(entry_timeout_s=0.02), sum_afterwards)
    with pytest.raises(
        jax.errors.JaxRuntimeError, match=r"mok_jax: rank [013] waited longer than entry_timeout_s = 0.02"
    ):
        jax.block_until_ready(step(*operands))
    patient = step_with_a_late_rank(MoKConfig(), sum_afterwards=False)
    assert_same(patient(*operands), jax.jit(over_ranks(moe_of_rank))(*operands))


@pytest.mark.parametrize("sum_afterwards", (False, True))
def test_a_stuck_task_is_an_error(sum_afterwards):
    """Inside a call: the text names rank, task and counter."""
    operands = inputs()[:6]
    config = MoKConfig(timeout_s=1e-6, host_delay_seed=1)

    def of_rank(*operands):
        y = moe_of_rank(*operands, config=config)
        return jax.lax.psum(y, "expert") + y if sum_afterwards else y

    text = (
        r"rank \d waited longer than timeout_s = 0.000001 s before task \w+ of block \d+ for counter .* at \d+ of \d+"
    )
    for _ in range(3):
        with pytest.raises(jax.errors.JaxRuntimeError, match=text):
            jax.block_until_ready(jax.jit(over_ranks(of_rank))(*operands))
    assert np.isfinite(jax.jit(over_ranks(moe_of_rank))(*operands)).all()


def test_ranks_that_do_not_call_are_an_error():
    """A branch that only half of the ranks take: the other half is waited for, but not for ever."""
    config = MoKConfig(entry_timeout_s=0.05)

    def of_rank(x, *others):
        called = functools.partial(moe_of_rank, config=config)
        return jax.lax.cond(jax.lax.axis_index("expert") < 2, called, lambda x, *_: x, x, *others)

    with pytest.raises(jax.errors.JaxRuntimeError, match=r"mok_jax: rank [01] waited longer than entry_timeout_s"):
        jax.block_until_ready(jax.jit(over_ranks(of_rank))(*inputs()[:6]))
    assert np.isfinite(jax.jit(over_ranks(moe_of_rank))(*inputs()[:6])).all()


def test_time_limits_stay_below_those_of_xla():
    """XLA ends the process when a collective waits for 40 s; our error must come first."""
    config = MoKConfig(timeout_s=1e6, entry_timeout_s=1e6)
    text = jax.jit(functools.partial(moe, config=config)).lower(*inputs()[:6]).as_text()
    limits = [float(number) for number in re.findall(r"timeout_s = ([\d.e+]+)", text)]
    assert len(limits) == 2 and max(limits) < 40


# Processes


STEP = """
import mok_jax
from test_xla_contract import gradients, inputs, moe_of_rank, over_ranks
hits = []
jax.monitoring.register_event_listener(lambda event, **_: hits.append(event) if event.endswith("cache_hits") else None)
results = jax.jit(gradients(over_ranks(moe_of_rank)))(*inputs()[:6])
"""


def test_persistent_cache(tmp_path):
    """A second process compiles nothing, and computes the same bits."""
    environment = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    code = STEP + "print(len(hits), *(np.asarray(a).tobytes().hex() for a in results))"
    first, second = (run_python(code, **environment).split() for _ in range(2))
    assert int(first[0]) < int(second[0])
    assert first[1:] == second[1:]


def export_step():
    """A forward and its pull-back, with the permission that targets outside XLA need."""
    safe = [jax.export.DisabledSafetyCheck.custom_call(name) for name in ("mok_forward", "mok_backward")]
    operands = [jax.device_put(a, NamedSharding(expert_mesh(), P("expert"))) for a in inputs()[:6]]
    exported = jax.export.export(jax.jit(gradients(over_ranks(moe_of_rank))), disabled_checks=safe)(*operands)
    return exported.serialize(), operands


def test_export_in_this_process():
    serialized, operands = export_step()
    restored = jax.jit(jax.export.deserialize(serialized).call)
    assert_same(restored(*operands), jax.jit(gradients(over_ranks(moe_of_rank)))(*operands))


def test_export_to_another_process(tmp_path):
    """That one never traces the layer, so it has to register the calls itself."""
    serialized, operands = export_step()
    (tmp_path / "step").write_bytes(serialized)
    np.savez(tmp_path / "operands.npz", *operands)
    run_python(f"""
import jax.export, mok_jax
mok_jax.register_ffi_targets()
restored = jax.jit(jax.export.deserialize(bytearray(open({str(tmp_path / "step")!r}, "rb").read())).call)
shard = jax.NamedSharding(jax.make_mesh(({EP},), ("expert",)), jax.P("expert"))
operands = [jax.device_put(a, shard) for a in np.load({str(tmp_path / "operands.npz")!r}).values()]
np.savez({str(tmp_path / "results.npz")!r}, *restored(*operands))
""")
    results = list(np.load(tmp_path / "results.npz").values())
    assert_same(results, list(jax.jit(gradients(over_ranks(moe_of_rank)))(*operands)))


def test_ranks_can_tell_programs_apart():
    """A GPU call carries what its peers compare: a hash of the program's name, alike wherever that is lowered."""

    def program_of(name):
        step = over_ranks(moe_of_rank)

        def renamed(*operands):
            return step(*operands)

        renamed.__name__ = name
        text = jax.jit(renamed).trace(*make(CASE, "bfloat16")[:6]).lower(lowering_platforms=("cuda",)).as_text()
        return set(re.findall(r"program = (\d+) : i64", text))

    train, again, evaluate = map(program_of, ("train", "train", "evaluate"))
    assert len(train) == 1 and train == again and train != evaluate


def test_import_starts_no_backend():
    """`jax.distributed.initialize` refuses to run once a backend exists."""
    run_python(f"""
import mok_jax, mok_jax.linen, mok_jax.nnx, mok_jax.routing, mok_jax.sharding
jax.distributed.initialize("127.0.0.1:{free_port()}", num_processes=1, process_id=0)
from test_xla_contract import inputs, moe_of_rank, over_ranks
assert np.isfinite(jax.jit(over_ranks(moe_of_rank))(*inputs()[:6])).all()
""")
