"""``python -m mok_jax verify``: it finds what is wrong, names it, and finds nothing else."""

import json
import re

import numpy as np
import pytest

from mok_jax import verify
from mok_jax.__main__ import main
from mok_jax.verify import Request, Results

SIZES = {"hidden_size": 72, "intermediate_size": 40, "num_experts": 8, "num_experts_per_tok": 3, "tokens": 96}
LINE = "verify --hidden-size 72 --intermediate-size 40 --num-experts 8 --num-experts-per-tok 3 --tokens 96"


def wrong(**changes):
    return [check for check in verify.verify(Request(**SIZES | changes)) if not check.holds]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"dtype": "float32"},
        {"activation": "gpt_oss", "activation_limit": 0.75},
        {"activation_limit": 0.75, "dtype": "float32"},
        {"expert_parallelism": 4},
        {"tokens": 1, "num_experts_per_tok": 8},
    ],
    ids=str,
)
def test_holds(changes):
    assert not wrong(**changes)


@pytest.mark.gpu
def test_holds_on_a_gpu(capsys):
    assert main(LINE.split()) == verify.HOLDS
    assert "communicating multiprocessors" in capsys.readouterr().out


def change_runs(monkeypatch, change):
    """``change(number of the run, inputs, results)`` stands for what the layer computes."""
    run_layer, count = verify.run_layer, iter(range(100))

    def changed(request, inputs, ranks, **settings):
        return change(next(count), inputs, run_layer(request, inputs, ranks, **settings))

    monkeypatch.setattr(verify, "run_layer", changed)


@pytest.mark.parametrize("field", Results._fields)
def test_wrong_numbers(monkeypatch, field):
    """In every run alike, so that bits are the same."""

    def change(_, inputs, results):
        return results._replace(**{field: (getattr(results, field) * 1.02).astype(getattr(results, field).dtype)})

    change_runs(monkeypatch, change)
    assert [check.name.split()[0] for check in wrong(dtype="float32")] == [field]


def test_a_result_that_is_not_finite_is_wrong(monkeypatch):
    def change(_, inputs, results):
        results.y[...] = np.where(np.arange(results.y.shape[1]) == 3, np.nan, results.y)
        return results

    change_runs(monkeypatch, lambda *a: change(*a[:2], Results(*map(np.array, a[2]))))
    assert [check.found.split()[0] for check in wrong() if check.name.startswith("y ")] == ["inf"]


@pytest.mark.parametrize("field", Results._fields)
def test_other_bits_in_one_run(monkeypatch, field):
    def change(number, inputs, results):
        if number != 2:
            return results
        bits = np.array(getattr(results, field))
        bits.view("u2")[0, ..., -1] ^= 1
        return results._replace(**{field: bits})

    change_runs(monkeypatch, change)
    (check,) = wrong()
    assert check.name == "same bits: the smallest minibatch" and check.found.endswith(f" of {field}")


def test_a_token_that_depends_on_others(monkeypatch):
    """Token 0 is one of those that stay; token 1 changes."""
    first = verify.make_inputs(Request(**SIZES)).x

    def change(_, inputs, results):
        if np.array_equal(inputs.x[1], first[1]):
            return results
        y = np.array(results.y)
        y.view("u2")[0, 0] ^= 1
        return results._replace(y=y)

    change_runs(monkeypatch, change)
    (check,) = wrong()
    assert check == ("same bits of a token, whatever the others are", False, "elements that differ: 1 of y")


def test_command(capsys):
    assert main([*LINE.split(), "--json"]) == verify.HOLDS
    printed = json.loads(capsys.readouterr().out)
    assert printed["device"] == "cpu" and all(check["holds"] for check in printed["checks"])
    assert main([*LINE.split(), "--model", "mixtral-8x7b", "--dtype", "float32"]) == verify.HOLDS
    assert len(capsys.readouterr().out.splitlines()) == len(printed["checks"])


def test_command_says_what_is_wrong(monkeypatch, capsys):
    change_runs(monkeypatch, lambda _, inputs, results: results._replace(dx=-results.dx))
    assert main(LINE.split()) == verify.DOES_NOT_HOLD
    assert "WRONG  dx of 32 tokens" in capsys.readouterr().out


SIZES_OF_LINE = LINE.removeprefix("verify ")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ("--tokens 8", r"--hidden-size is missing, or --model, which has one\."),
        ("--model mixtral-8x7b --num-experts 1", r"num_experts_per_tok=2 is more than num_experts=1; the nearest is 1"),
        (SIZES_OF_LINE + " --expert-parallelism 5", r"tokens=96 must be a multiple of .*=5; the nearest is 95"),
        (SIZES_OF_LINE + " --expert-parallelism 3", r"num_experts=8 must be a multiple of .*=3; the nearest is 9"),
        (
            SIZES_OF_LINE + " --expert-parallelism 99",
            r"expert_parallelism=99 is more than the 72 .* the nearest is 72",
        ),
    ],
)
def test_refusals(capsys, options, text):
    assert main(["verify", *options.split()]) == verify.REFUSED
    assert re.match(f"refused: {text}", capsys.readouterr().err)
    assert main(["verify", *options.split(), "--json"]) == verify.REFUSED
    assert re.match(text, json.loads(capsys.readouterr().out)["refused"])
