"""Published layers at full size, forward and backward, compiled for a rack of virtual devices from shapes alone."""

import math
import resource

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mok_jax import plan
from mok_jax.nnx import MoE
from mok_jax.sharding import LARGEST_DOMAIN, make_mesh
from mok_jax.zoo import LAYERS

TOKENS_PER_DEVICE = 4096
GIB = 2**30

# Of 72 devices: all, with experts padded or not; 64, the rest idle; or groups of as many as there are experts.
EXPERT_PARALLELISM = {
    "kimi-k2": 72,
    "deepseek-v2": 72,
    "deepseek-v2-lite": 64,
    "deepseek-v3": 72,
    "deepseek-v4-flash": 64,
    "deepseek-v4-pro": 72,
    "ernie-4.5-21b-a3b": 64,
    "glm-4.5-air": 64,
    "glm-4.7": 8,
    "glm-5.2": 72,
    "gpt-oss-20b": 8,
    "gpt-oss-120b": 72,
    "llama-4-scout": 8,
    "mixtral-8x7b": 8,
    "olmoe-1b-7b": 64,
    "qwen2-57b-a14b": 64,
    "qwen3-30b-a3b": 64,
    "qwen3-235b-a22b": 64,
    "qwen3.5-397b-a17b": 64,
}


def bytes_of_a_device(leaf):
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize


def bytes_of_shared_experts(published):
    """Gate and up and their gradients in f32; weights in bf16, and their gradients in f32 before they are summed."""
    width = published.num_shared_experts * (published.shared_intermediate_size or published.intermediate_size)
    return width * (TOKENS_PER_DEVICE * 4 * 4 + published.hidden_size * 3 * (2 + 4))


@pytest.mark.parametrize("name", LAYERS)
def test_compiles_at_full_size(name):
    """The program takes what ``plan`` says, and what that leaves out: shared experts, and up to 30 % for the router."""
    published, ep = LAYERS[name], EXPERT_PARALLELISM[name]
    mesh = make_mesh(expert_parallelism=ep, devices=jax.devices("cpu")[:LARGEST_DOMAIN], allow_idle=ep == 64)
    arguments = published.arguments() | {"mesh": mesh, "implementation": "megakernel"}
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    layer = nnx.eval_shape(lambda: MoE(**arguments, dtype=jnp.bfloat16, aux_loss_coeff=0.01, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(layer)
    tokens = mesh.size, TOKENS_PER_DEVICE, published.hidden_size
    x = jax.ShapeDtypeStruct(tokens, jnp.bfloat16, sharding=NamedSharding(mesh, P(mesh.axis_names)))

    def loss(state, x):
        out = nnx.merge(graph, state)(x)
        return jnp.sum(jnp.square(out.output.astype(jnp.float32))) + out.aux_loss

    memory = jax.jit(jax.grad(loss, (0, 1))).lower(state, x).compile().memory_analysis()
    given, temporary = memory.argument_size_in_bytes, memory.temp_size_in_bytes
    print(
        f"{name}: {given / GIB:.2f} GiB of arguments, {temporary / GIB:.2f} GiB of temporaries on each of {mesh.size}"
    )

    sizes = plan.make_plan(
        plan.Request(
            model=name,
            gpus=72,
            expert_parallelism=ep,
            allow_idle=ep == 64,
            tokens_per_gpu=TOKENS_PER_DEVICE,
            implementation="megakernel",
        )
    ).bytes
    planned = (
        sizes.residuals + sizes.backward_buffers + sizes.workspace + sizes.weight_copy + sizes.backward_activations
    )
    assert planned < temporary < 1.3 * planned + bytes_of_shared_experts(published)
    experts = {key: leaf for key in ("wi_0", "wi_1", "wo") for leaf in jax.tree.leaves(state[key])}
    router = jax.tree.leaves(state["gate"])
    assert sum(map(bytes_of_a_device, [*experts.values(), *router])) == sizes.parameters
    assert given == sum(map(bytes_of_a_device, [*jax.tree.leaves(state), x]))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - resident < 2**20  # in KiB: nothing of this size exists
