"""Plans: every byte is one that a traced program has, and what does not fit is refused with what would."""

import dataclasses
import functools
import json
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import mok_jax
from mok_jax import native, plan, xla_bytes
from mok_jax.__main__ import main
from mok_jax.config import SAVE_POLICIES
from mok_jax.plan import GIB, Request, make_plan
from mok_jax.sharding import make_mesh
from mok_jax.zoo import LAYERS
from support.processes import run_python


def run_main(line):
    return main(line.split())


def fitting(model, **changes):
    """A request of the megakernel that fits, on one rack of 72."""
    ranks = 72 if LAYERS[model].num_experts >= 72 else 8
    return Request(model=model, gpus=72, **({"expert_parallelism": ranks, "implementation": "megakernel"} | changes))


def equations(jaxpr, name):
    """All equations of one primitive, at any depth."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == name:
            yield equation
        for value in jax.tree.leaves(equation.params, is_leaf=lambda v: hasattr(v, "eqns") or hasattr(v, "jaxpr")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from equations(inner, name)


def nbytes(variables):
    return sum(math.prod(v.aval.shape) * v.aval.dtype.itemsize for v in variables)


def trace_step(request):
    """The equations of forward and backward in a training step of the layer, traced from shapes over 72 devices."""
    layer, planned = LAYERS[request.model], plan.plan_mesh(request)
    mesh = make_mesh(expert_parallelism=planned.expert, devices=jax.devices("cpu")[:72])
    experts, tokens = planned.expert * planned.experts_per_gpu, request.tokens_per_gpu * 72
    hidden, intermediate, top_k = layer.hidden_size, layer.intermediate_size, layer.num_experts_per_tok
    config = mok_jax.MoKConfig(save=request.save, ring_rows=request.ring_rows)
    moe = functools.partial(mok_jax.moe, axis_name="expert", config=config, implementation="megakernel")
    by_token, by_expert = P(mesh.axis_names), P("expert")
    step = jax.shard_map(moe, mesh=mesh, in_specs=(by_token,) * 3 + (by_expert,) * 3, out_specs=by_token)

    def loss(x, weights, wi_0, wi_1, wo, ids):
        return step(x, ids, weights, wi_0, wi_1, wo).astype(jnp.float32).sum()

    wi = jax.ShapeDtypeStruct((experts, hidden, intermediate), request.param_dtype)
    jaxpr = jax.make_jaxpr(jax.grad(loss, argnums=range(5)))(
        jax.ShapeDtypeStruct((tokens, hidden), jnp.bfloat16),
        jax.ShapeDtypeStruct((tokens, top_k), np.float32),
        wi,
        wi,
        jax.ShapeDtypeStruct((experts, intermediate, hidden), request.param_dtype),
        jax.ShapeDtypeStruct((tokens, top_k), np.int32),
    ).jaxpr
    (forward,), (backward,) = (list(equations(jaxpr, name)) for name in ("mok_forward", "mok_backward"))
    return forward, backward


REQUESTS = [
    *(fitting(model) for model in LAYERS),
    *(fitting("kimi-k2", save=save, ring_rows=rows) for save in SAVE_POLICIES for rows in (None, 4096)),
    fitting("qwen3-235b-a22b", param_dtype="bfloat16", tokens_per_gpu=5),
    *(fitting("gpt-oss-120b", expert_parallelism=1, save=save) for save in SAVE_POLICIES),
]


@pytest.mark.parametrize("asked", REQUESTS, ids=lambda r: f"{r.model}-{r.save}-{r.ring_rows}-{r.param_dtype}")
def test_bytes_are_those_of_a_traced_step(asked):
    made = make_plan(asked)
    sizes, layer = made.bytes, LAYERS[asked.model]
    router = (layer.hidden_size + layer.router_bias) * layer.num_experts
    router_bytes = router * np.dtype(asked.param_dtype).itemsize
    forward, backward = trace_step(asked)

    y, row_table, expert_rows, _, *rings, forward_workspace = forward.outvars
    kept = backward.invars[10:]  # after the operands of the forward, `where`, `dy`, row table and rows per expert
    assert sizes.residuals == nbytes([row_table, expert_rows, *kept])
    assert sizes.forward_buffers == nbytes(rings) - nbytes(kept)
    assert sizes.workspace == nbytes([forward_workspace]) == nbytes(backward.outvars[-1:])
    assert sizes.forward_activations == nbytes([y])
    assert sizes.inputs == nbytes(forward.invars[:3])

    assert sizes.gradients == router_bytes + nbytes(backward.outvars[2:5])
    assert sizes.backward_buffers == nbytes(backward.outvars[5:-1])
    assert sizes.backward_activations == nbytes([backward.invars[7], *backward.outvars[:2]])

    experts = nbytes(forward.invars[3:6])  # in bf16, as the kernel takes them
    if asked.param_dtype == "float32":
        assert (sizes.weight_copy, sizes.parameters) == (experts, router_bytes + 2 * experts)
    else:
        assert (sizes.weight_copy, sizes.parameters) == (0, router_bytes + experts)
    call = forward.params["call"]
    assert (made.ring_rows, made.max_rows) == (call.ring_rows, call.max_rows)


@pytest.mark.parametrize("shape", [(1, 1, 8), (777, 3, 2880), (4096, 8, 7168), (1 << 20, 8, 7168)])
def test_arena_has_room_for_what_peers_read_and_write(shape):
    """``x`` and ``dy``; for each slot a row, its router weight and that one's gradient; twice the ids of both ranks."""
    tokens, top_k, hidden = shape
    size = native.library().arena_bytes(ranks=2, tokens=tokens, top_k=top_k, hidden=hidden)
    content = 2 * tokens * hidden * 2 + tokens * top_k * (hidden * 2 + 2 * 4 + 2 * 2 * 4)
    assert content < size < 1.25 * (content + 8192)


