"""``python -m models.train``: trains a small Mixture-of-Experts language model and shows what its experts learned.

Runs on whatever is there: all GPUs, else eight virtual CPU devices (data 2 x expert 4). Writes into ``--out``:
``metrics.jsonl`` (one line an interval, one with the results), ``loss.png``, ``expert_load.png`` and ``sample.txt``.

Several processes, a part of the devices each, run one training: every one is given the same arguments but
``--process-id``, and the first one writes.

Ends with 2, one line and before anything is compiled, if the arguments cannot work; with 1 if the loss is no number any
more; with 130 within 5 seconds of Ctrl-C, keeping what was written, or at once after a second one.
"""

import argparse
import hashlib
import importlib.util
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from models import data, interrupt
from models.config import ModelConfig
from models.metrics import FILES, METRICS_FILE, SAMPLE_FILE, Intervals, write_line
from models.options import MODEL_FIELDS, parse_arguments
from models.transformer import Transformer, batch_sharding
from mok_jax import command
from mok_jax.config import MoKConfig
from mok_jax.sharding import make_mesh

_VIRTUAL_CPU_DEVICES = 8
_CPU_EXPERT_PARALLELISM = 4
_WARMUP_FRACTION = 0.1
_HELD_OUT_BATCHES = 16
_PROMPT_BYTES = 48
_SAMPLE_BYTES = 256
_SAMPLE_TEMPERATURE = 0.7
_DETERMINISTIC_FLAG = "--xla_gpu_deterministic_ops=true"


def use_deterministic_operations() -> None:
    """Has XLA use no operation on GPUs whose bits depend on timing; only before the backend starts."""
    # Last, so that it holds whatever the user's flags say.
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_DETERMINISTIC_FLAG}".lstrip()


def start_devices(expert_parallelism: int | None, num_experts: int) -> Mesh:
    """Starts the backend and makes the mesh over all its devices.

    Raises:
      ValueError: there are no devices, or ``expert_parallelism`` does not fit their number.
    """
    # The number of CPU devices is fixed when the backend starts. Where GPUs are found it changes nothing.
    forced = "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    if jax.config.jax_num_cpu_devices < 1 and not forced:
        jax.config.update("jax_num_cpu_devices", _VIRTUAL_CPU_DEVICES)
    try:
        devices = jax.devices()
    except (RuntimeError, AssertionError) as error:  # The latter where no platform is there that was asked for.
        platforms = jax.config.jax_platforms
        raise ValueError(f"JAX_PLATFORMS={platforms} has no devices here; JAX_PLATFORMS=cpu has. {error}") from error
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


def compile_train_step(graph: nnx.GraphDef, state: nnx.State, crop: jax.Array, mesh: Mesh) -> Callable:
    """Compiles ``(state, int32 [B, S + 1]) -> (state, metrics)`` once; the state is donated and keeps its sharding, and
    all devices have the metrics.
    """

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
    step = jax.jit(train_step, donate_argnums=0, out_shardings=(shardings, NamedSharding(mesh, P())))
    return step.lower(state, crop).compile()


class Training(NamedTuple):
    """A training step, compiled, and what it is given. ``schedule`` says the learning rate of a step."""

    step: Callable
    schedule: optax.Schedule
    graph: nnx.GraphDef
    state: nnx.State
    crops: Iterator[jax.Array]
    held_out: list[jax.Array]


def train(training: Training, steps: int, intervals: Intervals, console: Console, watch: interrupt.Watch) -> nnx.State:
    """Runs the training loop, which Ctrl-C ends early; returns the state."""
    state = training.state
    columns = (
        MofNCompleteColumn(),
        BarColumn(bar_width=None),
        TimeRemainingColumn(),
        TextColumn("{task.fields[status]}"),
    )
    with watch.deferred(), Progress(*columns, console=console, expand=True) as progress:
        task = progress.add_task("train", total=steps, status="")
        for _ in range(steps):
            state, metrics = training.step(state, next(training.crops))
            if line := intervals.add(metrics):
                status = _status(line)
                progress.update(task, status=status)
                if not console.is_terminal:
                    console.print(f"step {line['step']:5d}  {status}")
            progress.advance(task)
            if watch.received:
                break
        intervals.finish()
    return state


