"""Published Mixture-of-Experts layers: what their configurations say, under the names of this package's arguments.

Shapes and routing rules to plan with, to test against and to quote; weights and the models around them are elsewhere.
"""

import dataclasses
from typing import Any, Literal

from mok_jax.activation import Activation


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layer:
    """One Mixture-of-Experts layer as published. ``None`` is what the publication leaves open or does not have.

    Attributes:
      hidden_size: ``H``.
      intermediate_size: ``I``, of one routed expert.
      num_experts: ``E``, that the router can choose.
      num_experts_per_tok: ``K``.
      num_shared_experts: experts that every token passes through.
      shared_intermediate_size: of one of those.
      shared_gated: whether a sigmoid gate scales their output.
      score_function: what turns logits into scores.
      softmax_after_topk: whether the softmax runs over the chosen logits only.
      selection_bias: whether a bias steers which experts are chosen, but not their weights.
      num_groups: groups of experts that are chosen first.
      group_topk: how many of the groups.
      routed_scaling_factor: multiplies the weights.
      activation: see :func:`mok_jax.moe`.
      activation_limit: clamp of gate and up.
      expert_biases: whether the experts' products have biases.
      hash_routed_layers: how many of the model's first layers choose experts by a hash of the token instead.
    """

    hidden_size: int
    intermediate_size: int
    num_experts: int
    num_experts_per_tok: int
    num_shared_experts: int
    shared_intermediate_size: int | None = None
    shared_gated: bool | None = None
    score_function: Literal["softmax", "sigmoid", "sqrtsoftplus"]
    softmax_after_topk: bool | None = None
    selection_bias: bool | None = None
    num_groups: int | None = None
    group_topk: int | None = None
    routed_scaling_factor: float
    activation: Activation = "swiglu"
    activation_limit: float | None = None
    expert_biases: bool = False
    hash_routed_layers: int = 0

    def arguments(self) -> dict[str, Any]:
        """For ``mok_jax.nnx.MoE`` and ``mok_jax.linen.MoE``: all that they need to know, but for what is left open.

        Layers that route by a hash of the token are not expressed.

        Example:
          >>> arguments = LAYERS["qwen3.5-397b-a17b"].arguments()
          >>> arguments["num_experts"], arguments["shared_expert_gate"], "expert_bias" in arguments
          (512, True, False)
        """
        names = {"shared_gated": "shared_expert_gate", "selection_bias": "expert_bias", "expert_biases": "use_bias"}
        fields = dataclasses.asdict(self)
        del fields["hash_routed_layers"]
        return {names.get(name, name): value for name, value in fields.items() if value is not None}


LAYERS: dict[str, Layer] = {
    "kimi-k2": Layer(  # K2 and K2.5
        hidden_size=7168,
        intermediate_size=2048,
        num_experts=384,
        num_experts_per_tok=8,
        num_shared_experts=1,
        score_function="sigmoid",
        selection_bias=True,
        num_groups=1,
        group_topk=1,
        routed_scaling_factor=2.827,
    ),
    "deepseek-v3": Layer(
        hidden_size=7168,
        intermediate_size=2048,
        num_experts=256,
        num_experts_per_tok=8,
        num_shared_experts=1,
        score_function="sigmoid",
        selection_bias=True,
        num_groups=8,
        group_topk=4,
        routed_scaling_factor=2.5,
    ),
    "deepseek-v4-flash": Layer(
        hidden_size=4096,
        intermediate_size=2048,
        num_experts=256,
        num_experts_per_tok=6,
        num_shared_experts=1,
        score_function="sqrtsoftplus",
        routed_scaling_factor=1.5,
        activation_limit=10.0,
        hash_routed_layers=3,
    ),
    "glm-5.2": Layer(
        hidden_size=6144,
        intermediate_size=2048,
        num_experts=256,
        num_experts_per_tok=8,
        num_shared_experts=1,
        score_function="sigmoid",
        selection_bias=True,
        num_groups=1,
        group_topk=1,
        routed_scaling_factor=2.5,
    ),
    "qwen3.5-397b-a17b": Layer(
        hidden_size=4096,
        intermediate_size=1024,
        num_experts=512,
        num_experts_per_tok=10,
        num_shared_experts=1,
        shared_intermediate_size=1024,
        shared_gated=True,
        score_function="softmax",
        routed_scaling_factor=1.0,
    ),
    "qwen3-235b-a22b": Layer(
        hidden_size=4096,
        intermediate_size=1536,
        num_experts=128,
        num_experts_per_tok=8,
        num_shared_experts=0,
        score_function="softmax",
        routed_scaling_factor=1.0,
    ),
    "mixtral-8x7b": Layer(
        hidden_size=4096,
        intermediate_size=14336,
        num_experts=8,
        num_experts_per_tok=2,
        num_shared_experts=0,
        score_function="softmax",
        routed_scaling_factor=1.0,
    ),
    "gpt-oss-120b": Layer(
        hidden_size=2880,
        intermediate_size=2880,
        num_experts=128,
        num_experts_per_tok=4,
        num_shared_experts=0,
        score_function="softmax",
        softmax_after_topk=True,
        routed_scaling_factor=1.0,
        activation="gpt_oss",
        activation_limit=7.0,
        expert_biases=True,
    ),
}