def test_a_known_cluster():
    made = make_plan(Request(model="kimi-k2", gpus=576, implementation="megakernel"))
    assert made.mesh == plan.GpuMesh(
        data=8,
        expert=72,
        domains=8,
        idle_gpus=0,
        experts_per_gpu=6,
        padding=48,
        gpus_with_experts=64,
        busiest_over_mean=1.125,
    )
    parameters = 6 * 3 * 7168 * 2048 + 7168 * 384
    assert (made.bytes.parameters, made.bytes.optimizer) == (4 * parameters, 8 * parameters)
    idle = plan.plan_mesh(Request(model="kimi-k2", gpus=576, expert_parallelism=64, allow_idle=True))
    assert (idle.data, idle.expert, idle.idle_gpus, idle.experts_per_gpu, idle.padding) == (8, 64, 64, 6, 0)


@pytest.mark.parametrize(("gpus", "domain", "size"), [(72, 72, 36), (72, 36, 12), (70, 8, 2), (71, 9, 4), (6, 72, 6)])
def test_mesh_is_that_of_make_mesh(gpus, domain, size):
    devices = jax.devices("cpu")[:gpus]
    real = make_mesh(expert_parallelism=size, domain_size=domain, devices=devices, allow_idle=True)
    request = Request(model="kimi-k2", gpus=gpus, domain=domain, expert_parallelism=size, allow_idle=True)
    made = plan.plan_mesh(request)
    assert (made.data, made.expert) == real.devices.shape
    assert made.idle_gpus == gpus - real.size


def test_state_and_residuals_grow_with_layers_and_nothing_else():
    one, three = (dataclasses.asdict(make_plan(fitting("glm-5.2", layers=n)).bytes) for n in (1, 3))
    grown = {name for name in one if three[name] == 3 * one[name]}
    assert grown == {"parameters", "gradients", "optimizer", "inputs", "residuals"}
    assert all(three[name] == one[name] for name in one.keys() - grown)


