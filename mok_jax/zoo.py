"""Published Mixture-of-Experts layers: what their configurations say, under the names of this package's arguments.

Shapes and rules to plan with, to train, to test against and to quote; weights and the models around them are elsewhere.
Where each is said to be so is ``Layer.sources`` and, rule by rule, ``docs/published-models.md``.
"""

import dataclasses
from typing import Any, Literal

from mok_jax.activation import Activation


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layer:
    """One Mixture-of-Experts layer as published, whole. ``None`` is what the publication does not have.

    Attributes:
      hidden_size: ``H``.
      intermediate_size: ``I``, of one routed expert.
      num_experts: ``E``, that the router can choose.
      num_experts_per_tok: ``K``.
      num_shared_experts: experts that every token passes through.
      shared_intermediate_size: of one of those.
      shared_gated: whether a sigmoid gate scales their output.
      shared_activation_limit: clamp of their gate and up.
      score_function: what turns logits into scores.
      softmax_after_topk: whether the softmax runs over the chosen logits only.
      router_bias: whether the router's logits have a bias.
      selection_bias: whether a bias steers which experts are chosen, but not their weights.
      num_groups: groups of experts that are chosen first.
      group_topk: how many of the groups.
      norm_topk_prob: whether the weights of a token are scaled to sum to 1.
      routed_scaling_factor: multiplies the weights.
      apply_router_weight_on_input: whether the weights multiply what goes into the experts instead of what comes out.
      activation: see :func:`mok_jax.moe`.
      activation_limit: clamp of gate and up.
      expert_biases: whether the experts' products have biases.
      hash_routed_layers: how many of the model's first layers take their experts from a table of the token: the layer
        is called with ``expert_ids=table[token]``, and has no selection bias.
      dense_first_layers: how many of the model's first layers are no such layers, but dense.
      sources: code and configurations that say so, those of the release first where they are public.
    """

    hidden_size: int
    intermediate_size: int
    num_experts: int
    num_experts_per_tok: int
    num_shared_experts: int
    shared_intermediate_size: int | None = None
    shared_gated: bool | None = None
    shared_activation_limit: float | None = None
    score_function: Literal["softmax", "sigmoid", "sqrtsoftplus"]
    softmax_after_topk: bool | None = None
    router_bias: bool = False
    selection_bias: bool | None = None
    num_groups: int | None = None
    group_topk: int | None = None
    norm_topk_prob: bool = True
    routed_scaling_factor: float
    apply_router_weight_on_input: bool = False
    activation: Activation = "swiglu"
    activation_limit: float | None = None
    expert_biases: bool = False
    hash_routed_layers: int = 0
    dense_first_layers: int = 0
    sources: tuple[str, ...]

    def arguments(self) -> dict[str, Any]:
        """For ``mok_jax.nnx.MoE`` and ``mok_jax.linen.MoE``: all that they need to know.

        A model's first ``hash_routed_layers`` are the same with ``expert_bias=False``.

        Example:
          >>> arguments = LAYERS["qwen3.5-397b-a17b"].arguments()
          >>> arguments["num_experts"], arguments["shared_expert_gate"], "expert_bias" in arguments
          (512, True, False)
        """
        names = {"shared_gated": "shared_expert_gate", "selection_bias": "expert_bias", "expert_biases": "use_bias"}
        fields = dataclasses.asdict(self)
        for name in ("hash_routed_layers", "dense_first_layers", "sources"):
            del fields[name]
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
        dense_first_layers=1,
        sources=(
            "transformers models/kimi_k25, whose text model is deepseek_v3",
            "transformers models/deepseek_v3 DeepseekV3TopkRouter, DeepseekV3MoE",
            "NVIDIA-NeMo/Megatron-Bridge KimiK2Provider",
        ),
    ),
    "deepseek-v2": Layer(
        hidden_size=5120,
        intermediate_size=1536,
        num_experts=160,
        num_experts_per_tok=6,
        num_shared_experts=2,
        score_function="softmax",
        num_groups=8,
        group_topk=3,
        norm_topk_prob=False,
        routed_scaling_factor=16.0,
        dense_first_layers=1,
        sources=(
            "deepseek-ai/DeepSeek-V3 inference/model.py Gate, inference/configs/config_236B.json",
            "transformers models/deepseek_v2 DeepseekV2TopkRouter, DeepseekV2Moe",
        ),
    ),
    "deepseek-v2-lite": Layer(  # and Coder-V2-Lite
        hidden_size=2048,
        intermediate_size=1408,
        num_experts=64,
        num_experts_per_tok=6,
        num_shared_experts=2,
        score_function="softmax",
        num_groups=1,
        group_topk=1,
        norm_topk_prob=False,
        routed_scaling_factor=1.0,
        dense_first_layers=1,
        sources=(
            "deepseek-ai/DeepSeek-V3 inference/model.py Gate, inference/configs/config_16B.json",
            "transformers models/deepseek_v2 DeepseekV2TopkRouter, DeepseekV2Moe",
            "deepseek-ai/DeepSeek-Coder-V2-Lite-Base config.json",
        ),
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
        dense_first_layers=3,
        sources=(
            "deepseek-ai/DeepSeek-V3 inference/model.py Gate, MoE, inference/configs/config_671B.json",
            "transformers models/deepseek_v3 DeepseekV3TopkRouter, DeepseekV3MoE",
        ),
    ),
    "deepseek-v4-flash": Layer(
        hidden_size=4096,
        intermediate_size=2048,
        num_experts=256,
        num_experts_per_tok=6,
        num_shared_experts=1,
        shared_activation_limit=10.0,
        score_function="sqrtsoftplus",
        selection_bias=True,
        routed_scaling_factor=1.5,
        activation_limit=10.0,
        hash_routed_layers=3,
        sources=(
            "transformers models/deepseek_v4 DeepseekV4TopKRouter, DeepseekV4HashRouter, DeepseekV4SparseMoeBlock",
            "transformers models/deepseek_v4 DeepseekV4Config, its defaults",
        ),
    ),
    "deepseek-v4-pro": Layer(
        hidden_size=7168,
        intermediate_size=3072,
        num_experts=384,
        num_experts_per_tok=6,
        num_shared_experts=1,
        shared_activation_limit=10.0,
        score_function="sqrtsoftplus",
        selection_bias=True,
        routed_scaling_factor=2.5,
        activation_limit=10.0,
        hash_routed_layers=3,
        sources=(
            "transformers models/deepseek_v4 DeepseekV4TopKRouter, DeepseekV4HashRouter, DeepseekV4SparseMoeBlock",
            "deepseek-ai/DeepSeek-V4-Pro config.json",
        ),
    ),
    "ernie-4.5-21b-a3b": Layer(
        hidden_size=2560,
        intermediate_size=1536,
        num_experts=64,
        num_experts_per_tok=6,
        num_shared_experts=2,
        score_function="softmax",
        selection_bias=True,
        routed_scaling_factor=1.0,
        dense_first_layers=1,
        sources=(
            "transformers models/ernie4_5_moe Ernie4_5_MoeTopKRouter, Ernie4_5_MoeSparseMoeBlock",
            "transformers models/ernie4_5_moe Ernie4_5_MoeConfig, its defaults",
        ),
    ),
    "glm-4.5-air": Layer(
        hidden_size=4096,
        intermediate_size=1408,
        num_experts=128,
        num_experts_per_tok=8,
        num_shared_experts=1,
        score_function="sigmoid",
        selection_bias=True,
        num_groups=1,
        group_topk=1,
        routed_scaling_factor=1.0,
        dense_first_layers=1,
        sources=(
            "transformers models/glm4_moe Glm4MoeTopkRouter, Glm4MoeMoE",
            "transformers models/glm4_moe Glm4MoeConfig, its defaults",
        ),
    ),
    "glm-4.7": Layer(  # and GLM-4.5
        hidden_size=5120,
        intermediate_size=1536,
        num_experts=160,
        num_experts_per_tok=8,
        num_shared_experts=1,
        score_function="sigmoid",
        selection_bias=True,
        num_groups=1,
        group_topk=1,
        routed_scaling_factor=2.5,
        dense_first_layers=3,
        sources=(
            "transformers models/glm4_moe Glm4MoeTopkRouter, Glm4MoeMoE",
            "zai-org/GLM-4.7 config.json",
        ),
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
        dense_first_layers=3,
        sources=(
            "transformers models/glm_moe_dsa GlmMoeDsaTopkRouter, GlmMoeDsaMoE",
            "transformers models/glm_moe_dsa GlmMoeDsaConfig, its defaults",
        ),
    ),
    "gpt-oss-20b": Layer(
        hidden_size=2880,
        intermediate_size=2880,
        num_experts=32,
        num_experts_per_tok=4,
        num_shared_experts=0,
        score_function="softmax",
        softmax_after_topk=True,
        router_bias=True,
        routed_scaling_factor=1.0,
        activation="gpt_oss",
        activation_limit=7.0,
        expert_biases=True,
        sources=(
            "openai/gpt-oss gpt_oss/torch/model.py MLPBlock, swiglu",
            "transformers models/gpt_oss GptOssTopKRouter, GptOssExperts",
            "openai/gpt-oss-20b config.json",
        ),
    ),
    "gpt-oss-120b": Layer(
        hidden_size=2880,
        intermediate_size=2880,
        num_experts=128,
        num_experts_per_tok=4,
        num_shared_experts=0,
        score_function="softmax",
        softmax_after_topk=True,
        router_bias=True,
        routed_scaling_factor=1.0,
        activation="gpt_oss",
        activation_limit=7.0,
        expert_biases=True,
        sources=(
            "openai/gpt-oss gpt_oss/torch/model.py ModelConfig, MLPBlock, swiglu",
            "transformers models/gpt_oss GptOssTopKRouter, GptOssExperts",
        ),
    ),
    "llama-4-scout": Layer(
        hidden_size=5120,
        intermediate_size=8192,
        num_experts=16,
        num_experts_per_tok=1,
        num_shared_experts=1,
        score_function="sigmoid",
        norm_topk_prob=False,
        routed_scaling_factor=1.0,
        apply_router_weight_on_input=True,
        sources=(
            "transformers models/llama4 Llama4Router, Llama4TextMoe",
            "transformers models/llama4 Llama4TextConfig, its defaults",
        ),
    ),
    "mixtral-8x7b": Layer(
        hidden_size=4096,
        intermediate_size=14336,
        num_experts=8,
        num_experts_per_tok=2,
        num_shared_experts=0,
        score_function="softmax",
        routed_scaling_factor=1.0,
        sources=(
            "transformers models/mixtral MixtralTopKRouter, MixtralExperts",
            "transformers models/mixtral MixtralConfig, its defaults",
        ),
    ),
    "olmoe-1b-7b": Layer(
        hidden_size=2048,
        intermediate_size=1024,
        num_experts=64,
        num_experts_per_tok=8,
        num_shared_experts=0,
        score_function="softmax",
        norm_topk_prob=False,
        routed_scaling_factor=1.0,
        sources=(
            "transformers models/olmoe OlmoeTopKRouter, OlmoeExperts",
            "allenai/OLMoE-1B-7B-0924 config.json",
        ),
    ),
    "qwen2-57b-a14b": Layer(
        hidden_size=3584,
        intermediate_size=2560,
        num_experts=64,
        num_experts_per_tok=8,
        num_shared_experts=1,
        shared_intermediate_size=20480,
        shared_gated=True,
        score_function="softmax",
        norm_topk_prob=False,
        routed_scaling_factor=1.0,
        sources=(
            "transformers models/qwen2_moe Qwen2MoeTopKRouter, Qwen2MoeSparseMoeBlock",
            "Qwen/Qwen2-57B-A14B config.json",
        ),
    ),
    "qwen3-30b-a3b": Layer(
        hidden_size=2048,
        intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
        num_shared_experts=0,
        score_function="softmax",
        routed_scaling_factor=1.0,
        sources=(
            "transformers models/qwen3_moe Qwen3MoeTopKRouter, Qwen3MoeSparseMoeBlock",
            "Ascend/MindSpeed-RL configs/model/qwen3_30b_a3b.yaml",
        ),
    ),
    "qwen3-235b-a22b": Layer(
        hidden_size=4096,
        intermediate_size=1536,
        num_experts=128,
        num_experts_per_tok=8,
        num_shared_experts=0,
        score_function="softmax",
        routed_scaling_factor=1.0,
        sources=(
            "transformers models/qwen3_moe Qwen3MoeTopKRouter, Qwen3MoeSparseMoeBlock",
            "Ascend/MindSpeed-RL configs/model/qwen3_235b_a22b.yaml",
        ),
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
        sources=(
            "transformers models/qwen3_5_moe Qwen3_5MoeTopKRouter, Qwen3_5MoeSparseMoeBlock",
            "Qwen/Qwen3.5-397B-A17B config.json",
        ),
    ),
}
