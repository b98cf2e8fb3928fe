"""What the layer refuses, and that each refusal says what is wrong, with which value, and what would be right.

Every row of `ARGUMENTS` changes one argument of a legal call. Refusals that a transformation, a mesh or an installation
causes have tests of their own below. Those of places are in `test_support`, those of the Flax layer in `test_nnx`,
those of meshes in `test_sharding`.
"""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import mok_jax
from mok_jax import api, native
from mok_jax.config import MoKConfig
from mok_jax.nnx import MoE
from support.cases import Case, make, uniform

T, K, E, H, I = 16, 2, 8, 16, 24  # noqa: E741
INPUTS = make(Case("refusals", T, K, E, H, I, uniform), "float32")
LEGAL = dict(zip(("x", "expert_ids", "expert_weights", "wi_0", "wi_1", "wo"), INPUTS[:6], strict=True))
MEGAKERNEL = {"implementation": "megakernel"}


def call(**changes):
    arguments = LEGAL | MEGAKERNEL | changes
    arrays = [arguments.pop(name) for name in LEGAL]
    return mok_jax.moe(*arrays, **arguments)


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


# (changed arguments, exception, what its text must say)
ARGUMENTS = (
    # Rank
    (
        {"x": zeros(2, 8, H)},
        ValueError,
        r"x has shape \(2, 8, 16\); it must have 2 dimensions, \[T, H\]: x.reshape\(-1, 16\)",
    ),
    ({"x": zeros(H)}, ValueError, r"x has shape \(16,\); it must have 2 dimensions, \[T, H\]"),
    ({"expert_ids": zeros(T, dtype=np.int32)}, ValueError, r"expert_ids has shape \(16,\); it must have 2 .*\[T, K\]"),
    ({"expert_weights": zeros(T)}, ValueError, r"expert_weights has shape \(16,\); it must have 2 .*\[T, K\]"),
    ({"wi_0": zeros(H, I)}, ValueError, r"wi_0 has shape \(16, 24\); it must have 3 dimensions, \[E_local, H, I\]"),
    ({"wi_1": zeros(H, I)}, ValueError, r"wi_1 has shape \(16, 24\); it must have 3 dimensions, \[E_local, H, I\]"),
    ({"wo": zeros(I, H)}, ValueError, r"wo has shape \(24, 16\); it must have 3 dimensions, \[E_local, I, H\]"),
    # Kind and dtype
    ({"x": None}, TypeError, r"x is of type NoneType; it must be an array: jnp.asarray\(x\)"),
    ({"x": [[1.0] * H] * T}, TypeError, r"x is of type list; it must be an array: jnp.asarray\(x\)"),
    ({"expert_ids": ((0, 1),) * T}, TypeError, r"expert_ids is of type tuple; .*: jnp.asarray\(expert_ids\)"),
    ({"wo": "wo"}, TypeError, r"wo is of type str; it must be an array: jnp.asarray\(wo\)"),
    (
        {"x": zeros(T, H, dtype=np.float16)},
        TypeError,
        r"x has dtype float16; it must be bfloat16 or float32: x.astype\(",
    ),
    ({"x": zeros(T, H, dtype=np.int32)}, TypeError, r"x has dtype int32; it must be bfloat16 or float32: x.astype\("),
    (
        {"x": zeros(T, H, dtype=np.float64)},
        TypeError,
        r'x has dtype float64; implementation="megakernel" takes float32 or bf',
    ),
    (
        {"expert_ids": zeros(T, K, dtype=np.int64)},
        TypeError,
        r"expert_ids has dtype int64; it must be int32: expert_ids.ast",
    ),
    ({"expert_ids": zeros(T, K)}, TypeError, r"expert_ids has dtype float32; it must be int32: expert_ids.astype\("),
    (
        {"expert_weights": zeros(T, K, dtype=np.float16)},
        TypeError,
        r"expert_weights has dtype float16; it must be float32: ",
    ),
    (
        {"wi_0": zeros(E, H, I, dtype=np.float16)},
        TypeError,
        r"wi_0 has dtype float16; it must be bfloat16 or float32: wi_0.astype\('float32'\)",
    ),
    (
        {"wi_1": zeros(E, H, I, dtype=jnp.bfloat16)},
        TypeError,
        r"wi_1 has dtype bfloat16 and wi_0 has float32; .* one dtype",
    ),
    ({"wo": zeros(E, I, H, dtype=np.int8)}, TypeError, r"wo has dtype int8; it must be bfloat16 or float32: wo.as"),
    # Sizes
    (
        {"expert_ids": zeros(T + 1, K, dtype=np.int32)},
        ValueError,
        r"expert_ids has shape \(17, 2\); .* \(16, 2\), .* 16 tokens",
    ),
    (
        {"expert_weights": zeros(T, K + 1)},
        ValueError,
        r"expert_weights has shape \(16, 3\); it must have shape \(16, 2\)",
    ),
    ({"wi_0": zeros(E, H + 8, I)}, ValueError, r"wi_0 has shape \(8, 24, 24\); .* \(8, 16, 24\), since x has width 16"),
    ({"wi_1": zeros(E, H, I + 8)}, ValueError, r"wi_1 has shape \(8, 16, 32\); it must have shape \(8, 16, 24\)"),
    (
        {"wo": zeros(E, H, I)},
        ValueError,
        r"wo has shape \(8, 16, 24\); it must have shape \(8, 24, 16\), since wi_0 has",
    ),
    ({"wo": zeros(E + 1, I, H)}, ValueError, r"wo has shape \(9, 24, 16\); it must have shape \(8, 24, 16\)"),
    (
        {"expert_ids": zeros(T, E + 1, dtype=np.int32), "expert_weights": zeros(T, E + 1)},
        ValueError,
        r"expert_ids has K = 9 experts per token of 8; the nearest legal K is 8",
    ),
    (
        {"x": zeros(0, H), "expert_ids": zeros(0, K, dtype=np.int32), "expert_weights": zeros(0, K)},
        ValueError,
        r"T, of x, is 0; the nearest legal value is 1",
    ),
    (
        {"expert_ids": zeros(T, 0, dtype=np.int32), "expert_weights": zeros(T, 0)},
        ValueError,
        r"K, of expert_ids, is 0; the nearest legal value is 1",
    ),
    # Options
    (
        {"activation": "swigelu"},
        ValueError,
        r"activation is 'swigelu'; it must be one of 'swiglu', 'gpt_oss'; the nearest is 'swiglu'",
    ),
    ({"activation": "gpt-oss"}, ValueError, r"activation is 'gpt-oss'; it must be one of .*; the nearest is 'gpt_oss'"),
    ({"activation": None}, ValueError, r"activation is None; it must be one of 'swiglu', 'gpt_oss'"),
    ({"activation_limit": 0}, ValueError, r"activation_limit is 0; it must be None or a positive number, such as 7.0"),
    ({"activation_limit": float("nan")}, ValueError, r"activation_limit is nan; it must be None or a positive number"),
    ({"activation_limit": "7"}, TypeError, r"activation_limit is '7'; it must be None or a Python number"),
    (
        {"activation_limit": np.ones(1)},
        TypeError,
        r"activation_limit is array\(\[1.\]\); it must be None or a Python number",
    ),
    (
        {"implementation": "mega"},
        ValueError,
        r"implementation is 'mega'; it must be one of .*; the nearest is 'megakernel'",
    ),
    ({"implementation": 3}, ValueError, r"implementation is 3; it must be one of 'megakernel', 'xla', 'reference'"),
    ({"config": None}, TypeError, r"config is None; it must be a mok_jax.MoKConfig"),
    (
        {"config": {"ring_rows": 128}, "implementation": "xla"},
        TypeError,
        r"config is \{'ring_rows': 128\}; .*MoKConfig",
    ),
    (
        {"axis_name": 3},
        TypeError,
        r"axis_name is 3; it must be the name of a mesh axis, a tuple of such names, or None",
    ),
    (
        {"axis_name": ()},
        TypeError,
        r"axis_name is \(\); it must be the name of a mesh axis, a tuple of such names, or None",
    ),
    ({"axis_name": "expert"}, ValueError, r"axis_name is 'expert', but no jax.shard_map .*axis_name=None for one rank"),
)


