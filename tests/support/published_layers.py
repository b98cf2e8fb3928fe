"""Published Mixture-of-Experts layers in float64 NumPy, token by token, written down from the models' own code.

Nothing here knows of ``mok_jax``: which rules a model has is said by ``MODELS``, and where that comes from by
``docs/published-models.md``. Sizes are small, so that few tokens meet every rule; ``K``, groups, factors and limits are
those of the models. Weights are so large that clamps clamp, gates close and biases change choices.
"""

import dataclasses
from collections.abc import Callable

import numpy as np

HIDDEN, INTERMEDIATE, EXPERTS, SHARED_WIDTH = 16, 24, 32, 20


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def softmax(x):
    exponentials = np.exp(x - x.max())
    return exponentials / exponentials.sum()


def best(values, count):
    """Ids of the largest values, best first, equal ones by id."""
    return np.argsort(-values, kind="stable")[:count]


def in_best_groups(scores, groups, open_groups, group_score):
    """``scores`` with -inf outside the best groups of experts with consecutive ids."""
    split = scores.reshape(groups, -1)
    chosen = best(np.array([group_score(group) for group in split]), open_groups)
    return np.where(np.isin(np.arange(groups), chosen)[:, None], split, -np.inf).reshape(-1)


# Routers: from a token's logits [E] and the selection bias [E] to its ids [K] and their weights [K].


def mixtral(top_k):
    """Softmax over all, the best of it, scaled to sum to 1: also Qwen3 and Qwen3.5."""

    def route(logits, bias):
        probs = softmax(logits)
        ids = best(probs, top_k)
        return ids, probs[ids] / probs[ids].sum()

    return route


def olmoe(top_k):
    """Softmax over all, the best of it as they are: also Qwen2-MoE."""

    def route(logits, bias):
        probs = softmax(logits)
        ids = best(probs, top_k)
        return ids, probs[ids]

    return route


def ernie(top_k):
    """Softmax over all, chosen with a bias, scaled to sum to 1 but by no sum below 1e-12."""

    def route(logits, bias):
        probs = softmax(logits)
        ids = best(probs + bias, top_k)
        return ids, probs[ids] / max(probs[ids].sum(), 1e-12)

    return route


def deepseek_v2(top_k, scale, groups=1, open_groups=1):
    """Softmax over all, the best of it in the groups with the best expert, times a factor."""

    def route(logits, bias):
        probs = softmax(logits)
        ids = best(in_best_groups(probs, groups, open_groups, np.max), top_k)
        return ids, scale * probs[ids]

    return route


def deepseek_v3(top_k, scale, groups=1, open_groups=1):
    """Sigmoids, chosen with a bias in the groups with the best two experts, scaled to sum to a factor: also K2, GLM."""

    def route(logits, bias):
        scores = sigmoid(logits)
        choice = in_best_groups(scores + bias, groups, open_groups, lambda group: np.sort(group)[-2:].sum())
        ids = best(choice, top_k)
        return ids, scale * scores[ids] / (scores[ids].sum() + 1e-20)

    return route


def deepseek_v4(top_k, scale):
    """Square roots of softplus, chosen with a bias or by a row of a table, scaled to sum to a factor."""

    def route(logits, bias, table_row=None):
        scores = np.sqrt(np.logaddexp(0, logits))
        ids = best(scores + bias, top_k) if table_row is None else table_row
        return ids, scale * scores[ids] / (scores[ids].sum() + 1e-20)

    return route


def gpt_oss(top_k):
    """The best logits, softmax over them."""

    def route(logits, bias):
        ids = best(logits, top_k)
        return ids, softmax(logits[ids])

    return route


def llama4(top_k):
    """The best logits, their sigmoids."""

    def route(logits, bias):
        ids = best(logits, top_k)
        return ids, sigmoid(logits[ids])

    return route


def swiglu(gate, up):
    return gate * sigmoid(gate) * up


def gpt_oss_glu(gate, up):
    return gate * sigmoid(1.702 * gate) * (up + 1)


@dataclasses.dataclass(frozen=True)
class Model:
    """A model's rules: what its router does, and which of all that a layer could have its layers do have."""

    router: Callable
    router_bias: bool = False
    selection_bias: bool = False
    activation: Callable = swiglu
    limit: float = np.inf
    expert_biases: bool = False
    weight_on_input: bool = False
    shared_width: int = 0
    shared_gate: bool = False
    shared_limit: float = np.inf


DEEPSEEK_V4 = {"selection_bias": True, "limit": 10, "shared_width": INTERMEDIATE, "shared_limit": 10}
GPT_OSS = {"router_bias": True, "activation": gpt_oss_glu, "limit": 7, "expert_biases": True}

