"""JAX's debug modes: what its own layers get through, the function and both Flax layers get through as well.

Each cell of the matrix computes the same as without the mode. A mode that looks for NaN sees memory that held some.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import mok_jax
from mok_jax import linen
from mok_jax.nnx import MoE
from mok_jax.sharding import make_mesh
from support.compare import relative_l2

MODES = {
    "debug_nans": lambda: jax.debug_nans(True),
    "debug_infs": lambda: jax.debug_infs(True),
    "disable_jit": jax.disable_jit,
    "enable_checks": lambda: jax.enable_checks(True),
    "check_tracer_leaks": jax.checking_leaks,
    "rank_promotion": lambda: jax.numpy_rank_promotion("raise"),
    "dtype_promotion": lambda: jax.numpy_dtype_promotion("strict"),
    "x64": lambda: jax.enable_x64(True),
    "transfer_guard": lambda: jax.transfer_guard("disallow"),
}
WAYS = {
    "eager": lambda loss, arrays: loss(arrays),
    "jit": lambda loss, arrays: jax.jit(loss)(arrays),
    "grad": lambda loss, arrays: jax.grad(loss)(arrays),
    "grad of jit": lambda loss, arrays: jax.grad(jax.jit(loss))(arrays),
    "mesh": lambda loss, arrays: jax.jit(jax.grad(loss))(arrays),
}
# JAX calls the gradient of its own all-to-all and all-gather inside shard_map a leak, with nothing of ours around it.
NOT_EVEN_JAX = {("check_tracer_leaks", front_end, "mesh") for front_end in ("xla", "reference")}

TOKENS, HIDDEN, INTERMEDIATE, EXPERTS, K = 12, 16, 24, 4, 2
LAYER = {
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_experts": EXPERTS,
    "num_experts_per_tok": K,
    "score_function": "sigmoid",
    "num_groups": 2,
    "group_topk": 1,
    "expert_bias": True,
    "aux_loss_coeff": 0.1,
    "seq_aux": True,
    "z_loss_coeff": 0.1,
    "num_shared_experts": 1,
    "shared_expert_gate": True,
    "shared_activation_limit": 7.0,
    "router_bias": True,
    "use_bias": True,
    "activation": "gpt_oss",
    "activation_limit": 7.0,
    "dtype": jnp.bfloat16,
}


def make_function(implementation, mesh):
    """``mok_jax.moe`` as a loss of its arrays: tokens in bf16, weights in f32."""
    rng, experts = np.random.default_rng(0), 2
    ids = jnp.asarray(rng.integers(0, experts, (TOKENS, K)), jnp.int32)
    shapes = (TOKENS, HIDDEN), (TOKENS, K), *[(experts, HIDDEN, INTERMEDIATE)] * 2, (experts, INTERMEDIATE, HIDDEN)
    x, *others = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes)
    moe = functools.partial(mok_jax.moe, implementation=implementation)
    if mesh is not None:
        each = P(mesh.axis_names)
        moe = functools.partial(moe, axis_name=mesh.axis_names)
        moe = jax.shard_map(moe, mesh=mesh, in_specs=(each,) * 6, out_specs=each)
        x, ids, *others = jax.device_put((x, ids, *others), NamedSharding(mesh, each))

    def loss(arrays):
        x, weights, *experts = arrays
        return jnp.sum(jnp.square(moe(x, ids, weights, *experts).astype(jnp.float32)))

    return loss, (x.astype(jnp.bfloat16), *others)


def make_nnx(mesh, **changes):
    layer = MoE(**LAYER | changes, mesh=mesh, rngs=nnx.Rngs(0))
    graph, state, bias = nnx.split(layer, nnx.Param, ...)
    return total_of(lambda state, *inputs: nnx.merge(graph, state, bias)(*inputs), mesh), state


def make_linen(mesh, **changes):
    layer = linen.MoE(**LAYER | changes, mesh=mesh)
    variables = nn.unbox(jax.jit(layer.init)(jax.random.key(0), jnp.ones((2, 3, HIDDEN))))
    state = {"moe_state": variables["moe_state"]}
    return total_of(lambda params, *inputs: layer.apply({"params": params, **state}, *inputs), mesh), variables[
        "params"
    ]


def total_of(apply, mesh):
    """A loss of the parameters of a layer, with tokens that are left out."""
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.normal(size=(2, TOKENS // 2, HIDDEN)), jnp.float32)
    mask = jnp.asarray(rng.random((2, TOKENS // 2)) < 0.8)
    if mesh is not None:
        x, mask = jax.device_put((x, mask), NamedSharding(mesh, P()))

    def loss(params):
        out = apply(params, x, mask)
        return jnp.sum(jnp.square(out.output.astype(jnp.float32))) + out.aux_loss + out.z_loss

    return loss


FRONT_ENDS = {
    "megakernel": functools.partial(make_function, "megakernel"),
    "xla": functools.partial(make_function, "xla"),
    "reference": functools.partial(make_function, "reference"),
    "nnx": make_nnx,
    "linen": make_linen,
}


# The megakernel, which has one activation there, in everything but the mesh.
ON_A_GPU = {
    "megakernel": FRONT_ENDS["megakernel"],
    "nnx": functools.partial(make_nnx, activation="swiglu"),
    "linen": functools.partial(make_linen, activation="swiglu"),
}


@functools.cache
def problem(platform, front_end, way):
    """The loss, its arrays, and what comes out of it without any mode."""
    mesh = make_mesh(devices=jax.devices(platform)[:2]) if way == "mesh" else None
    loss, arrays = (FRONT_ENDS if platform == "cpu" else ON_A_GPU)[front_end](mesh)
    return loss, arrays, jax.device_get(WAYS[way](loss, arrays))


def dirty_memory():
    """Frees arrays that, read as whatever floating dtype, hold NaN and infinity."""
    for size in 2 ** np.arange(10, 20):
        jax.block_until_ready([jnp.full(size, 0xFFFF7F80 + i, jnp.uint32) for i in range(4)])


def check_mode(mode, platform, front_end, way):
    loss, arrays, want = problem(platform, front_end, way)
    dirty_memory()
    step = functools.partial(WAYS[way], loss)
    if mode == "transfer_guard":
        # It is for what runs in a compiled step: JAX's own gradient and compiler move constants.
        step = jax.jit(step)
        step(arrays)
    with MODES[mode]():
        got = step(arrays)
    for got_leaf, want_leaf in zip(jax.tree.leaves(jax.device_get(got)), jax.tree.leaves(want), strict=True):
        assert got_leaf.dtype == want_leaf.dtype and relative_l2(got_leaf, want_leaf) < 1e-2


def check_that_a_nan_is_found(platform, front_end, way):
    loss, arrays, _ = problem(platform, front_end, way)
    first, *others = jax.tree.leaves(arrays)
    broken = jax.tree.unflatten(jax.tree.structure(arrays), [first.at[(1,) * first.ndim].set(jnp.nan), *others])
    # Searching a shard_map for the operation that made it, JAX calls itself until it must stop, of its own too.
    found = (FloatingPointError, RecursionError) if way == "mesh" else FloatingPointError
    with jax.debug_nans(True), pytest.raises(found):
        WAYS[way](loss, broken)


@pytest.mark.parametrize(
    ("mode", "front_end", "way"), [c for c in itertools.product(MODES, FRONT_ENDS, WAYS) if c not in NOT_EVEN_JAX]
)
def test_mode(mode, front_end, way):
    check_mode(mode, "cpu", front_end, way)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_a_nan_is_found(front_end, way):
    check_that_a_nan_is_found("cpu", front_end, way)


@pytest.mark.gpu
@pytest.mark.parametrize("way", [way for way in WAYS if way != "mesh"])
@pytest.mark.parametrize("front_end", ON_A_GPU)
@pytest.mark.parametrize("mode", MODES)
def test_mode_on_a_gpu(mode, front_end, way):
    check_mode(mode, "gpu", front_end, way)


@pytest.mark.gpu
@pytest.mark.parametrize("way", [way for way in WAYS if way != "mesh"])
@pytest.mark.parametrize("front_end", ON_A_GPU)
def test_a_nan_is_found_on_a_gpu(front_end, way):
    check_that_a_nan_is_found("gpu", front_end, way)
