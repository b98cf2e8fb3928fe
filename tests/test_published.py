"""Published layers, whole: the zoo's arguments against NumPy, each rule switched off once, and the docs' tables."""

import dataclasses
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mok_jax.layer import Settings
from mok_jax.nnx import MoE
from mok_jax.zoo import LAYERS
from support.compare import relative_l2
from support.published_layers import EXPERTS, HIDDEN, INTERMEDIATE, MODELS, SHARED_WIDTH, layer, random_weights, swiglu

TOKENS = 24
SMALL = {"hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE, "num_experts": EXPERTS}
DOCUMENT = (Path(__file__).parents[1] / "docs" / "published-models.md").read_text()
HASH_ROUTED = [name for name in LAYERS if LAYERS[name].hash_routed_layers]

# What a layer's arguments are without one rule of it; the same where it is off already. To normalise a softmax over all
# experts is to take it over the chosen ones: both have to go for the weights to be others.
WITHOUT = {
    "router bias": lambda a: {"router_bias": False},
    "selection bias": lambda a: {"expert_bias": None},
    "groups": lambda a: {"num_groups": 1, "group_topk": 1},
    "normalised weights": lambda a: {"softmax_after_topk": False, "norm_topk_prob": False},
    "weights as they are": lambda a: {"norm_topk_prob": True},
    "scale": lambda a: {"routed_scaling_factor": 1.0},
    "score": lambda a: (
        {"score_function": "sigmoid" if a["score_function"] != "sigmoid" else "sqrtsoftplus"}
        | {"softmax_after_topk": False}
    ),
    "experts per token": lambda a: {"num_experts_per_tok": a["num_experts_per_tok"] % 8 + 1},
    "weight on the input": lambda a: {"apply_router_weight_on_input": False},
    "activation": lambda a: {"activation": "swiglu"},
    "clamp": lambda a: {"activation_limit": None},
    "experts' biases": lambda a: {"use_bias": False},
    "shared clamp": lambda a: {"shared_activation_limit": None},
    "shared gate": lambda a: {"shared_expert_gate": False},
    "shared experts": lambda a: (
        {"num_shared_experts": 0, "shared_intermediate_size": None}
        | {"shared_expert_gate": False, "shared_activation_limit": None}
    ),
}

# The rules that a model can have in the NumPy layers, beside its router's own.
RULES = {
    "router bias": lambda model: model.router_bias,
    "selection bias": lambda model: model.selection_bias,
    "weight on the input": lambda model: model.weight_on_input,
    "activation": lambda model: model.activation is not swiglu,
    "clamp": lambda model: model.limit < np.inf,
    "experts' biases": lambda model: model.expert_biases,
    "shared clamp": lambda model: model.shared_limit < np.inf,
    "shared gate": lambda model: model.shared_gate,
    "shared experts": lambda model: model.shared_width > 0,
}


def random_tokens():
    return jnp.asarray(np.random.default_rng(1).normal(size=(TOKENS, HIDDEN)).astype(np.float32))


def small_arguments(name):
    """The zoo's arguments of a model with the sizes of the NumPy layers."""
    arguments = LAYERS[name].arguments() | SMALL
    if arguments.get("shared_intermediate_size"):
        arguments["shared_intermediate_size"] = SHARED_WIDTH
    return arguments


def make_layer(model, implementation="megakernel", **arguments):
    """A layer with the NumPy layer's weights, as many as it has."""
    made = MoE(**arguments, implementation=implementation, rngs=nnx.Rngs(0))
    weights = random_weights(model)
    state = nnx.to_flat_state(nnx.state(made))
    nnx.update(made, nnx.from_flat_state([(path, jnp.asarray(weights["/".join(path)])) for path, _ in state]))
    return made


@pytest.mark.parametrize("implementation", ["reference", "megakernel"])
@pytest.mark.parametrize("name", LAYERS)
def test_against_numpy(name, implementation):
    x, model = random_tokens(), MODELS[name]
    got = make_layer(model, implementation, **small_arguments(name))(x)
    assert relative_l2(got.output, layer(model, random_weights(model), np.asarray(x))) < 1e-5


@pytest.mark.parametrize("name", HASH_ROUTED)
def test_hash_routed_layers_against_numpy(name):
    """Their ids come from a table, and they have no selection bias."""
    x, model = random_tokens(), MODELS[name]
    made = make_layer(model, **small_arguments(name) | {"expert_bias": False})
    rng = np.random.default_rng(3)
    rows = np.array([rng.permutation(EXPERTS)[: made.settings.num_experts_per_tok] for _ in range(TOKENS)], np.int32)
    want = layer(model, random_weights(model), np.asarray(x), rows)
    out = made(x, expert_ids=jnp.asarray(rows))
    assert relative_l2(out.output, want) < 1e-5 < 1e-2 < relative_l2(made(x).output, want)
    np.testing.assert_array_equal(out.expert_load, np.bincount(rows.reshape(-1), minlength=EXPERTS))


@pytest.mark.parametrize("name", LAYERS)
def test_every_rule_matters(name):
    """Each rule that the model's arguments state, switched off by itself, gives another layer."""
    x, model, arguments = random_tokens(), MODELS[name], small_arguments(name)
    want = layer(model, random_weights(model), np.asarray(x))
    published, seen = Settings(**arguments), set()
    for rule, change in WITHOUT.items():
        without = arguments | change(arguments)
        if Settings(**without) != published:
            seen.add(rule)
            assert relative_l2(make_layer(model, **without)(x).output, want) > 1e-2, rule
    of_model = {"score", "experts per token"} | {rule for rule, has in RULES.items() if has(model)}
    assert of_model <= seen, of_model - seen


@pytest.mark.parametrize("name", ["deepseek-v4-flash", "gpt-oss-20b", "llama-4-scout"])
def test_gradients_of_implementations_agree(name):
    """Of ``x`` and all parameters, and none is zero: the router's bias and what lies behind clamps have theirs."""

    def gradients(implementation):
        made = make_layer(MODELS[name], implementation, **small_arguments(name))
        of = nnx.jit(nnx.grad(lambda made, x: jnp.sum(jnp.sin(made(x).output)), argnums=(0, 1)))
        state, dx = of(made, random_tokens())
        return {"/".join(path): leaf[...] for path, leaf in nnx.to_flat_state(state)} | {"x": dx}

    got, want = gradients("megakernel"), gradients("reference")
    assert got.keys() == want.keys() and ("gate/bias" in got) == MODELS[name].router_bias
    for parameter in got:
        assert np.abs(want[parameter]).max() > 0
        assert relative_l2(got[parameter], want[parameter]) < 1e-5, parameter


def test_shared_experts_stay_a_swiglu():
    """Whatever the routed ones have in its place; nor are they clamped with those."""
    x, model = random_tokens(), dataclasses.replace(MODELS["gpt-oss-20b"], shared_width=INTERMEDIATE)
    weights = random_weights(model)
    made = make_layer(model, **small_arguments("gpt-oss-20b") | {"num_shared_experts": 1})
    assert relative_l2(made(x).output, layer(model, weights, np.asarray(x))) < 1e-5


def row_of(name, *cells):
    """A row of a table; what a model does not have is an empty cell."""
    return "|".join(["", *(f" {cell}" * (cell not in (False, None, "")) + " " for cell in (name, *cells)), ""])


def shapes_row(name, published):
    sizes = published.hidden_size, published.intermediate_size, published.num_experts, published.num_experts_per_tok
    width = published.shared_intermediate_size or published.intermediate_size
    shared = f"{published.num_shared_experts} x {width}" if published.num_shared_experts else ""
    return row_of(name, *sizes, shared, published.dense_first_layers or "", published.hash_routed_layers or "")


def router_row(name, published):
    groups = published.num_groups or 1
    return row_of(
        name,
        published.score_function + " of the chosen" * bool(published.softmax_after_topk),
        published.router_bias and "yes",
        published.selection_bias and "yes",
        groups > 1 and f"{published.group_topk} of {groups}",
        published.norm_topk_prob and "yes",
        published.routed_scaling_factor,
        "input" if published.apply_router_weight_on_input else "output",
    )


def experts_row(name, published):
    return row_of(
        name,
        published.activation,
        published.activation_limit,
        published.expert_biases and "yes",
        published.shared_activation_limit,
        published.shared_gated and "yes",
    )


def sources_row(name, published):
    return row_of(name, "; ".join(published.sources))


@pytest.mark.parametrize("row", [shapes_row, router_row, experts_row, sources_row])
def test_document_is_in_step(row):
    """Every entry has its row in each table, as it is, and no other has one."""
    rows = [line for line in DOCUMENT.splitlines() if line.startswith("|")]
    for name, published in LAYERS.items():
        assert row(name, published) in rows
    named = [line.split("|")[1].strip() for line in rows]
    assert set(named) == {*LAYERS, "model", "---"} and all(named.count(name) == 4 for name in LAYERS)