def _status(line: dict) -> str:
    balance = f"busiest expert {line['load_imbalance']:.2f}x"
    return f"loss {line['loss']:.3f}  {line['tokens_per_s']:,.0f} tokens/s  {balance}"


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
        return jax.random.categorical(jax.random.wrap_key_data(key), logits / _SAMPLE_TEMPERATURE)

    keys = np.asarray(jax.random.key_data(jax.random.split(jax.random.key(seed), length)))
    text = list(prompt)
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
      ValueError, OSError: the arguments do not fit each other, the text, the folder or the devices.
    """
    config = ModelConfig(**{field.name: getattr(args, field.name) for field in MODEL_FIELDS})
    command.check_folder(args.out)
    corpus = data.load_corpus(args.data)
    for text, name in (corpus.train, "training text"), (corpus.held_out, "held-out text"):
        data.check_long_enough(text, args.sequence_length + 1, name)
    if args.deterministic:
        use_deterministic_operations()
    command.join_processes(args)
    mesh = start_devices(args.expert_parallelism, config.num_experts)
    if args.batch_size % mesh.size:
        nearest = max(1, round(args.batch_size / mesh.size)) * mesh.size
        raise ValueError(
            f"batch_size={args.batch_size} must be a multiple of the number of devices ({mesh.size}); "
            f"the nearest is {nearest}."
        )
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    dtype = jnp.dtype(args.dtype or ("float32" if on_cpu else "bfloat16"))
    options = {"implementation": args.implementation, "kernel": MoKConfig(reserve_sms=args.reserve_sms)}
    model = Transformer(config, dtype=dtype, mesh=mesh, **options, rngs=nnx.Rngs(args.seed))
    return Setup(corpus, mesh, dtype, model)


def prepare(args: argparse.Namespace, setup: Setup) -> Training:
    """Compiles the step.

    Raises:
      ValueError, ImportError: the devices or this installation cannot run the implementation; before it is compiled.
    """

    def on_mesh(crops: Iterable[np.ndarray]) -> Iterator[jax.Array]:
        return (jax.device_put(crop, batch_sharding(setup.mesh)) for crop in crops)

    crop_shape = args.batch_size, args.sequence_length + 1
    crops = on_mesh(data.random_crops(setup.corpus.train, *crop_shape, seed=args.seed))
    held_out = list(on_mesh(data.spread_crops(setup.corpus.held_out, *crop_shape, _HELD_OUT_BATCHES)))
    optimizer, schedule = make_optimizer(args.learning_rate, args.steps)
    graph, state = make_state(setup.model, optimizer, setup.mesh)
    step = compile_train_step(graph, state, held_out[0], setup.mesh)
    return Training(step, schedule, graph, state, crops, held_out)


def run(
    args: argparse.Namespace, setup: Setup, training: Training, console: Console, watch: interrupt.Watch, started: float
) -> int:
    """Trains, evaluates, samples and draws; returns the exit code."""
    exit_code, failure = 0, ""
    with Path(args.out / METRICS_FILE if is_first() else os.devnull).open("wb", buffering=0) as log:
        intervals = Intervals(log, training.schedule, args.batch_size * args.sequence_length, args.log_every)
        try:
            state = train(training, args.steps, intervals, console, watch)
            if watch.received:
                exit_code = interrupt.EXIT_CODE
                _say(console, "interrupted: what was learned so far is in the metrics and pictures")
            else:
                write_results(log, training, state, console, started)
                write_sample(args, setup, training.graph, state, console)
        except FloatingPointError as error:
            exit_code, failure = 1, f"{error}; a smaller --learning-rate than {args.learning_rate:g} may help"
    if is_first():
        draw(args.out, console)
    _say(console, f"wrote {args.out} in {time.perf_counter() - started:.1f} s")
    if failure:
        _complain(failure)
    return exit_code


def is_first() -> bool:
    """Whether this process writes and speaks."""
    return jax.process_index() == 0


def _say(console: Console, text: str) -> None:
    # Paths and source code may hold what rich takes for its own.
    console.print(text, markup=False, soft_wrap=True)


def _complain(text: object) -> None:
    print("models.train:", " ".join(str(text).split()), file=sys.stderr)


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


def write_results(log: BinaryIO, training: Training, state: nnx.State, console: Console, started: float) -> None:
    """Evaluates the trained model; writes the last line of the metrics, and says what it says.

    Raises:
      FloatingPointError: a loss is no number, once it is written.
    """
    graph = training.graph
    losses, digest = held_out_losses(graph, state, training.held_out), parameters_sha256(graph, state)
    write_line(log, losses | {"parameters_sha256": digest, "seconds": time.perf_counter() - started})
    _say(console, f"{_verdict(losses)}\nSHA-256 of the parameters: {digest}")
    if not all(map(math.isfinite, losses.values())):
        raise FloatingPointError(f"the held-out loss is {losses['held_out_loss']} after the last step")


def parameters_sha256(graph: nnx.GraphDef, state: nnx.State) -> str:
    """Digest of all parameters' bytes, in the order of their names: two runs compared to the bit."""
    model, _ = nnx.merge(graph, state)
    digest = hashlib.sha256()
    for parameter in jax.tree.leaves(nnx.state(model, nnx.Param)):
        digest.update(on_host(parameter).tobytes())
    return digest.hexdigest()


