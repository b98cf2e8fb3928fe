"""``python -m mok_jax verify``: the megakernel's numbers on a user's own shape and devices.

Some tokens, and some experts' gradients, are computed again in float64 with NumPy, which shares nothing with the layer;
and all results must be the same bits however the work is cut and spread. Inputs are random, made on the host.
"""

import argparse
import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from mok_jax.activation import ACTIVATIONS, Activation
from mok_jax.api import moe
from mok_jax.command import positive, say_refused, whole
from mok_jax.config import ROW_BLOCK, SAVE_POLICIES, MoKConfig
from mok_jax.zoo import LAYERS

HOLDS, DOES_NOT_HOLD, REFUSED = 0, 1, 2
# Relative L2 against float64, by the dtype of tokens.
TOLERANCES = {"bfloat16": 1e-2, "float32": 1e-5}
SAMPLED_TOKENS, SAMPLED_EXPERTS, SAMPLED_COLUMNS = 32, 3, 64
# ``h = g * sigmoid(a * g) * (u + b)`` of clamped gate and up: a and b of each activation.
_CONSTANTS: dict[Activation, tuple[float, float]] = {"swiglu": (1.0, 0.0), "gpt_oss": (1.702, 1.0)}
assert set(_CONSTANTS) == set(ACTIVATIONS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """What is verified.

    Attributes:
      hidden_size: ``H``.
      intermediate_size: ``I``.
      num_experts: ``E``.
      num_experts_per_tok: ``K``.
      activation: as for ``mok_jax.moe``.
      activation_limit: likewise.
      tokens: ``T`` of all ranks together.
      dtype: of tokens and weights.
      expert_parallelism: devices of this process over which the experts are split.
      seed: of the inputs, and of what is looked at.

    Raises:
      ValueError: a field has no legal value; the text names the nearest legal one.
    """

    hidden_size: int
    intermediate_size: int
    num_experts: int
    num_experts_per_tok: int
    activation: Activation = "swiglu"
    activation_limit: float | None = None
    tokens: int = 512
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    expert_parallelism: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_experts_per_tok > self.num_experts:
            raise ValueError(
                f"num_experts_per_tok={self.num_experts_per_tok} is more than num_experts={self.num_experts}; "
                f"the nearest is {self.num_experts}."
            )
        devices = len(jax.local_devices())
        if self.expert_parallelism > devices:
            raise ValueError(
                f"expert_parallelism={self.expert_parallelism} is more than the {devices} devices of this process; "
                f"the nearest is {devices}."
            )
        for name in ("tokens", "num_experts"):
            size, ranks = getattr(self, name), self.expert_parallelism
            if size % ranks:
                nearest = max(1, round(size / ranks)) * ranks
                raise ValueError(
                    f"{name}={size} must be a multiple of expert_parallelism={ranks}; the nearest is {nearest}."
                )


class Inputs(NamedTuple):
    """Arguments of ``mok_jax.moe``, and the cotangent of ``y``."""

    x: Any
    expert_ids: Any
    expert_weights: Any
    wi_0: Any
    wi_1: Any
    wo: Any
    dy: Any


class Results(NamedTuple):
    """``y`` and the gradients."""

    y: Any
    dx: Any
    d_expert_weights: Any
    d_wi_0: Any
    d_wi_1: Any
    d_wo: Any


class Check(NamedTuple):
    """What was looked at, whether it holds, and what was found."""

    name: str
    holds: bool
    found: str


def make_inputs(request: Request, seed: int | None = None) -> Inputs:
    """Random ones, of which results are of order one: different experts for each token, chosen evenly."""
    random = np.random.default_rng(request.seed if seed is None else seed)
    dtype = jnp.dtype(request.dtype)
    experts, h, i = request.num_experts, request.hidden_size, request.intermediate_size

    def normal(*shape: int, scale: float = 1.0) -> np.ndarray:
        return (random.standard_normal(shape, np.float32) * np.float32(scale)).astype(dtype)

    scores = random.random((request.tokens, experts), np.float32)
    ids = np.argpartition(-scores, request.num_experts_per_tok - 1, axis=1)[:, : request.num_experts_per_tok]
    return Inputs(
        x=normal(request.tokens, h),
        expert_ids=ids.astype(np.int32),
        expert_weights=random.uniform(0.1, 1.0, ids.shape).astype(np.float32),
        wi_0=normal(experts, h, i, scale=h**-0.5),
        wi_1=normal(experts, h, i, scale=h**-0.5),
        wo=normal(experts, i, h, scale=i**-0.5),
        dy=normal(request.tokens, h),
    )


def jit_layer(request: Request, ranks: int, **settings: Any) -> Callable[..., Results]:
    """Forward and backward of the megakernel on :class:`Inputs`, with ``settings`` of ``MoKConfig``."""
    axis = None if ranks == 1 else "expert"

    def step(x, ids, expert_weights, wi_0, wi_1, wo, dy):
        def forward(*arguments):
            x, expert_weights, *weights = arguments
            return moe(
                x,
                ids,
                expert_weights,
                *weights,
                axis_name=axis,
                activation=request.activation,
                activation_limit=request.activation_limit,
                config=MoKConfig(**settings),
                implementation="megakernel",
            )

        y, backward = jax.vjp(forward, x, expert_weights, wi_0, wi_1, wo)
        return Results(y, *backward(dy))

    if axis is not None:
        mesh = Mesh(np.array(jax.local_devices()[:ranks]), (axis,))
        step = jax.shard_map(step, mesh=mesh, in_specs=(P(axis),) * 7, out_specs=P(axis))
    return jax.jit(step)


def run_layer(request: Request, inputs: Inputs, ranks: int, **settings: Any) -> Results:
    """What :func:`jit_layer` gives for ``inputs``, on the host."""
    return Results(*map(np.asarray, jit_layer(request, ranks, **settings)(*inputs)))


def verify(request: Request) -> Iterator[Check]:
    """Yields the checks, one after another.

    Raises:
      ValueError, TypeError, NotImplementedError: the megakernel does not run such a call here; as ``mok_jax.moe``.

    Example:
      >>> sizes = {"hidden_size": 16, "intermediate_size": 8, "num_experts": 2, "num_experts_per_tok": 1}
      >>> all(check.holds for check in verify(Request(**sizes, tokens=8)))
      True
    """
    inputs = make_inputs(request)
    results = run_layer(request, inputs, request.expert_parallelism)
    yield from _check_numbers(request, inputs, results)
    for name, settings in _ways(request).items():
        ranks = settings.pop("ranks", request.expert_parallelism)
        yield _check_bits(f"same bits: {name}", results, run_layer(request, inputs, ranks, **settings))
    yield _check_other_tokens(request, inputs, results)


# ---- Numbers.


def _check_numbers(request: Request, inputs: Inputs, results: Results) -> Iterator[Check]:
    random, limit = np.random.default_rng(request.seed), TOLERANCES[request.dtype]
    tokens = np.sort(random.permutation(request.tokens)[:SAMPLED_TOKENS])
    rows = [_token_in_float64(request, inputs, token) for token in tokens]
    for name, values in zip(("y", "dx", "d_expert_weights"), zip(*rows, strict=True), strict=True):
        error = _relative_l2(getattr(results, name)[tokens], np.stack(values))
        yield Check(f"{name} of {len(tokens)} tokens", error <= limit, f"{error:.1e} from float64, at most {limit:g}")
    used = np.unique(inputs.expert_ids)
    experts = np.sort(random.permutation(used)[:SAMPLED_EXPERTS])
    columns = np.sort(random.permutation(request.intermediate_size)[:SAMPLED_COLUMNS])
    gradients = [_expert_in_float64(request, inputs, expert, columns) for expert in experts]
    d_wi_0, d_wi_1, d_wo = (gradient[experts] for gradient in results[3:])
    actual = d_wi_0[..., columns], d_wi_1[..., columns], d_wo[:, columns]
    for name, ours, values in zip(Results._fields[3:], actual, zip(*gradients, strict=True), strict=True):
        error = _relative_l2(ours, np.stack(values))
        found = f"{error:.1e} from float64, at most {limit:g}"
        yield Check(f"{name} of {len(experts)} experts", error <= limit, found)


def _relative_l2(actual: np.ndarray, expected: np.ndarray) -> float:
    """Infinite where something is not finite."""
    error = float(np.linalg.norm(actual.astype(np.float64) - expected) / np.linalg.norm(expected))
    return error if np.isfinite(error) else np.inf


def _hidden(request: Request, gate: np.ndarray, up: np.ndarray) -> tuple[np.ndarray, Callable]:
    """The hidden activations, and from their gradient those of gate and up.

    Where the clamps cut, and no gradient passes, is told by pre-activations rounded as the layer keeps them.
    """
    a, b = _CONSTANTS[request.activation]
    limit = np.inf if request.activation_limit is None else request.activation_limit
    g, u = np.minimum(gate, limit), np.clip(up, -limit, limit)
    s = 1 / (1 + np.exp(-a * g))

    def back(grad: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        kept_gate, kept_up = (array.astype(jnp.dtype(request.dtype)).astype(np.float64) for array in (gate, up))
        gate_grad = np.where(kept_gate > limit, 0, grad * (u + b) * (s + a * g * s * (1 - s)))
        return gate_grad, np.where(np.abs(kept_up) > limit, 0, grad * g * s)

    return g * s * (u + b), back


def _wide(*arrays: np.ndarray) -> list[np.ndarray]:
    return [array.astype(np.float64) for array in arrays]


def _token_in_float64(request: Request, inputs: Inputs, token: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A token's rows of ``y``, ``dx`` and ``d_expert_weights``."""
    x, dy = _wide(inputs.x[token], inputs.dy[token])
    y, dx, slopes = np.zeros_like(x), np.zeros_like(x), []
    for expert, weight in zip(inputs.expert_ids[token], inputs.expert_weights[token].astype(np.float64), strict=True):
        wi_0, wi_1, wo = _wide(inputs.wi_0[expert], inputs.wi_1[expert], inputs.wo[expert])
        hidden, back = _hidden(request, x @ wi_0, x @ wi_1)
        gate_grad, up_grad = back(weight * (wo @ dy))
        y += weight * (hidden @ wo)
        dx += wi_0 @ gate_grad + wi_1 @ up_grad
        slopes.append(dy @ (hidden @ wo))
    return y, dx, np.array(slopes)


def _expert_in_float64(request: Request, inputs: Inputs, expert: int, columns: np.ndarray) -> list[np.ndarray]:
    """Those columns of an expert's gradients of ``wi_0`` and ``wi_1``, and rows of that of ``wo``."""
    token, k = np.nonzero(inputs.expert_ids == expert)
    x, dy = _wide(inputs.x[token], inputs.dy[token])
    weighted = inputs.expert_weights[token, k].astype(np.float64)[:, None] * dy
    wi_0, wi_1 = _wide(inputs.wi_0[expert][:, columns], inputs.wi_1[expert][:, columns])
    (wo,) = _wide(inputs.wo[expert][columns])
    hidden, back = _hidden(request, x @ wi_0, x @ wi_1)
    gate_grad, up_grad = back(weighted @ wo.T)
    return [x.T @ gate_grad, x.T @ up_grad, hidden.T @ weighted]


# ---- Bits.


def _ways(request: Request) -> dict[str, dict[str, Any]]:
    """Other ways to run the same call, by name."""
    small = {"ring_rows": ROW_BLOCK, "minibatch_rows": ROW_BLOCK}
    ways: dict[str, dict[str, Any]] = {"again": {}, "the smallest minibatch": {"minibatch_rows": ROW_BLOCK}}
    for save in SAVE_POLICIES:
        if save != MoKConfig.save:  # which is "again"
            ways[f"save={save}"] = {"save": save}
        ways[f"save={save}, the smallest ring"] = {"save": save} | small
    if jax.local_devices()[0].platform == "cpu":
        workers = {"host_comm_workers": 2, "host_compute_workers": 3}
        ways |= {"other workers": dict(workers), "delays": workers | small | {"host_delay_seed": 1}}
    else:
        ways |= {"communicating multiprocessors": {"comm_sms": 2}, "fewer multiprocessors": {"reserve_sms": 30}}
    if request.expert_parallelism > 1:
        ways["one rank"] = {"ranks": 1}
    return ways


def _check_bits(name: str, expected: Results, actual: Results) -> Check:
    different = [
        f"{np.count_nonzero(_bits(a) != _bits(b))} of {field}"
        for field, a, b in zip(Results._fields, actual, expected, strict=True)
        if a.tobytes() != b.tobytes()
    ]
    return Check(name, not different, f"elements that differ: {', '.join(different)}" if different else "")


def _bits(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}")


def _check_other_tokens(request: Request, inputs: Inputs, results: Results) -> Check:
    """``y`` and ``dx`` of half of the tokens, while the others have other data and other experts."""
    others, kept = make_inputs(request, request.seed + 1), np.arange(request.tokens) % 2 == 0
    per_token = ("x", "expert_ids", "expert_weights", "dy")
    changed = {name: np.where(kept[:, None], getattr(inputs, name), getattr(others, name)) for name in per_token}
    actual = run_layer(request, inputs._replace(**changed), request.expert_parallelism)
    ours, expected = (r._replace(**{n: getattr(r, n)[kept] for n in ("y", "dx")}) for r in (actual, results))
    rest = dict.fromkeys(Results._fields[2:], np.zeros(0, np.uint8))
    name = "same bits of a token, whatever the others are"
    return _check_bits(name, expected._replace(**rest), ours._replace(**rest))


# ---- The command.


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    parser.epilog = f"Exit status: {HOLDS}, everything holds; {DOES_NOT_HOLD}, something does not; {REFUSED}, refused."
    add_request_arguments(parser)
    parser.add_argument("--json", action="store_true", help="for machines: JSON, refusals too")


def add_request_arguments(parser: argparse.ArgumentParser, sizes: Mapping[str, int] | None = None) -> None:
    """Adds an option for every field of :class:`Request`, and ``--model``, which sets those that a layer has.

    ``sizes`` are taken where the command line has neither.
    """
    sizes = sizes or {}
    parser.set_defaults(sizes=sizes)
    parser.add_argument("--model", choices=sorted(LAYERS), metavar="X", help=f"one of {', '.join(LAYERS)}")
    for name, text in (
        ("hidden_size", "H"),
        ("intermediate_size", "I"),
        ("num_experts", "E; of a large model, those of one GPU"),
        ("num_experts_per_tok", "K"),
    ):
        default = f"the model's, or {sizes[name]}" if name in sizes else "the model's"
        parser.add_argument(_option(name), type=whole(1), metavar="N", help=f"{text} (default: {default})")
    parser.add_argument("--activation", choices=ACTIVATIONS, help="(default: the model's, or swiglu)")
    parser.add_argument("--activation-limit", type=positive, metavar="X", help="(default: the model's, or none)")
    parser.add_argument("--tokens", type=whole(1), default=512, metavar="N", help="of all ranks (%(default)s)")
    parser.add_argument("--dtype", choices=tuple(TOLERANCES), default="bfloat16", help="(%(default)s)")
    parser.add_argument("--expert-parallelism", type=whole(1), default=1, metavar="N", help="devices (%(default)s)")
    parser.add_argument("--seed", type=whole(0), default=0, metavar="N", help="of the inputs (%(default)s)")


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def request_of(arguments: argparse.Namespace) -> Request:
    """Of parsed arguments; raises ValueError as :class:`Request`, and where a size is missing."""
    layer = None if arguments.model is None else LAYERS[arguments.model]
    fields = {}
    for field in dataclasses.fields(Request):
        value = getattr(arguments, field.name)
        if value is None and layer is not None:
            value = getattr(layer, field.name)
        if value is None:
            value = arguments.sizes.get(field.name)
        if value is None and field.default is dataclasses.MISSING:
            raise ValueError(f"{_option(field.name)} is missing, or --model, which has one.")
        if value is not None:
            fields[field.name] = value
    return Request(**fields)


def run(arguments: argparse.Namespace) -> int:
    """Prints the checks of parsed arguments as they are made; returns the exit status."""
    checks = []
    try:
        for check in verify(request_of(arguments)):
            checks.append(check)
            if not arguments.json:
                print(f"{'holds' if check.holds else 'WRONG':6} {check.name:52} {check.found}".rstrip(), flush=True)
    except (ValueError, TypeError, NotImplementedError, ImportError) as refusal:
        say_refused(refusal, as_json=arguments.json)
        return REFUSED
    if arguments.json:
        device = jax.local_devices()[0]
        print(json.dumps({"device": device.device_kind, "checks": [check._asdict() for check in checks]}, indent=2))
    return HOLDS if all(check.holds for check in checks) else DOES_NOT_HOLD
