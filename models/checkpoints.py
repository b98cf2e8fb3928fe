"""Checkpoints of a training run: written while it goes on, complete or not there, and read on any mesh."""

import json
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from models.metrics import CONFIG_FILE

FOLDER = "checkpoints"


class Checkpoints:
    """Those of one run, in a folder of their own, the newest few of them.

    An array is restored onto the sharding of the run that asks for it. If that has another number of padded experts,
    so that a first dimension differs, zeros are added or left out at its end: parameters and what the optimizer keeps
    of them are zero there.
    """

    def __init__(self, folder: Path, keep: int):
        import orbax.checkpoint as ocp  # which takes as long to import as all else

        self._ocp = ocp
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, cleanup_tmp_directories=True)
        self._manager = ocp.CheckpointManager(folder.absolute(), options=options)

    @property
    def latest(self) -> int | None:
        """The step of the newest one; ``None``: there is none."""
        return self._manager.latest_step()

    def save(self, step: int, state: nnx.State) -> None:
        """Copies the state and returns; it is written behind the next steps."""
        self._manager.save(step, args=self._ocp.args.PyTreeSave(_by_name(state)), force=True)

    def restore(self, step: int, like: nnx.State) -> nnx.State:
        """The state of that step, with the structure, shapes and shardings of ``like``.

        Raises:
          ValueError: it has other parameters.
        """
        ocp, wanted = self._ocp, _by_name(like)
        restored = self._manager.restore(
            step,
            args=ocp.args.PyTreeRestore(
                item=wanted,
                restore_args={
                    name: ocp.ArrayRestoreArgs(
                        sharding=array.sharding, global_shape=array.shape, dtype=array.dtype, strict=False
                    )
                    for name, array in wanted.items()
                },
            ),
        )
        return jax.tree.unflatten(jax.tree.structure(like), [restored[name] for name in wanted])

    def must_end(self, step: int) -> bool:
        """Whether one of several processes was told to end (SIGTERM), and all have agreed to do so after this step."""
        return jax.process_count() > 1 and self._manager.reached_preemption(step)

    def close(self) -> None:
        """Returns when all of them are written."""
        self._manager.wait_until_finished()
        self._manager.close()


def _by_name(state: nnx.State) -> dict[str, jax.Array]:
    return {jax.tree_util.keystr(path): array for path, array in jax.tree_util.tree_leaves_with_path(state)}


def write_config(folder: Path, config: dict[str, Any]) -> None:
    """Writes what a run was asked for beside its metrics."""
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=1, default=str) + "\n")


def check_config(folder: Path, config: dict[str, Any]) -> None:
    """Refuses to go on with a run under other arguments than it was begun with.

    Raises:
      ValueError: an argument differs; the text names it and both values.
      OSError: there is nothing to go on with.
    """
    begun = json.loads((folder / CONFIG_FILE).read_text())
    for name, value in json.loads(json.dumps(config, default=str)).items():
        if begun.get(name) != value:
            flag = "--" + name.replace("_", "-")
            raise ValueError(
                f"{flag} is {value}, and {folder} was begun with {begun.get(name)}; --resume goes on with that, or "
                "begins anew in another --out"
            )
