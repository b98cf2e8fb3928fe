"""Small layers of both front ends, with their sizes and inputs, and when two results of one are the same."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mok_jax import linen
from mok_jax.layer import Settings
from mok_jax.nnx import MoE
from support.compare import relative_l2

HIDDEN, EXPERTS, K = 16, 8, 2
F32_TOLERANCE = 1e-5


def make_layer(mesh=None, **changes):
    arguments = {
        "hidden_size": HIDDEN,
        "intermediate_size": 24,
        "num_experts": EXPERTS,
        "num_experts_per_tok": K,
        "aux_loss_coeff": 0.3,
        "z_loss_coeff": 0.2,
        "implementation": "reference",
    }
    return MoE(**(arguments | changes), mesh=mesh, rngs=nnx.Rngs(0))


def make_input(*leading, seed=1):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(*leading, HIDDEN)).astype(np.float32))


def make_full_layer(mesh=None, **changes):
    """A layer with everything that a router or shared experts can have, and biases that matter."""
    layer = make_layer(
        mesh,
        **{
            "score_function": "sigmoid",
            "num_groups": 4,
            "group_topk": 2,
            "routed_scaling_factor": 2.5,
            "router_bias": True,
            "expert_bias": True,
            "expert_bias_update_rate": 0.25,
            "seq_aux": True,
            "num_shared_experts": 2,
            "shared_intermediate_size": 12,
            "shared_expert_gate": True,
            "shared_activation_limit": 0.5,
        }
        | changes,
    )
    layer.expert_bias[...] = jnp.asarray(random_bias(layer.settings.num_experts))
    layer.gate.bias[...] = jnp.asarray(random_bias(layer.settings.num_experts, seed=6), layer.gate.bias.dtype)
    return layer


def random_bias(num_experts, seed=5):
    return np.random.default_rng(seed).normal(scale=0.2, size=num_experts).astype(np.float32)


def twin(layer):
    """The Linen layer of an NNX layer, and its variables."""
    state = nnx.to_pure_dict(nnx.state(layer))
    collections = {linen.STATE: {"expert_bias": state.pop("expert_bias")}} if "expert_bias" in state else {}
    fields = {field.name: getattr(layer.settings, field.name) for field in dataclasses.fields(Settings)}
    return linen.MoE(**fields), {"params": state} | collections


def assert_same(got, want):
    for got_leaf, want_leaf in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert got_leaf.shape == want_leaf.shape and got_leaf.dtype == want_leaf.dtype
        assert relative_l2(got_leaf, want_leaf) < F32_TOLERANCE
