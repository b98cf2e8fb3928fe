"""The example of a Flax model before and after our layer: both train, little differs, and they compute the same."""

import difflib
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn

from models import flax_moe, flax_moe_with_mok_jax, losses
from support.compare import relative_l2

EXAMPLES = flax_moe, flax_moe_with_mok_jax
CHANGED_LINES = 20  # fewer, added and removed together


@pytest.mark.parametrize("example", EXAMPLES, ids=("plain", "mok_jax"))
def test_trains(example):
    """The loss begins near 6 nats a byte, somewhat above ln 256, and 12 steps take at least 2 off it."""
    losses = list(example.train(steps=12))
    assert losses[0] - losses[-1] > 2, losses


def test_the_programs_say_why_their_losses_differ(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["flax_moe", "--steps", "11"])
    losses.main("models.flax_moe", "", lambda steps: iter([2.0] * steps))
    why, *lines = capsys.readouterr().out.splitlines()
    assert "different losses: Linen draws initial parameters by their path" in why
    assert lines == ["step    0  loss 2.000 nats per byte", "step   10  loss 2.000 nats per byte"]
    for example in EXAMPLES:
        assert "losses.main(" in Path(example.__file__).read_text()


def test_few_lines_differ_and_the_guide_shows_them():
    before, after = (Path(example.__file__).read_text().splitlines() for example in EXAMPLES)
    changed = [line for line in difflib.unified_diff(before, after, "", "", n=0, lineterm="") if is_change(line)]
    assert 0 < len(changed) < CHANGED_LINES, "\n".join(changed)

    guide = (Path(__file__).parents[1] / "docs" / "guide.md").read_text()
    (shown,) = re.findall(r"^```diff\n(.*?)^```$", guide, re.MULTILINE | re.DOTALL)
    shown = [line for line in shown.splitlines() if is_change(line) and not line.endswith("...")]
    assert shown and set(shown) <= set(changed)


def is_change(line: str) -> bool:
    """Whether a line of a unified diff was added or removed; the names of the files look alike."""
    return line[:1] in ("+", "-") and line[:3] not in ("+++", "---")


def test_same_parameters_give_the_same_outputs_and_gradients():
    """The layer's parameters have the names and shapes that the plain experts have, one level deeper."""
    tokens = jax.random.randint(jax.random.key(1), (4, flax_moe.LENGTH), 0, 256)
    plain = jax.jit(flax_moe.LanguageModel().init)(jax.random.key(0), tokens)["params"]
    boxed = jax.eval_shape(flax_moe_with_mok_jax.LanguageModel().init, jax.random.key(0), tokens)["params"]
    ours = under_moe(plain)
    assert jax.tree.map(jnp.shape, ours) == jax.tree.map(jnp.shape, nn.unbox(boxed))

    before, after = under_moe(results(flax_moe, plain, tokens)), results(flax_moe_with_mok_jax, ours, tokens)
    errors = jax.tree.map(relative_l2, after, before)
    assert max(jax.tree.leaves(errors)) <= 1e-5, errors


def results(example, params, tokens) -> dict:
    """Logits, load-balancing loss, and the parameters' gradients of a function of both."""

    def scalar(params):
        logits, aux_loss = example.LanguageModel().apply({"params": params}, tokens)
        return jnp.mean(jax.nn.logsumexp(logits, -1)) + aux_loss, {"logits": logits, "aux_loss": aux_loss}

    gradients, outputs = jax.jit(jax.grad(scalar, has_aux=True))(params)
    return outputs | {"gradients": gradients}


def under_moe(tree):
    """The same tree with the plain experts' part of it one level deeper, where ours is."""
    if not isinstance(tree, dict):
        return tree
    return {name: {"moe": part} if name == "Experts_0" else under_moe(part) for name, part in tree.items()}