@pytest.mark.parametrize(
    ("changes", "exception", "text"), ARGUMENTS, ids=lambda v: " ".join(v) if isinstance(v, dict) else ""
)
def test_argument(changes, exception, text):
    with pytest.raises(exception, match=text):
        call(**changes)


@pytest.mark.parametrize(
    ("field", "exception", "text"),
    (
        ({"ring_rows": 100}, ValueError, r"ring_rows is 100; .* nearest legal value is 128"),
        (
            {"ring_rows": 200},
            ValueError,
            r"ring_rows is 200; it must be a multiple of 128; the nearest legal value is 256",
        ),
        ({"ring_rows": 0}, ValueError, r"ring_rows is 0; the nearest legal value is 128"),
        ({"ring_rows": 2**40}, ValueError, r"ring_rows is 1099511627776; the nearest legal value is 2147483520"),
        ({"ring_rows": 128.0}, TypeError, r"ring_rows is 128.0; it must be an int, at least 128"),
        ({"ring_rows": "128"}, TypeError, r"ring_rows is '128'; it must be an int, at least 128"),
        (
            {"minibatch_rows": 320},
            ValueError,
            r"minibatch_rows is 320; it must be a multiple of 128; the nearest legal value is 256",
        ),
        ({"minibatch_rows": -128}, ValueError, r"minibatch_rows is -128; the nearest legal value is 128"),
        ({"save": "pre_activation"}, ValueError, r"save is 'pre_activation'; .* the nearest is 'pre_activations'"),
        ({"save": None}, ValueError, r"save is None; it must be one of 'pre_activations', .*'nothing'"),
        ({"timeout_s": 0}, ValueError, r"timeout_s is 0; it must be a positive number of seconds, such as 1.0"),
        ({"timeout_s": float("nan")}, ValueError, r"timeout_s is nan; it must be a positive number of seconds"),
        ({"entry_timeout_s": -1.0}, ValueError, r"entry_timeout_s is -1.0; it must be a positive number of seconds"),
        ({"entry_timeout_s": "9"}, TypeError, r"entry_timeout_s is '9'; it must be a number of seconds, such as 1.0"),
        ({"comm_sms": -1}, ValueError, r"comm_sms is -1; the nearest legal value is 0"),
        ({"reserve_sms": True}, TypeError, r"reserve_sms is True; it must be an int, at least 0"),
        ({"host_comm_workers": 0}, ValueError, r"host_comm_workers is 0; the nearest legal value is 1"),
        ({"host_compute_workers": 0}, ValueError, r"host_compute_workers is 0; the nearest legal value is 1"),
        ({"host_delay_seed": None}, TypeError, r"host_delay_seed is None; it must be an int, 0 for no delays"),
    ),
    ids=lambda v: "-".join(f"{k}={w}" for k, w in v.items()) if isinstance(v, dict) else "",
)
def test_config(field, exception, text):
    with pytest.raises(exception, match=r"MoKConfig\." + text):
        MoKConfig(**field)


