"""The training loop, and what it does between steps: metrics, evaluations, checkpoints."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import jax
import optax
from flax import nnx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from models import interrupt
from models.checkpoints import Checkpoints
from models.evaluation import Evaluation
from models.metrics import Board, Intervals, record


class Training(NamedTuple):
    """A training step, compiled, and what it is given. ``schedule`` says the learning rate of a step; ``first`` is how
    many steps the state has behind it, and ``crops_after`` gives all later ones their batches.
    """

    step: Callable
    schedule: optax.Schedule
    graph: nnx.GraphDef
    state: nnx.State
    first: int
    crops_after: Callable[[int], Iterator[jax.Array]]
    held_out: list[jax.Array]
    evaluations: dict[str, Evaluation]


class Profile(NamedTuple):
    """JAX's profiler over ``steps`` steps, of which the first follows ``begin``, for Perfetto or TensorBoard."""

    folder: Path
    begin: int
    steps: int

    def after(self, step: int, state: nnx.State, *, last: bool) -> None:
        """Starts or ends the trace where it is time to."""
        end = self.begin + self.steps
        if step == self.begin and not last:
            jax.profiler.start_trace(self.folder)
        elif step == end or (last and self.begin < step < end):
            jax.block_until_ready(state)
            jax.profiler.stop_trace()


class Keeper(NamedTuple):
    """What becomes of a step's metrics and state besides the next step; 0 as ``every``: nothing."""

    log: BinaryIO
    intervals: Intervals
    evaluate: Callable[[nnx.State], dict[str, float]]
    evaluate_every: int
    checkpoints: Checkpoints | None
    checkpoint_every: int
    board: Board | None = None
    profile: Profile | None = None

    def after(self, step: int, state: nnx.State, metrics: dict, *, last: bool) -> tuple[bool, list[dict]]:
        """Returns whether training ends here, which ``last`` may say already, and intervals that are complete."""
        last = last or (self.checkpoints is not None and self.checkpoints.must_end(step))
        saves = self.checkpoints is not None and (last or step % self.checkpoint_every == 0)
        # A checkpoint is only of steps whose metrics are written: those before it are not computed again.
        lines = [self.intervals.add(metrics), self.intervals.read() if saves else None]
        if self.evaluate_every and step % self.evaluate_every == 0:
            record(self.log, self.board, {"step": step} | self.evaluate(state))
        if self.checkpoints and saves:
            self.checkpoints.save(step, state)
        if self.profile:
            self.profile.after(step, state, last=last)
        return last, [line for line in lines if line]


def train(
    training: Training, steps: int, keeper: Keeper, console: Console, watch: interrupt.Watch
) -> tuple[nnx.State, int]:
    """Runs the training loop, which signals end early; returns the state, and after how many steps."""
    state, step, ends = training.state, training.first, False
    crops = training.crops_after(step)
    columns = (
        MofNCompleteColumn(),
        BarColumn(bar_width=None),
        TimeRemainingColumn(),
        TextColumn("{task.fields[status]}"),
    )
    with watch.deferred(), Progress(*columns, console=console, expand=True) as progress:
        task = progress.add_task("train", total=steps, completed=step, status="")
        while step < steps and not ends:
            step += 1
            state, metrics = training.step(state, next(crops))
            ends, lines = keeper.after(step, state, metrics, last=watch.received or step == steps)
            for line in lines:
                status = _status(line)
                progress.update(task, status=status)
                if not console.is_terminal:
                    console.print(f"step {line['step']:5d}  {status}")
            progress.advance(task)
        keeper.intervals.finish()
    return state, step


def _status(line: dict) -> str:
    balance = f"busiest expert {line['load_imbalance']:.2f}x"
    return f"loss {line['loss']:.3f}  {line['tokens_per_s']:,.0f} tokens/s  {balance}"
