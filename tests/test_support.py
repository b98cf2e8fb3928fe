"""Where the megakernel runs: why it does not in a place, what ``implementation=None`` then chooses, where a call is."""

import dataclasses
import functools
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import mok_jax
from mok_jax import api, native
from mok_jax.nnx import MoE
from mok_jax.support import Place, place_of_program, why_not
from support.cases import Case, make, uniform
from support.processes import LIMIT_S, PREAMBLE, free_port, start_python

T = 16
INPUTS = make(Case("places", T, 2, 8, 16, 24, uniform), "float32")


def like(width=16, inner=24, experts=8, dtype=jnp.bfloat16):
    """Shapes of ``x`` and ``wi_0``."""
    return jax.ShapeDtypeStruct((T, width), dtype), jax.ShapeDtypeStruct((experts, width, inner), dtype)


def chosen(ranks=1, activation="swiglu", **shapes):
    return api.choose_implementation(None, *like(**shapes), ranks, activation)


def test_missing_native_library_falls_back(monkeypatch):
    monkeypatch.setattr(native, "missing", lambda: ImportError("it was not built"))
    api._warn_once.cache_clear()
    with pytest.warns(match=r"using implementation='xla': it was not built"):
        assert chosen() == "xla"


HOPPER = Place("cuda", compute_capability="9.0")

# (place, changes of a legal call, exception, what its text must say)
REFUSED = (
    (Place("tpu"), {}, NotImplementedError, r"no kernel for platform 'tpu'; use implementation=\"xla\""),
    (Place("cpu"), {"dtype": jnp.float64}, TypeError, r"x has dtype float64; .*takes float32 or bfloat16: x\.astype\("),
    (Place("cpu", processes=2), {"ranks": 4}, ValueError, r"EP is 4, in 2 processes; on CPUs .*use one process with"),
    (
        Place("cuda", has_kernels=False),
        {},
        NotImplementedError,
        r"built without CUDA, .*: build it with nvcc on the path",
    ),
    (
        Place("cuda", compute_capability="10.0"),
        {},
        NotImplementedError,
        r"no kernel for compute capability 10\.0 yet, ",
    ),
    (
        HOPPER,
        {"dtype": jnp.float32},
        TypeError,
        r"x has dtype float32; .*x\.astype\(jnp\.bfloat16\), or dtype=jnp.bflo",
    ),
    (HOPPER, {"width": 20}, ValueError, r"H, of x \(hidden_size of a layer\), is 20; .*legal value is (16|24)"),
    (HOPPER, {"inner": 30}, ValueError, r"I, of wi_0 \(intermediate_size of .*\), is 30; .*legal value is 32"),
    (HOPPER, {"experts": 5786}, ValueError, r"E_local, of wi_0 .*, is 5786; .*room for 5785, the nearest legal value"),
    (
        HOPPER,
        {"activation": "gpt_oss"},
        NotImplementedError,
        r"activation is 'gpt_oss'; on GPUs .* 'swiglu' only so far",
    ),
    (
        dataclasses.replace(HOPPER, nccl="2.28.9"),
        {"ranks": 2},
        NotImplementedError,
        r"EP is 2; on several GPUs .* wants NCCL 2\.29 or newer, and 2\.28\.9 is installed: pip install -U nvidia-nccl",
    ),
    (HOPPER, {"ranks": 73}, ValueError, r"EP is 73; on GPUs .* has room for the 72 of an NVLink domain, the nearest "),
)


@pytest.mark.parametrize(("place", "changes", "exception", "text"), REFUSED, ids=lambda v: str(v)[:40])
def test_why_not(place, changes, exception, text):
    options = {"ranks": 1, "activation": "swiglu"}
    shapes = {name: value for name, value in changes.items() if name not in options}
    refusal = why_not(place, *like(**shapes), **(options | {k: changes[k] for k in options if k in changes}))
    assert type(refusal) is exception
    assert re.search(text, str(refusal)) and 'implementation="xla"' in str(refusal)