@pytest.mark.parametrize("implementation", ("megakernel", "xla", None))
def test_more_rows_than_can_be_counted(implementation):
    """Nothing is allocated: only shapes are asked for."""

    def shape_with(tokens):
        like = jax.ShapeDtypeStruct
        arrays = like((tokens, H), jnp.bfloat16), like((tokens, K), jnp.int32), like((tokens, K), jnp.float32)
        return jax.eval_shape(
            jax.grad(lambda *a: mok_jax.moe(*a, *INPUTS[3:6], implementation=implementation).sum(dtype=jnp.float32)),
            *arrays,
        )

    assert shape_with(2**29).shape == (2**29, H)
    with pytest.raises(
        ValueError,
        match=r"T, tokens of x on each device, is 1073741824: .* K = 2, .*; the nearest legal T is 1073741252",
    ):
        shape_with(2**30)
    shape_with(1073741252)


def test_traced_activation_limit():
    with pytest.raises(
        TypeError, match=r"activation_limit is .*Tracer.*; it must be None or a Python number, known while"
    ):
        jax.jit(lambda limit: call(activation_limit=limit))(2.0)


# Transformations


def of_x(x):
    return call(x=x)


def total(x):
    return of_x(x).sum()


FORWARD_MODE = TypeError, r"can't apply forward-mode autodiff \(jvp\) to a custom_vjp function"
FIRST_ORDER = NotImplementedError, r'mok_jax.moe has first derivatives in reverse mode only.*implementation="reference"'
VMAP = (
    NotImplementedError,
    r'mok_jax.moe does not support jax.vmap.*Reshape leading dimensions.*use implementation="reference"',
)
TRANSFORMED = {
    "jvp": (lambda x: jax.jvp(of_x, (x,), (x,)), FORWARD_MODE),
    "jitted jvp": (jax.jit(lambda x: jax.jvp(of_x, (x,), (x,))), FORWARD_MODE),
    "jvp of jitted": (lambda x: jax.jvp(jax.jit(of_x), (x,), (x,)), FORWARD_MODE),
    "linearize": (lambda x: jax.linearize(of_x, x)[1](x), FORWARD_MODE),
    "second derivative": (lambda x: jax.grad(lambda x: jax.grad(total)(x).sum())(x), FIRST_ORDER),
    "jitted second derivative": (
        jax.jit(lambda x: jax.grad(lambda x: jax.grad(jax.jit(total))(x).sum())(x)),
        FIRST_ORDER,
    ),
    "jvp of grad": (lambda x: jax.jvp(jax.grad(total), (x,), (x,)), FIRST_ORDER),
    "hessian": (lambda x: jax.hessian(total)(x), FIRST_ORDER),
    "vmap": (lambda x: jax.vmap(of_x)(x[None]), VMAP),
    "vmap of jitted": (lambda x: jax.vmap(jax.jit(of_x))(x[None]), VMAP),
    "vmap of grad": (lambda x: jax.vmap(jax.grad(total))(x[None]), VMAP),
    "jacrev": (lambda x: jax.jacrev(of_x)(x), VMAP),
}


