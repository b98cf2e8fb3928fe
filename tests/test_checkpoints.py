"""Training that is interrupted and resumed: the same parameters as without, on any number of devices."""

import functools
import random
import re
import signal
import time

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from models import train
from models.checkpoints import Checkpoints
from models.config import ModelConfig
from models.metrics import read_metrics
from models.options import parse_arguments
from models.step import compile_train_step, make_optimizer, make_state
from models.transformer import Transformer
from mok_jax.sharding import make_mesh
from support.training import finish, start, wait_for, write_text

ALIKE = "--steps", "200", "--deterministic"
TINY = ModelConfig(num_layers=1, hidden_size=16, num_heads=2, intermediate_size=8)


# ---- On other meshes.


class Run:
    """A model, its optimizer and its step over ``ep`` devices."""

    def __init__(self, ep, parts=1, optimizer=None):
        self.mesh = make_mesh(expert_parallelism=ep, devices=jax.devices("cpu")[:ep])
        model = Transformer(TINY, mesh=self.mesh, implementation="reference", rngs=nnx.Rngs(0))
        self.graph, self.state = make_state(model, optimizer or make_optimizer(1e-2, 10)[0], self.mesh)
        crop = np.random.default_rng(0).integers(0, 256, (24, 17)).astype(np.int32)
        sharding = NamedSharding(self.mesh, P(None, self.mesh.axis_names))
        self.crops = jax.device_put(crop.reshape(parts, -1, 17), sharding)

    @functools.cached_property
    def step(self):
        return compile_train_step(self.graph, self.state, self.crops, self.mesh)

    def logits(self):
        model, _ = nnx.merge(self.graph, self.state)
        return np.asarray(model(self.crops[0, :, :-1]).logits)


def without_padding(state):
    """All arrays by name, those of experts without their padding; that must be zero."""
    arrays = {}
    for path, array in jax.tree_util.tree_leaves_with_path(state):
        name, array = jax.tree_util.keystr(path), np.asarray(array)
        if re.search("wi_0|wi_1|wo", name):
            assert not array[TINY.num_experts :].any(), name
            array = array[: TINY.num_experts]
        arrays[name] = array
    return arrays


def test_a_checkpoint_fits_every_mesh(tmp_path):
    """From 8 devices to 4, 3 (where the experts are padded) and 1, with what the optimizer keeps of them."""
    saved = Checkpoints(tmp_path, keep=10)
    run = Run(8)
    run.state, _ = run.step(run.state, run.crops)
    for number, ep in enumerate((4, 3, 1)):
        saved.save(number, run.state)
        expected, logits = without_padding(run.state), run.logits()
        run = Run(ep)
        run.state = saved.restore(number, run.state)
        jax.tree.map(np.testing.assert_array_equal, without_padding(run.state), expected)
        np.testing.assert_allclose(run.logits(), logits, rtol=1e-5, atol=1e-5)
        if ep == 3:  # the others show no more
            run.state, metrics = run.step(run.state, run.crops)
            assert np.isfinite(metrics["loss"])
    saved.close()


def test_what_is_not_whole_is_not_there(tmp_path):
    saved = Checkpoints(tmp_path, keep=3)
    assert saved.latest is None
    run = Run(1)
    saved.save(5, run.state)
    saved.close()
    (tmp_path / "9.orbax-checkpoint-tmp").mkdir()
    assert Checkpoints(tmp_path, keep=3).latest == 5


def test_parts_of_a_batch_have_its_gradient():
    """Up to the router's losses, which are not linear in the tokens; plain gradient descent shows it."""
    states = []
    for parts in (1, 3):
        run = Run(1, parts, optax.sgd(1.0))
        run.state, metrics = run.step(run.state, run.crops)
        states.append((without_padding(run.state), float(metrics["loss"]), np.asarray(metrics["expert_load"])))
    (whole, loss, load), (in_parts, loss_in_parts, load_in_parts) = states
    assert loss == pytest.approx(loss_in_parts, rel=1e-5)
    np.testing.assert_array_equal(load, load_in_parts)
    for name, array in whole.items():
        np.testing.assert_allclose(in_parts[name], array, rtol=1e-3, atol=1e-4, err_msg=name)


# ---- The command.


@pytest.fixture(scope="module")
def text_file(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text"))


def test_interrupted_runs_end_where_others_do(text_file, tmp_path):
    """SIGTERM makes a last checkpoint; SIGKILL at a random moment none. Both times the run is resumed."""
    alone = start(text_file, tmp_path / "alone", *ALIKE)
    keeping = *ALIKE, "--checkpoint-every", "7", "--resume"
    terminated = start(text_file, tmp_path / "run", *keeping)
    wait_for(terminated, "step    10")
    terminated.send_signal(signal.SIGTERM)
    output, code = finish(terminated)
    assert code == 143 and "interrupted" in output, output
    left = Checkpoints(tmp_path / "run" / "checkpoints", keep=3).latest
    assert left >= 10
    killed = start(text_file, tmp_path / "run", *keeping)
    wait_for(killed, f"resumed after step {left}")
    delay = random.uniform(0, 2)
    time.sleep(delay)
    killed.send_signal(signal.SIGKILL)
    finish(killed)
    output, code = finish(start(text_file, tmp_path / "run", *ALIKE, "--resume"))  # and writes no more of them
    assert code == 0, f"killed after {delay:.3f} s: {output}"
    _, code = finish(alone)
    assert code == 0
    (intervals, results), (expected, expected_results) = (
        read_metrics(tmp_path / run / "metrics.jsonl") for run in ("run", "alone")
    )
    assert results["parameters_sha256"] == expected_results["parameters_sha256"], f"killed after {delay:.3f} s"
    assert [i["step"] for i in intervals] == [i["step"] for i in expected]


def test_a_run_is_resumed_as_it_was_begun(tmp_path):
    """Or not at all: what would change the result is refused, before anything is compiled, and nothing is moved."""
    train.begin(parse_arguments(["--out", str(tmp_path), "--steps", "7"]))

    def refusal(*arguments):
        with pytest.raises(ValueError, match="was begun with") as refused:
            train.set_up(parse_arguments(["--out", str(tmp_path), "--resume", *arguments]))
        return str(refused.value)

    assert refusal("--steps", "8").startswith("--steps is 8, and ")
    assert refusal("--steps", "7", "--num-experts", "4").startswith("--num-experts is 4, and ")
    others = parse_arguments(["--out", str(tmp_path), "--resume", "--steps", "7", "--log-every", "3"])
    assert train.is_resumed(others) and train.begin(others) is None