MODELS = {
    "kimi-k2": Model(deepseek_v3(8, 2.827), selection_bias=True, shared_width=INTERMEDIATE),
    "deepseek-v2": Model(deepseek_v2(6, 16, groups=8, open_groups=3), shared_width=2 * INTERMEDIATE),
    "deepseek-v2-lite": Model(deepseek_v2(6, 1), shared_width=2 * INTERMEDIATE),
    "deepseek-v3": Model(deepseek_v3(8, 2.5, 8, 4), selection_bias=True, shared_width=INTERMEDIATE),
    "deepseek-v4-flash": Model(deepseek_v4(6, 1.5), **DEEPSEEK_V4),
    "deepseek-v4-pro": Model(deepseek_v4(6, 2.5), **DEEPSEEK_V4),
    "ernie-4.5-21b-a3b": Model(ernie(6), selection_bias=True, shared_width=2 * INTERMEDIATE),
    "glm-4.5-air": Model(deepseek_v3(8, 1), selection_bias=True, shared_width=INTERMEDIATE),
    "glm-4.7": Model(deepseek_v3(8, 2.5), selection_bias=True, shared_width=INTERMEDIATE),
    "glm-5.2": Model(deepseek_v3(8, 2.5), selection_bias=True, shared_width=INTERMEDIATE),
    "gpt-oss-20b": Model(gpt_oss(4), **GPT_OSS),
    "gpt-oss-120b": Model(gpt_oss(4), **GPT_OSS),
    "llama-4-scout": Model(llama4(1), weight_on_input=True, shared_width=INTERMEDIATE),
    "mixtral-8x7b": Model(mixtral(2)),
    "olmoe-1b-7b": Model(olmoe(8)),
    "qwen2-57b-a14b": Model(olmoe(8), shared_width=SHARED_WIDTH, shared_gate=True),
    "qwen3-30b-a3b": Model(mixtral(8)),
    "qwen3-235b-a22b": Model(mixtral(8)),
    "qwen3.5-397b-a17b": Model(mixtral(10), shared_width=SHARED_WIDTH, shared_gate=True),
}


def random_weights(model):
    """All arrays that some layer has, f32, under the names of a layer's parameters; a model takes what it has."""
    rng = np.random.default_rng(0)

    def normal(scale, *shape):
        return rng.normal(scale=scale, size=shape).astype(np.float32)

    return {
        "gate/kernel": normal(HIDDEN**-0.5, HIDDEN, EXPERTS),
        "gate/bias": normal(1, EXPERTS),
        "expert_bias": normal(0.3, EXPERTS),
        "wi_0": normal(2, EXPERTS, HIDDEN, INTERMEDIATE),
        "wi_1": normal(2, EXPERTS, HIDDEN, INTERMEDIATE),
        "wo": normal(0.2, EXPERTS, INTERMEDIATE, HIDDEN),
        "wi_0_bias": normal(4, EXPERTS, INTERMEDIATE),
        "wi_1_bias": normal(4, EXPERTS, INTERMEDIATE),
        "wo_bias": normal(10, EXPERTS, HIDDEN),
        "shared_wi_0": normal(2, HIDDEN, model.shared_width),
        "shared_wi_1": normal(2, HIDDEN, model.shared_width),
        "shared_wo": normal(0.2, model.shared_width, HIDDEN),
        "shared_gate/kernel": normal(0.5, HIDDEN, 1),
    }


def expert(x, wi_0, wi_1, wo, activation, limit, biases=(0, 0, 0)):
    """One expert of one token; the gate is clamped from above, up from both sides."""
    gate, up = x @ wi_0 + biases[0], x @ wi_1 + biases[1]
    return activation(np.minimum(gate, limit), np.clip(up, -limit, limit)) @ wo + biases[2]


def layer(model, weights, x, table_rows=None):
    """The output ``[T, H]`` of tokens ``x [T, H]``; with ``table_rows [T, K]``, of a layer that routes by those."""
    w = {name: array.astype(np.float64) for name, array in weights.items()}
    output = np.zeros(x.shape)
    for token, row in enumerate(x.astype(np.float64)):
        logits = row @ w["gate/kernel"] + (w["gate/bias"] if model.router_bias else 0)
        table_row = () if table_rows is None else (table_rows[token],)
        ids, factors = model.router(logits, w["expert_bias"] if model.selection_bias else 0, *table_row)
        for e, factor in zip(ids, factors, strict=True):
            biases = [w[f"{name}_bias"][e] if model.expert_biases else 0 for name in ("wi_0", "wi_1", "wo")]
            taken = factor * row if model.weight_on_input else row
            given = expert(taken, w["wi_0"][e], w["wi_1"][e], w["wo"][e], model.activation, model.limit, biases)
            output[token] += given if model.weight_on_input else factor * given
        shared = expert(row, w["shared_wi_0"], w["shared_wi_1"], w["shared_wo"], swiglu, model.shared_limit)
        output[token] += shared * (sigmoid(row @ w["shared_gate/kernel"]) if model.shared_gate else 1)
    return output