@pytest.mark.parametrize("name", TRANSFORMED)
def test_transformation(name):
    transformed, (error, text) = TRANSFORMED[name]
    with pytest.raises(error, match=text):
        transformed(jnp.asarray(INPUTS.x))


def test_vmap_with_an_axis_name_is_no_shard_map():
    with pytest.raises(ValueError, match=r"axis_name is 'rank', but no jax.shard_map around this call is manual over"):
        jax.vmap(lambda x: call(x=x, axis_name="rank"), axis_name="rank")(INPUTS.x[None])


# Meshes


def mesh():
    return Mesh(np.array(jax.devices("cpu")[:4]).reshape(2, 2), ("data", "expert"))


@pytest.mark.parametrize("spec", (P("data"), P()))
@pytest.mark.parametrize("jit", (jax.jit, lambda f: f))
def test_sharded_argument_outside_shard_map(jit, spec):
    x = jax.device_put(INPUTS.x, NamedSharding(mesh(), spec))
    with pytest.raises(ValueError, match=r"outside jax.shard_map .* 4 devices.*inside jax.shard_map .*mok_jax.nnx.MoE"):
        jit(of_x)(x)


def test_gradient_of_a_sharded_argument_outside_shard_map():
    x = jax.device_put(INPUTS.x, NamedSharding(mesh(), P("data")))
    with pytest.raises(ValueError, match=r"outside jax.shard_map in a program for 4 devices"):
        jax.jit(jax.grad(total))(x)


def sharded(**options):
    moe = functools.partial(mok_jax.moe, axis_name="expert", **MEGAKERNEL)
    specs = {"in_specs": (P("expert"),) * 6, "out_specs": P("expert")}
    return jax.jit(jax.shard_map(moe, mesh=mesh(), **(specs | options)))


def test_partly_manual_shard_map():
    with pytest.raises(ValueError, match=r"not manual over mesh axes \['data'\].* axis_names=\{'data', 'expert'\}"):
        sharded(axis_names={"expert"})(*INPUTS[:6])


def test_experts_that_the_axis_does_not_divide():
    """JAX refuses it before we see the arrays: the text names argument, size and axis. The Flax layers pad."""
    with pytest.raises(ValueError, match=r"args\[3\] of shape float32\[7,16,24\].* 2 does not evenly divide 7"):
        sharded()(*INPUTS[:3], *(w[:7] for w in INPUTS[3:6]))


def test_fewer_experts_than_ranks_of_a_layer():
    with pytest.raises(
        ValueError, match=r"num_experts=1 must be at least the expert axis' size \(2\); the nearest is 2"
    ):
        MoE(H, I, 1, 1, mesh=mesh(), rngs=nnx.Rngs(0))


def test_top_k_counts_the_experts_of_all_ranks():
    ids, weights = zeros(T, 9, dtype=np.int32), zeros(T, 9)
    with pytest.raises(ValueError, match=r"K = 9 experts per token of 8; the nearest legal K is 8"):
        sharded()(INPUTS.x, ids, weights, *INPUTS[3:6])


# Installations


def test_missing_native_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "mok_jax._native", None)
    monkeypatch.delattr(mok_jax, "_native", raising=False)
    native.library.cache_clear()
    api._run.clear_cache()  # A call that has been traced with the same shapes would not look for it again.
    try:
        with pytest.raises(
            ImportError, match=r'implementation="megakernel" needs .*`make build`.*implementation="xla"'
        ):
            call()
        assert np.isfinite(call(implementation="xla")).all()
    finally:
        native.library.cache_clear()