@pytest.mark.parametrize(
    ("place", "changes"),
    (
        (Place("cpu"), {"width": 20, "dtype": jnp.float32}),
        (Place("cpu"), {"experts": 10_000}),
        (HOPPER, {"experts": 5785}),
        (dataclasses.replace(HOPPER, nccl="2.28.9"), {}),  # one rank needs none
        (Place("cuda"), {}),  # of a GPU that is elsewhere nothing is known
    ),
)
def test_why_not_of_what_runs(place, changes):
    assert why_not(place, *like(**changes), 1, "swiglu") is None
    assert why_not(Place("cpu", processes=2), *like(), 1, "swiglu") is None
    assert why_not(dataclasses.replace(HOPPER, nccl="2.30.7"), *like(), 72, "swiglu") is None


@pytest.fixture
def hopper(monkeypatch):
    """A Hopper GPU that is not there as the only device, and an extension with kernels for it."""
    gpu = types.SimpleNamespace(platform="gpu", device_kind="H200", compute_capability="9.0")
    monkeypatch.setattr(jax, "devices", lambda platform=None: [gpu])
    monkeypatch.setattr(native, "has_cuda", lambda: True)
    api._warn_once.cache_clear()
    with jax.default_device(None):
        yield gpu


@pytest.mark.parametrize("program", ("assigned", "default"))
def test_place_of_a_program(hopper, monkeypatch, program):
    """Of its own devices all is known; of a platform that it is only lowered for, nothing but that."""
    hopper.process_index = 0
    there = {"assigned": (hopper,), "default": None}[program]
    context = types.SimpleNamespace(
        axis_context=types.SimpleNamespace(device_assignment=there),
        backend=types.SimpleNamespace(local_devices=lambda: [hopper]),
    )
    assert place_of_program(context, "cuda") == HOPPER
    monkeypatch.setattr(native, "has_cuda", lambda: False)
    assert not place_of_program(context, "cuda").has_kernels
    assert place_of_program(context, "tpu") == Place("tpu")


def test_none_on_a_gpu_chooses_what_runs(hopper):
    assert chosen() == chosen(ranks=2) == "megakernel"
    for changes, reason in (
        ({"width": 20}, "H, of x .* is 20"),
        ({"activation": "gpt_oss"}, "activation is 'gpt_oss'"),
        ({"dtype": jnp.float32}, "x has dtype float32"),
        ({"ranks": 73}, "EP is 73"),
    ):
        with pytest.warns(match=rf"mok_jax: using implementation='xla': {reason}"):
            assert chosen(**changes) == "xla"
    hopper.compute_capability = "8.0"
    with pytest.warns(match=r"no kernel for compute capability 8\.0"):
        assert chosen() == "xla"


def test_none_warns_once(hopper):
    with pytest.warns() as warned:
        assert chosen(width=20) == chosen(width=20) == "xla"
    assert len(warned) == 1


def test_the_warning_is_of_the_users_line(monkeypatch):
    """Through a layer as well, with JAX and Flax in between."""
    monkeypatch.setattr(native, "missing", lambda: ImportError("it was not built"))
    api._warn_once.cache_clear()
    layer = MoE(24, 16, num_experts=2, num_experts_per_tok=1, rngs=nnx.Rngs(0))
    with pytest.warns(match="using implementation='xla': it was not built") as warned:
        nnx.jit(lambda layer, x: layer(x).output)(layer, jnp.ones((3, 24)))
    assert [warning.filename for warning in warned] == [__file__]
    api._warn_once.cache_clear()


def test_none_looks_where_the_call_will_run(hopper):
    """Beside a GPU that would refuse it: on arrays, in a mesh and with a default device of CPUs."""
    cpus = jax.local_devices(backend="cpu")[:2]
    arrays = [jax.device_put(a, cpus[0]) for a in INPUTS[:6]]
    seen = []

    def of_rank(x, ids, weights, wi_0, wi_1, wo):
        seen.append(api.choose_implementation(None, x, wi_0, 2, "swiglu"))
        return x

    mesh = Mesh(np.array(cpus), "expert")
    jax.eval_shape(jax.shard_map(of_rank, mesh=mesh, in_specs=P("expert"), out_specs=P("expert")), *arrays)
    seen.append(api.choose_implementation(None, arrays[0], arrays[3], 2, "swiglu"))
    with jax.default_device(cpus[0]):
        seen.append(chosen(dtype=jnp.float32))
    assert seen == ["megakernel"] * 3