@pytest.mark.parametrize(
    ("intermediate", "ratios"), [(2048, (0.34, 0.50, 0.59, 0.66)), (1024, (0.67, 1.01, 1.18, 1.32))]
)
def test_communication_over_compute(intermediate, ratios):
    ours = [plan.communication_over_compute(1 - 1 / n, intermediate, 650e12, 315e9) for n in (2, 4, 8, 64)]
    np.testing.assert_allclose(ours, ratios, atol=0.01)
    twice = make_plan(fitting("kimi-k2", bandwidth_gbs=630, tflops=1300))
    assert twice.communication_over_compute == make_plan(fitting("kimi-k2")).communication_over_compute


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"model": "kimi"}, r"model is 'kimi'; .* nearest is 'kimi-k2'"),
        ({"gpus": 0}, r"gpus=0 .* nearest is 1"),
        ({"gpus": 580}, r"gpus=580 must be a multiple of domain=72, .* last 4 .* nearest is 576 \(or allow_idle\)"),
        ({"domain": 0}, r"domain=0 must be from 1 to 72; the nearest is 1"),
        ({"domain": 73}, r"domain=73 must be from 1 to 72; the nearest is 72"),
        ({"expert_parallelism": 80}, r"expert_parallelism=80 must be from 1 to the 72 .* nearest is 72"),
        ({"expert_parallelism": 64}, r"expert_parallelism=64 would leave devices idle .* is 72"),
        ({"model": "mixtral-8x7b"}, r"expert_parallelism=72 is more than the 8 experts of mixtral-8x7b; .* is 8"),
        (
            {"model": "mixtral-8x7b", "domain": 36, "gpus": 36, "expert_parallelism": 12},
            r"expert_parallelism=12 is more than the 8 experts .* is 6",
        ),
        ({"tokens_per_gpu": 0}, r"tokens_per_gpu=0 .* nearest is 1"),
        ({"implementation": "reference"}, r"implementation is 'reference'; it must be one of 'megakernel', 'xla'"),
        ({"compute_capability": "hopper"}, r"compute_capability='hopper' must be two numbers, such as 9\.0"),
        ({"save": "all"}, r"save is 'all'; .* nearest is"),
        ({"ring_rows": 100, "implementation": "megakernel"}, r"ring_rows is 100; .* nearest legal value is 128"),
        ({"param_dtype": "float16"}, r"param_dtype is 'float16'; .* nearest is 'bfloat16'"),
        ({"memory_gib": 0}, r"memory_gib=0 must be a positive number, such as 141"),
    ],
)
def test_refusals_name_argument_value_and_nearest(changes, text):
    with pytest.raises(ValueError, match=text):
        make_plan(Request(**{"model": "kimi-k2", "gpus": 576} | changes))


@pytest.mark.parametrize(
    ("changes", "argument"), [({"tokens_per_gpu": 1 << 18}, "tokens_per_gpu"), ({"layers": 60}, "layers")]
)
def test_what_does_not_fit_is_refused_with_the_most_that_does(changes, argument):
    request = fitting("kimi-k2", **changes)
    text = r"memory_gib=141: a GPU needs .* GiB with 'megakernel' .*; the nearest legal value"
    with pytest.raises(ValueError, match=text) as refusal:
        make_plan(request)
    nearest = int(re.search(rf"{argument}={changes[argument]} is (\d+)\.$", str(refusal.value)).group(1))
    assert make_plan(dataclasses.replace(request, **{argument: nearest})).bytes.peak <= 141 * GIB
    with pytest.raises(ValueError, match="memory_gib=141"):
        make_plan(dataclasses.replace(request, **{argument: nearest + 1}))


