"""``python -m models.train``: trains a small Mixture-of-Experts language model and shows what its experts learned.

Runs on whatever is there: all GPUs, else eight virtual CPU devices (data 2 x expert 4). Writes into ``--out``:
``metrics.jsonl`` (one line an interval, one with the results), ``loss.png``, ``expert_load.png`` and ``sample.txt``.
Ctrl-C ends a run early and keeps what it has; a second one ends it at once.
"""

import argparse
import contextlib
import dataclasses
import hashlib
import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from models import data, report
from models.config import ModelConfig
from models.transformer import Transformer, batch_sharding
from mok_jax.sharding import make_mesh

# Every field of the model's shape is an argument of the same name.
MODEL_FIELDS = dataclasses.fields(ModelConfig)

METRICS_FILE = "metrics.jsonl"
SAMPLE_FILE = "sample.txt"

_VIRTUAL_CPU_DEVICES = 8
_CPU_EXPERT_PARALLELISM = 4
_WARMUP_FRACTION = 0.1
_HELD_OUT_BATCHES = 16
_PROMPT_BYTES = 48
_SAMPLE_BYTES = 256
_SAMPLE_TEMPERATURE = 0.7
_DETERMINISTIC_FLAG = "--xla_gpu_deterministic_ops=true"
_EXIT_INTERRUPTED = 130  # What a shell reports for a program that SIGINT ended.


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line (``None``: of this process)."""
    parser = argparse.ArgumentParser("python -m models.train", description=__doc__.split("\n\n")[0])
    parser.add_argument("--data", type=Path, help="text file or folder (default: the Python standard library)")
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder to write into (%(default)s)")
    parser.add_argument("--steps", type=int, default=300, help="(%(default)s)")
    parser.add_argument("--batch-size", type=int, default=32, help="sequences a step (%(default)s)")
    parser.add_argument("--sequence-length", type=int, default=128, help="bytes (%(default)s)")
    parser.add_argument("--learning-rate", type=float, default=3e-3, help="at its peak (%(default)s)")
    parser.add_argument("--log-every", type=int, default=10, help="steps an interval (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of parameters, crops and sample (%(default)s)")
    parser.add_argument("--implementation", choices=("megakernel", "xla", "reference"), help="(best for the platform)")
    parser.add_argument("--deterministic", action="store_true", help="the same bits in every run, on GPUs too")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), help="(bfloat16 on a GPU, else float32)")
    parser.add_argument("--expert-parallelism", type=int, help="devices that share one copy of the experts")
    for field in MODEL_FIELDS:
        flag = "--" + field.name.replace("_", "-")
        action = argparse.BooleanOptionalAction if field.type is bool else "store"
        options: dict[str, Any] = {} if field.type is bool else {"type": field.type}
        parser.add_argument(flag, default=field.default, action=action, help="model: (%(default)s)", **options)
    args = parser.parse_args(arguments)
    for name in ("steps", "batch_size", "sequence_length", "log_every"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)} must be at least 1; the nearest is 1")
    return args


def use_deterministic_operations() -> None:
    """Has XLA use no operation on GPUs whose bits depend on timing; only before the backend starts."""
    # Last, so that it holds whatever the user's flags say.
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_DETERMINISTIC_FLAG}".lstrip()


def start_devices(expert_parallelism: int | None, num_experts: int) -> Mesh:
    """Starts the backend and makes the mesh over all its devices."""
    # The number of CPU devices is fixed when the backend starts. Where GPUs are found it changes nothing.
    forced = "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    if jax.config.jax_num_cpu_devices < 1 and not forced:
        jax.config.update("jax_num_cpu_devices", _VIRTUAL_CPU_DEVICES)
    devices = jax.devices()
    if expert_parallelism is None:
        largest = _CPU_EXPERT_PARALLELISM if devices[0].platform == "cpu" else len(devices)
        expert_parallelism = math.gcd(math.gcd(largest, len(devices)), num_experts)
    return make_mesh(expert_parallelism=expert_parallelism, devices=devices)


def make_optimizer(learning_rate: float, steps: int) -> tuple[optax.GradientTransformation, optax.Schedule]:
    """AdamW with warm-up and cosine decay; all but the norms' scales is decayed."""
    warmup = max(1, int(_WARMUP_FRACTION * steps))
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, learning_rate, warmup, max(steps, warmup + 1), end_value=learning_rate / 20
    )
    adamw = optax.adamw(schedule, b2=0.95, weight_decay=0.1, mask=_is_decayed)
    return optax.chain(optax.clip_by_global_norm(1.0), adamw), schedule


