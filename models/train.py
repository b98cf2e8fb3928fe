"""``python -m models.train``: trains a small Mixture-of-Experts language model and shows what its experts learned.

Runs on whatever is there: all GPUs, else eight virtual CPU devices (data 2 x expert 4). Writes into ``--out``:
``metrics.jsonl`` (one line an interval, one with the results), ``loss.png``, ``expert_load.png`` and ``sample.txt``,
``config.json``, and ``checkpoints`` where they are asked for. ``--resume`` goes on where the newest of those was made,
on as many devices as there are then, and computes what the run would have computed without the interruption.

Several processes, a part of the devices each, run one training: every one is given the same arguments but
``--process-id``, and the first one writes.

Ends with 2, one line and before anything is compiled, if the arguments cannot work; with 1 if the loss is no number any
more; with 130 within 5 seconds of Ctrl-C, keeping what was written, or at once after a second one; with 143 after
SIGTERM, once a last checkpoint is written if they are asked for.
"""

import argparse
import functools
import importlib.util
import math
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console

from models import checkpoints, data, interrupt
from models.config import ModelConfig
from models.evaluation import generate, make_evaluation, parameters_sha256
from models.loop import Keeper, Profile, Training, train
from models.metrics import (
    BOARD_FOLDER,
    CONFIG_FILE,
    FILES,
    METRICS_FILE,
    PROFILE_FOLDER,
    SAMPLE_FILE,
    Board,
    Intervals,
    keep_until,
    write_line,
)
from models.options import MODEL_FIELDS, parse_arguments
from models.step import compile_train_step, make_optimizer, make_state
from models.transformer import Transformer, batch_sharding
from mok_jax import command
from mok_jax.config import MoKConfig
from mok_jax.sharding import make_mesh