def test_too_little_memory_for_anything():
    request = fitting("kimi-k2", memory_gib=2)
    with pytest.raises(ValueError, match=r"memory_gib=2: .*; the nearest legal value of memory_gib is") as refusal:
        make_plan(request)
    nearest = float(re.search(r"memory_gib is (.*)\.$", str(refusal.value)).group(1))
    make_plan(dataclasses.replace(request, memory_gib=nearest))


WHY_NOT = (
    (Request(model="qwen3-235b-a22b", gpus=8, expert_parallelism=1, tokens_per_gpu=64), None),
    (Request(model="qwen3-235b-a22b", gpus=8, tokens_per_gpu=64), None),
    (Request(model="gpt-oss-120b", gpus=1, tokens_per_gpu=64), "activation is 'gpt_oss'; on GPUs"),
    (
        Request(model="mixtral-8x7b", gpus=1, tokens_per_gpu=64, compute_capability="10.0"),
        "no kernel for compute capability 10.0",
    ),
)


@pytest.mark.parametrize(("request_", "reason"), WHY_NOT)
def test_plans_are_of_what_would_run(request_, reason):
    request_ = dataclasses.replace(request_, param_dtype="bfloat16", optimizer_bytes=0, memory_gib=1e4)
    made = make_plan(request_)
    assert made.implementation == ("megakernel" if reason is None else "xla")
    assert made.refused_today is None
    named = {name: make_plan(dataclasses.replace(request_, implementation=name)) for name in plan.IMPLEMENTATIONS}
    assert made.bytes == named[made.implementation].bytes
    assert named["megakernel"].bytes.peak < named["xla"].bytes.peak
    assert named["xla"].refused_today is None
    for text in (made.why_not_megakernel, named["megakernel"].refused_today):
        assert text is None if reason is None else text.startswith(reason)


def test_xla_holds_all_slots_of_all_ranks():
    """What issue this answers: 28 GiB of kimi-k2's rows at EP 64, several times."""
    request = Request(model="kimi-k2", gpus=64, implementation="xla", memory_gib=1e4)
    made = make_plan(request)
    assert (made.ring_rows, made.max_rows) == (None, 64 * 4096 * 8)
    rows = made.max_rows * 7168 * 2
    assert rows == 28 * GIB and made.bytes.residuals > rows and made.bytes.backward_buffers > 6 * rows
    text = r"with 'xla' .*tokens_per_gpu=4096 is \d+\. The megakernel would not run: no kernel for compute capability"
    with pytest.raises(ValueError, match=text):
        make_plan(dataclasses.replace(request, memory_gib=141, compute_capability="10.0"))


def scanned_step(shape, layers):
    """A training step of ``"xla"`` layers under a scan, compiled for virtual devices; without layers, one forward."""
    mesh = make_mesh(devices=jax.devices("cpu")[: shape.ranks])
    options = {"activation": shape.activation, "activation_limit": shape.activation_limit}
    moe = functools.partial(mok_jax.moe, axis_name="expert", implementation="xla", **options)
    step = jax.shard_map(moe, mesh=mesh, in_specs=(P("expert"),) * 6, out_specs=P("expert"))

    def loss(x, stacked):
        y, _ = jax.lax.scan(lambda x, layer: (step(x, *layer), None), x, stacked)
        return y.astype(jnp.float32).sum()

    def like(*sizes, dtype=shape.param_dtype, along=(None, "expert")):
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=jax.NamedSharding(mesh, P(*along)))

    tokens, experts = shape.ranks * shape.tokens, shape.ranks * shape.local_experts
    x = like(tokens, shape.hidden, dtype=shape.dtype, along=("expert",))
    stacked = (
        like(max(layers, 1), tokens, shape.top_k, dtype=np.int32),
        like(max(layers, 1), tokens, shape.top_k, dtype=np.float32),
        *[like(max(layers, 1), experts, shape.hidden, shape.intermediate)] * 2,
        like(max(layers, 1), experts, shape.intermediate, shape.hidden),
    )
    program = jax.grad(loss, (0, 1), allow_int=True) if layers else loss
    return jax.jit(program).lower(x, stacked).compile().memory_analysis().temp_size_in_bytes