PROCESS = (
    PREAMBLE
    + """
import functools, warnings
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
jax.distributed.initialize("127.0.0.1:PORT", num_processes=2, process_id=int(sys.argv[1]))
import mok_jax
from support.compare import relative_l2
from test_support import INPUTS

def run(devices, **options):
    mesh = Mesh(np.array(devices), ("expert",))
    moe = functools.partial(mok_jax.moe, axis_name="expert", **options)
    step = jax.jit(jax.shard_map(moe, mesh=mesh, in_specs=P("expert"), out_specs=P("expert")))
    shard = NamedSharding(mesh, P("expert"))
    y = step(*(jax.make_array_from_callback(a.shape, shard, lambda i: a[i]) for a in INPUTS[:6]))
    return [(part.index, np.asarray(part.data)) for part in y.addressable_shards]

want = np.asarray(mok_jax.moe(*INPUTS[:6], implementation="reference"))
def check(parts):
    assert len(parts) == 4 and all(relative_l2(part, want[index]) < 1e-5 for index, part in parts)

try:
    run(jax.devices(), implementation="megakernel")
except ValueError as error:
    print("refused:", error)
check(run(jax.local_devices(), implementation="megakernel"))
with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    assert relative_l2(mok_jax.moe(*INPUTS[:6]), want) < 1e-5 and not warned
    for _ in range(2):
        check(run(jax.devices()))
print(*("warned: " + str(warning.message) for warning in warned))
"""
)


def test_several_cpu_processes():
    """Two real ones. One rank needs no peer, and ranks of one process none elsewhere; of others, both are told."""
    code = PROCESS.replace("PORT", str(free_port()))
    processes = [start_python(code, rank) for rank in "01"]
    try:
        printed = [process.communicate(timeout=LIMIT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for output, errors in printed:
        refused, *warned = re.findall(r"^(?:refused|warned): .*$", output, re.MULTILINE) or [errors]
        assert refused.startswith("refused: EP is 8, in 2 processes"), errors
        assert "use one process with more virtual devices" in refused and 'implementation="xla"' in refused
        assert warned == [refused.replace("refused: ", "warned: mok_jax: using implementation='xla': ")], errors


def lower_for_gpu(tokens=16, width=16, inner=24, dtype=jnp.bfloat16, activation="swiglu", platforms=("cuda",)):
    """Lowers a call for a GPU, which needs none."""
    shapes = [
        (tokens, width),
        (tokens, 1),
        (tokens, 1),
        (64, width, inner),
        (64, width, inner),
        (64, inner, width),
    ]
    dtypes = [dtype, jnp.int32, jnp.float32, dtype, dtype, dtype]
    call = functools.partial(mok_jax.moe, implementation="megakernel", activation=activation)
    arguments = [jax.ShapeDtypeStruct(shape, d) for shape, d in zip(shapes, dtypes, strict=True)]
    return jax.jit(call).trace(*arguments).lower(lowering_platforms=platforms)


def test_lowers_for_a_gpu():
    assert "mok_forward" in lower_for_gpu().as_text()


@pytest.mark.parametrize(
    ("options", "text"), (({"width": 20}, "H, of x"), ({"activation": "gpt_oss"}, "activation is"))
)
def test_lowering_for_a_gpu_refuses(options, text):
    """What a trace cannot know; the reasons are in `REFUSED`."""
    with pytest.raises((ValueError, NotImplementedError), match=rf'{text}.*implementation="xla"'):
        lower_for_gpu(**options)


def test_lowering_for_other_platforms_refuses():
    for platforms in (("tpu",), ("cpu", "tpu")):
        with pytest.raises(NotImplementedError, match=r"no kernel for platform 'tpu'; use implementation=\"xla\""):
            lower_for_gpu(platforms=platforms)