def on_host(array: jax.Array) -> np.ndarray:
    """All of an array, of which other processes may have a part."""
    if array.is_fully_addressable:
        return np.asarray(array)
    return multihost_utils.process_allgather(array, tiled=True)


def _verdict(results: dict[str, float]) -> str:
    return (
        f"held-out loss {results['held_out_loss']:.3f} nats per byte, "
        f"{results['held_out_loss_without_experts']:.3f} with the experts' output zeroed"
    )


def write_sample(
    args: argparse.Namespace, setup: Setup, graph: nnx.GraphDef, state: nnx.State, console: Console
) -> None:
    """Lets the model continue the beginning of the held-out text; prints the result and writes ``sample.txt``."""
    prompt = setup.corpus.held_out[:_PROMPT_BYTES].tobytes()
    continuation = generate(graph, state, prompt, _SAMPLE_BYTES, args.sequence_length, setup.mesh, args.seed)
    texts = [text.decode("utf-8", errors="replace") for text in (prompt, continuation)]
    if is_first():
        (args.out / SAMPLE_FILE).write_text("".join(texts), encoding="utf-8")
    # markup and highlight off: source code is full of square brackets.
    console.print(texts[0], style="dim", end="", markup=False, highlight=False)
    console.print(texts[1], markup=False, highlight=False)


def draw(folder: Path, console: Console) -> None:
    """Draws the pictures of the metrics that are in ``folder``, where matplotlib is installed."""
    if importlib.util.find_spec("matplotlib") is None:
        _say(console, "no pictures: they need matplotlib (pip install matplotlib)")
        return
    from models import report

    report.draw_report(folder / METRICS_FILE, folder)


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    args = parse_arguments(arguments)
    with interrupt.Watch() as watch:
        return _train_and_show(args, watch)


def _train_and_show(args: argparse.Namespace, watch: interrupt.Watch) -> int:
    started, console = time.perf_counter(), Console()
    try:
        setup = set_up(args)
        console.quiet = not is_first()
        _say(console, _overview(args, setup))
        with console.status("compiling"):
            training = prepare(args, setup)
        earlier = command.make_folder(args.out, FILES) if is_first() else None
    except (ValueError, OSError, ImportError, MemoryError) as error:
        _complain(error)
        return 2
    _say(console, f"compiled; {time.perf_counter() - started:.1f} s since the start")
    if earlier:
        _say(console, f"moved the results of an earlier run to {earlier}")
    return run(args, setup, training, console, watch, started)


if __name__ == "__main__":
    interrupt.leave(main())