_VIRTUAL_CPU_DEVICES = 8
_CPU_EXPERT_PARALLELISM = 4
_HELD_OUT_BATCHES = 16
_BEFORE_PROFILE = 10
_PROMPT_BYTES = 48
_SAMPLE_BYTES = 256
_DETERMINISTIC_FLAG = "--xla_gpu_deterministic_ops=true"
# Options that a run keeps when it is resumed, besides those of the model.
_KEPT = ("data", "steps", "batch_size", "accumulate", "sequence_length", "learning_rate", "clip_norm", "seed", "dtype")


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
    if args.tensorboard and importlib.util.find_spec("tensorboardX") is None:
        raise ImportError("--tensorboard needs tensorboardX: pip install tensorboardX")
    if is_resumed(args):
        checkpoints.check_config(args.out, kept_options(args))
    corpus = data.load_corpus(args.data)
    for text, name in (corpus.train, "training text"), (corpus.held_out, "held-out text"):
        data.check_long_enough(text, args.sequence_length + 1, name)
    if args.deterministic:
        use_deterministic_operations()
    command.join_processes(args)
    mesh = start_devices(args.expert_parallelism, config.num_experts)
    share = mesh.size * args.accumulate
    if args.batch_size % share:
        nearest = max(1, round(args.batch_size / share)) * share
        parts = f" times {args.accumulate} parts" if args.accumulate > 1 else ""
        raise ValueError(
            f"batch_size={args.batch_size} must be a multiple of the number of devices ({mesh.size}){parts}; "
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
    of_batch = batch_sharding(setup.mesh)
    in_parts = NamedSharding(setup.mesh, P(None, *of_batch.spec))
    shape = args.batch_size // args.accumulate, args.sequence_length + 1

    def crops_after(step: int) -> Iterator[jax.Array]:
        crops = data.random_crops(setup.corpus.train, args.batch_size, shape[1], args.seed, step)
        return (jax.device_put(crop.reshape(args.accumulate, *shape), in_parts) for crop in crops)

    held_out = data.spread_crops(setup.corpus.held_out, *shape, _HELD_OUT_BATCHES * args.accumulate)
    optimizer, schedule = make_optimizer(args.learning_rate, args.steps, args.clip_norm)
    graph, state = make_state(setup.model, optimizer, setup.mesh)
    return Training(
        step=compile_train_step(graph, state, next(crops_after(0)), setup.mesh),
        schedule=schedule,
        graph=graph,
        state=state,
        first=0,
        crops_after=crops_after,
        held_out=[jax.device_put(crop, of_batch) for crop in held_out],
        evaluations={
            "held_out_loss": make_evaluation(graph, with_experts=True),
            "held_out_loss_without_experts": make_evaluation(graph, with_experts=False),
        },
    )


def begin(args: argparse.Namespace) -> Path | None:
    """Makes ``--out`` ready for this run, or for going on with the one that it has.

    Returns:
      The folder that an earlier run's results were moved into, if there were any.

    Raises:
      OSError: the folder cannot be made or written into.
    """
    if not is_first() or is_resumed(args):
        return None
    earlier = command.make_folder(args.out, (*FILES, checkpoints.FOLDER))
    checkpoints.write_config(args.out, kept_options(args))
    return earlier


def kept_options(args: argparse.Namespace) -> dict[str, Any]:
    """Those that a run has to the end, however often it is resumed."""
    return {name: getattr(args, name) for name in (*_KEPT, *(field.name for field in MODEL_FIELDS))}


def is_resumed(args: argparse.Namespace) -> bool:
    """Whether ``--out`` has a run to go on with, and that is asked for."""
    return args.resume and (args.out / CONFIG_FILE).exists()


def run(
    args: argparse.Namespace,
    setup: Setup,
    training: Training,
    saved: checkpoints.Checkpoints | None,
    console: Console,
    watch: interrupt.Watch,
    started: float,
) -> int:
    """Trains, evaluates, samples and draws; returns the exit code."""
    exit_code, failure = 0, ""
    with Path(args.out / METRICS_FILE if is_first() else os.devnull).open("ab", buffering=0) as log:
        keeper = make_keeper(args, setup, training, saved, log)
        try:
            state, step = train(training, args.steps, keeper, console, watch)
            if step < args.steps:
                exit_code = watch.exit_code if watch.received else interrupt.TERMINATED_CODE
                _say(console, "interrupted: what was learned so far is in the metrics and pictures")
            else:
                write_results(log, training, state, console, started)
                write_sample(args, setup, training.graph, state, console)
        except FloatingPointError as error:
            exit_code, failure = 1, f"{error}; a smaller --learning-rate than {args.learning_rate:g} may help"
    for written in (saved, keeper.board):
        if written:
            written.close()
    if is_first():
        draw(args.out, console)
    _say(console, f"wrote {args.out} in {time.perf_counter() - started:.1f} s")
    if failure:
        _complain(failure)
    return exit_code


def make_keeper(
    args: argparse.Namespace,
    setup: Setup,
    training: Training,
    saved: checkpoints.Checkpoints | None,
    log: BinaryIO,
) -> Keeper:
    """What is done between steps, as the command line says."""
    board = Board(args.out / BOARD_FOLDER) if args.tensorboard and is_first() else None
    sizes = args.batch_size, args.sequence_length
    return Keeper(
        log,
        Intervals(
            log,
            training.schedule,
            math.prod(sizes),
            args.log_every,
            training.first,
            setup.model.flops(*sizes),
            board,
        ),
        functools.partial(held_out_losses, training),
        args.evaluate_every,
        saved if args.checkpoint_every else None,
        args.checkpoint_every,
        board,
        Profile(args.out / PROFILE_FOLDER, training.first + _BEFORE_PROFILE, args.profile) if args.profile else None,
    )


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


def held_out_losses(training: Training, state: nnx.State) -> dict[str, float]:
    """How well held-out text is predicted, and how much of that is the experts' doing."""
    return {name: evaluate(state, training.held_out) for name, evaluate in training.evaluations.items()}


def write_results(log: BinaryIO, training: Training, state: nnx.State, console: Console, started: float) -> None:
    """Evaluates the trained model; writes the last line of the metrics, and says what it says.

    Raises:
      FloatingPointError: a loss is no number, once it is written.
    """
    losses, digest = held_out_losses(training, state), parameters_sha256(training.graph, state)
    write_line(log, losses | {"parameters_sha256": digest, "seconds": time.perf_counter() - started})
    _say(console, f"{_verdict(losses)}\nSHA-256 of the parameters: {digest}")
    if not all(map(math.isfinite, losses.values())):
        raise FloatingPointError(f"the held-out loss is {losses['held_out_loss']} after the last step")


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
        earlier = begin(args)
    except (ValueError, OSError, ImportError, MemoryError) as error:
        _complain(error)
        return 2
    _say(console, f"compiled; {time.perf_counter() - started:.1f} s since the start")
    if earlier:
        _say(console, f"moved the results of an earlier run to {earlier}")
    saved = open_checkpoints(args)
    if args.resume:
        training = resume(training, saved)
        _say(console, f"resumed after step {training.first}" if training.first else "nothing to resume: begins anew")
    if is_first():
        keep_until(args.out / METRICS_FILE, training.first)
    return run(args, setup, training, saved, console, watch, started)


def open_checkpoints(args: argparse.Namespace) -> checkpoints.Checkpoints | None:
    """Those that the run writes, or goes on from."""
    folder = args.out / checkpoints.FOLDER
    is_needed = args.checkpoint_every or (args.resume and folder.is_dir())
    return checkpoints.Checkpoints(folder, args.keep_checkpoints) if is_needed else None


def resume(training: Training, saved: checkpoints.Checkpoints | None) -> Training:
    """Goes on after the newest checkpoint, if there is one."""
    step = saved.latest if saved else None
    if saved is None or step is None:
        return training
    return training._replace(first=step, state=saved.restore(step, training.state))


if __name__ == "__main__":
    interrupt.leave(main())