def _is_decayed(params: nnx.State) -> nnx.State:
    # By name, not by dimension: stacked scales are a matrix as well.
    return nnx.map_state(lambda path, _: path[-1] != "scale", params)


def make_state(
    model: Transformer, optimizer: optax.GradientTransformation, mesh: Mesh
) -> tuple[nnx.GraphDef, nnx.State]:
    """Splits model and optimizer, every array on the mesh: experts as they are sharded, the rest on all devices."""
    graph, state = nnx.split((model, nnx.Optimizer(model, optimizer, wrt=nnx.Param)))
    whole = NamedSharding(mesh, P())
    return graph, jax.tree.map(
        lambda a: a if getattr(a.sharding, "mesh", None) == mesh else jax.device_put(a, whole), state
    )


def next_byte_loss(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Mean cross-entropy in nats per byte: ``f32 [B, S, 256], int32 [B, S] -> f32``."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def compile_train_step(graph: nnx.GraphDef, state: nnx.State, crop: jax.Array) -> Callable:
    """Compiles ``(state, int32 [B, S + 1]) -> (state, metrics)`` once; the state is donated and keeps its sharding."""

    def train_step(state, crop):
        model, optimizer = nnx.merge(graph, state)

        def loss_function(model):
            out = model(crop[:, :-1])
            loss = next_byte_loss(out.logits, crop[:, 1:])
            metrics = {"loss": loss, "router_loss": out.router_loss, "expert_load": out.expert_load}
            return loss + out.router_loss, metrics

        (_, metrics), gradients = nnx.value_and_grad(loss_function, has_aux=True)(model)
        optimizer.update(model, gradients)
        return nnx.state((model, optimizer)), metrics

    shardings = jax.tree.map(lambda a: a.sharding, state)
    return jax.jit(train_step, donate_argnums=0, out_shardings=(shardings, None)).lower(state, crop).compile()


class Intervals:
    """Gathers the steps' metrics and writes one JSON line an interval.

    A step's values are read when the next step has been given to the devices, so that they never wait for Python.
    """

    def __init__(self, log: TextIO, schedule: optax.Schedule, tokens_per_step: int, length: int):
        self._log, self._schedule, self._tokens, self._length = log, schedule, tokens_per_step, length
        self._unread: dict | None = None
        self._steps: list[dict] = []
        self._count = 0
        self._started = time.perf_counter()

    def add(self, metrics: dict) -> dict | None:
        """Takes a step's metrics, still being computed; returns the interval that the step before completed, if one."""
        unread, self._unread = self._unread, metrics
        return None if unread is None else self._read(unread)

    def finish(self) -> None:
        """Reads the last step and writes what is left, be it a whole interval or less."""
        if self._unread is not None:
            self._read(self._unread)
        if self._steps:
            self._write()

    def _read(self, metrics: dict) -> dict | None:
        self._steps.append(jax.tree.map(np.asarray, metrics))
        self._count += 1
        return self._write() if len(self._steps) == self._length else None

    def _write(self) -> dict:
        seconds = time.perf_counter() - self._started
        load = np.sum([step["expert_load"] for step in self._steps], axis=0)
        line = {
            "step": self._count,
            "loss": float(np.mean([step["loss"] for step in self._steps])),
            "router_loss": float(np.mean([step["router_loss"] for step in self._steps])),
            "learning_rate": float(self._schedule(self._count - 1)),
            "tokens_per_s": self._tokens * len(self._steps) / seconds,
            # The busiest expert's tokens as a multiple of an even share, worst layer: 1 is balanced, E / K all to K.
            "load_imbalance": float((load.max(axis=-1) / load.mean(axis=-1)).max()),
            "expert_load": load.tolist(),
        }
        self._log.write(json.dumps(line) + "\n")
        self._log.flush()
        self._steps, self._started = [], time.perf_counter()
        return line


def train(
    step: Callable, state: nnx.State, crops: Iterator[jax.Array], steps: int, intervals: Intervals, console: Console
) -> tuple[nnx.State, bool]:
    """Runs the training loop; returns the state and whether Ctrl-C ended it early."""
    columns = (
        MofNCompleteColumn(),
        BarColumn(bar_width=None),
        TimeRemainingColumn(),
        TextColumn("{task.fields[status]}"),
    )
    with deferred_interrupt() as interrupted, Progress(*columns, console=console, expand=True) as progress:
        task = progress.add_task("train", total=steps, status="")
        for _ in range(steps):
            state, metrics = step(state, next(crops))
            if line := intervals.add(metrics):
                status = _status(line)
                progress.update(task, status=status)
                if not console.is_terminal:
                    console.print(f"step {line['step']:5d}  {status}")
            progress.advance(task)
            if interrupted():
                break
        intervals.finish()
    return state, interrupted()


def _status(line: dict) -> str:
    balance = f"busiest expert {line['load_imbalance']:.2f}x"
    return f"loss {line['loss']:.3f}  {line['tokens_per_s']:,.0f} tokens/s  {balance}"


@contextlib.contextmanager
def deferred_interrupt() -> Iterator[Callable[[], bool]]:
    """Lets the body finish what it does when Ctrl-C comes; it asks the yielded function. A second Ctrl-C raises."""
    received = []

    def handle(*_):
        received.append(True)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    previous = signal.signal(signal.SIGINT, handle)
    try:
        yield lambda: bool(received)
    finally:
        signal.signal(signal.SIGINT, previous)


def evaluate(graph: nnx.GraphDef, state: nnx.State, crops: list[jax.Array], *, with_experts: bool) -> float:
    """Mean loss over crops ``int32 [B, S + 1]`` in nats per byte, with or without what the experts add."""

    @jax.jit
    def loss(state, crop):
        model, _ = nnx.merge(graph, state)
        return next_byte_loss(model(crop[:, :-1], with_experts=with_experts).logits, crop[:, 1:])

    return float(np.mean([float(loss(state, crop)) for crop in crops]))


def generate(
    graph: nnx.GraphDef, state: nnx.State, prompt: bytes, length: int, window: int, mesh: Mesh, seed: int
) -> bytes:
    """Continues ``prompt`` by ``length`` bytes and returns the new ones; the model sees the last ``window`` bytes."""

    @jax.jit
    def next_byte(state, tokens, last, key):
        model, _ = nnx.merge(graph, state)
        # As many equal rows as devices, because every batch is split over all of them.
        logits = model(jnp.broadcast_to(tokens, (mesh.size, window))).logits[0, last]
        return jax.random.categorical(key, logits / _SAMPLE_TEMPERATURE)

    text, keys = list(prompt), jax.random.split(jax.random.key(seed), length)
    for key in keys:
        recent = text[-window:]
        # What follows the last byte is never seen by it: attention is causal, and no expert has a capacity to use up.
        tokens = np.array(recent + [0] * (window - len(recent)), np.int32)
        text.append(int(next_byte(state, tokens, len(recent) - 1, key)))
    return bytes(text[len(prompt) :])


class Setup(NamedTuple):
    """What a run needs that the command line may have got wrong."""

    corpus: data.Corpus
    mesh: Mesh
    dtype: jnp.dtype
    model: Transformer


def set_up(args: argparse.Namespace) -> Setup:
    """Reads the text, starts the devices, makes the model.

    Raises:
      ValueError, FileNotFoundError: the arguments do not fit each other, the text or the devices.
    """
    config = ModelConfig(**{field.name: getattr(args, field.name) for field in MODEL_FIELDS})
    corpus = data.load_corpus(args.data)
    if args.deterministic:
        use_deterministic_operations()
    mesh = start_devices(args.expert_parallelism, config.num_experts)
    if args.batch_size % mesh.size:
        nearest = max(1, round(args.batch_size / mesh.size)) * mesh.size
        raise ValueError(
            f"batch_size={args.batch_size} must be a multiple of the number of devices ({mesh.size}); "
            f"the nearest is {nearest}."
        )
    for text in corpus.train, corpus.held_out:
        data.check_long_enough(text, args.sequence_length + 1)
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    dtype = jnp.dtype(args.dtype or ("float32" if on_cpu else "bfloat16"))
    model = Transformer(config, dtype=dtype, mesh=mesh, implementation=args.implementation, rngs=nnx.Rngs(args.seed))
    return Setup(corpus, mesh, dtype, model)


def run(args: argparse.Namespace, setup: Setup, console: Console) -> int:
    """Trains, evaluates, samples and draws; returns the exit code."""
    started = time.perf_counter()
    corpus, mesh, _, model = setup
    console.print(_overview(args, setup))
    optimizer, schedule = make_optimizer(args.learning_rate, args.steps)
    graph, state = make_state(model, optimizer, mesh)

    def on_mesh(crops):
        return (jax.device_put(crop, batch_sharding(mesh)) for crop in crops)

    crop_shape = args.batch_size, args.sequence_length + 1
    crops = on_mesh(data.random_crops(corpus.train, *crop_shape, seed=args.seed))
    held_out = list(on_mesh(data.spread_crops(corpus.held_out, *crop_shape, _HELD_OUT_BATCHES)))
    with console.status("compiling"):
        step = compile_train_step(graph, state, held_out[0])
    console.print(f"compiled; {time.perf_counter() - started:.1f} s since the start")

    args.out.mkdir(parents=True, exist_ok=True)
    for name in (METRICS_FILE, SAMPLE_FILE, *report.PICTURES):
        # A run that is cut short must not leave an earlier run's results beside its own.
        (args.out / name).unlink(missing_ok=True)
    exit_code = 0
    with (args.out / METRICS_FILE).open("w") as log:
        intervals = Intervals(log, schedule, args.batch_size * args.sequence_length, args.log_every)
        try:
            state, interrupted = train(step, state, crops, args.steps, intervals, console)
            if interrupted:
                raise KeyboardInterrupt
            losses, digest = held_out_losses(graph, state, held_out), parameters_sha256(graph, state)
            results = losses | {"parameters_sha256": digest, "seconds": time.perf_counter() - started}
            log.write(json.dumps(results) + "\n")
            console.print(f"{_verdict(losses)}\nSHA-256 of the parameters: {digest}", soft_wrap=True)
            write_sample(args, corpus, graph, state, mesh, console)
        except KeyboardInterrupt:
            exit_code = _EXIT_INTERRUPTED
            console.print("interrupted: what was learned so far is in the metrics and pictures")
    report.draw_report(args.out / METRICS_FILE, args.out)
    console.print(f"wrote {args.out} in {time.perf_counter() - started:.1f} s")
    return exit_code


def _overview(args: argparse.Namespace, setup: Setup) -> str:
    corpus, mesh = setup.corpus, setup.mesh
    shape = " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items())
    return (
        f"{corpus.source}: {corpus.train.size:,} bytes, {corpus.held_out.size:,} held out\n"
        f"{mesh.size} {mesh.devices.flat[0].platform} devices: {shape}, {setup.dtype.name}, "
        f"implementation {args.implementation or 'best for the platform'}"
    )


def held_out_losses(graph: nnx.GraphDef, state: nnx.State, crops: list[jax.Array]) -> dict[str, float]:
    """How well held-out text is predicted, and how much of that is the experts' doing."""
    return {
        "held_out_loss": evaluate(graph, state, crops, with_experts=True),
        "held_out_loss_without_experts": evaluate(graph, state, crops, with_experts=False),
    }


def parameters_sha256(graph: nnx.GraphDef, state: nnx.State) -> str:
    """Digest of all parameters' bytes, in the order of their names: two runs compared to the bit."""
    model, _ = nnx.merge(graph, state)
    digest = hashlib.sha256()
    for parameter in jax.tree.leaves(nnx.state(model, nnx.Param)):
        digest.update(np.asarray(parameter).tobytes())
    return digest.hexdigest()


def _verdict(results: dict[str, float]) -> str:
    return (
        f"held-out loss {results['held_out_loss']:.3f} nats per byte, "
        f"{results['held_out_loss_without_experts']:.3f} with the experts' output zeroed"
    )


def write_sample(
    args: argparse.Namespace, corpus: data.Corpus, graph: nnx.GraphDef, state: nnx.State, mesh: Mesh, console: Console
) -> None:
    """Lets the model continue the beginning of the held-out text; prints the result and writes ``sample.txt``."""
    prompt = corpus.held_out[:_PROMPT_BYTES].tobytes()
    continuation = generate(graph, state, prompt, _SAMPLE_BYTES, args.sequence_length, mesh, args.seed)
    texts = [text.decode("utf-8", errors="replace") for text in (prompt, continuation)]
    (args.out / SAMPLE_FILE).write_text("".join(texts), encoding="utf-8")
    # markup and highlight off: source code is full of square brackets.
    console.print(texts[0], style="dim", end="", markup=False, highlight=False)
    console.print(texts[1], markup=False, highlight=False)


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; arguments that cannot work end it with one line on stderr and exit code 2."""
    args = parse_arguments(arguments)
    try:
        setup = set_up(args)
    except (ValueError, FileNotFoundError) as error:
        print(f"models.train: {error}", file=sys.stderr)
        return 2
    try:
        return run(args, setup, Console())
    except KeyboardInterrupt:
        # While compiling or drawing: there is nothing, or nothing more, to keep.
        return _EXIT_INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