BF16, F32 = np.dtype(jnp.bfloat16), np.dtype(np.float32)


@pytest.mark.parametrize(
    "shape",
    (
        xla_bytes.Shape(4, 128, 4, 1, 1024, 512, BF16, F32, "swiglu", None),
        xla_bytes.Shape(8, 64, 4, 3, 256, 512, BF16, F32, "gpt_oss", 7.0),
        xla_bytes.Shape(1, 512, 4, 4, 1024, 512, BF16, BF16, "swiglu", None),
    ),
)
def test_bytes_of_xla_are_those_of_compiled_steps(shape):
    """What one more layer keeps; a step of two within 15 %, and a forward within 35 %: CPUs have copies too."""
    sizes = xla_bytes.count(shape)
    forward, two, three = (scanned_step(shape, layers) for layers in (0, 2, 3))
    print(f"{three - two} of {sizes.kept}, {two} of {2 * sizes.kept + sizes.backward}, {forward} of {sizes.forward}")
    assert three - two == pytest.approx(sizes.kept, rel=1e-3)
    assert two == pytest.approx(2 * sizes.kept + sizes.backward, rel=0.15)
    assert forward == pytest.approx(sizes.forward, rel=0.35)


def test_command_prints_a_table(capsys):
    line = "plan --model kimi-k2 --gpus 576 --domain 72"
    elsewhere = line + " --compute-capability 10.0"
    assert run_main(elsewhere + " --implementation megakernel") == plan.REFUSED_TODAY
    printed = capsys.readouterr()
    for part in ("kimi-k2 on 576 GPUs", "refused today", "8 x 72", "parameters", "arena", "buffers, backward", "0.66"):
        assert part in printed.out
    assert printed.err.startswith("refused today: no kernel for compute capability 10.0")
    assert run_main(elsewhere + " --tokens-per-gpu 128") == plan.FITS
    text = capsys.readouterr().out
    assert "not the megakernel" in text and "arena" not in text
    assert run_main(line) == plan.FITS
    assert "not the megakernel" not in capsys.readouterr().out


def test_command_prints_json(capsys):
    line = "plan --model kimi-k2 --gpus 576 --expert-parallelism 64 --allow-idle --json --implementation megakernel"
    line += " --compute-capability 10.0"
    assert run_main(line) == plan.REFUSED_TODAY
    printed = json.loads(capsys.readouterr().out)
    changes = {"expert_parallelism": 64, "allow_idle": True, "implementation": "megakernel"}
    changes["compute_capability"] = "10.0"
    made = make_plan(Request(model="kimi-k2", gpus=576, **changes))
    assert printed == made.as_dict()
    assert printed["bytes"]["peak"] == made.bytes.peak
    assert printed["refused_today"] == printed["why_not_megakernel"]


def test_command_refuses(capsys):
    refused = "plan --model mixtral-8x7b --gpus 72"
    assert run_main(refused) == plan.DOES_NOT_FIT
    assert capsys.readouterr().err.startswith("refused: expert_parallelism=72")
    assert run_main(refused + " --json") == plan.DOES_NOT_FIT
    assert json.loads(capsys.readouterr().out)["refused"].startswith("expert_parallelism=72")


def test_a_plan_starts_no_backend():
    code = """
import runpy, sys
sys.argv = "mok_jax plan --model deepseek-v3 --gpus 72 --tokens-per-gpu 64 --json".split()
try:
    runpy.run_module("mok_jax", run_name="__main__")
except SystemExit as end:
    assert end.code == 0
import jax
jax.config.update("jax_num_cpu_devices", 3)  # too late once there is a backend
assert jax.device_count() == 3
"""
    assert '"padding": 32' in run_python(code, preamble="")
