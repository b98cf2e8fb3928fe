"""Shape of the demonstration model. Frozen and hashable, so that a model can be made from it under ``jit``."""

import dataclasses
import math

BYTE_VOCABULARY = 256


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer over bytes with a Mixture-of-Experts layer in every block.

    The defaults are what ``python -m models.train`` trains within minutes on two CPU cores.

    Attributes:
      preset: a name in ``mok_jax.zoo.LAYERS``: blocks have that layer's router, activation, biases and shared experts.
        Empty: plain SwiGLU experts behind a router with ``score_function``.
      num_layers: blocks of attention and experts.
      hidden_size: ``H``; a multiple of ``num_heads``, two times over (rotary positions turn pairs).
      num_heads: attention heads.
      intermediate_size: ``I`` of one expert.
      num_experts: ``E``.
      num_experts_per_tok: ``K``.
      score_function: of the router without a preset, ``"softmax"``, ``"sigmoid"`` or ``"sqrtsoftplus"``.
      aux_loss_coeff: factor of the load-balancing loss.
      z_loss_coeff: factor of the router z-loss.
      rope_base: wavelength, over 2 pi, of the slowest rotary pair.
      tie_embeddings: use the embedding as the output matrix as well.
      remat: recompute a block's activations in the backward, all but the expert step (:func:`mok_jax.remat_policy`).
      scan: stack the blocks' parameters and loop over them, so that one block is compiled however many there are.

    ``remat`` and ``scan`` change neither the initial parameters nor what is computed from them.

    Raises:
      ValueError: ``num_layers`` or ``num_heads`` is below 1, ``hidden_size`` no multiple of ``2 * num_heads``, or a
        factor of a loss or ``rope_base`` no number that can be used. :class:`mok_jax.nnx.MoE` refuses the rest.

    Example:
      >>> ModelConfig(num_layers=1).hidden_size
      128
    """

    preset: str = ""
    num_layers: int = 2
    hidden_size: int = 128
    num_heads: int = 4
    intermediate_size: int = 128
    num_experts: int = 8
    num_experts_per_tok: int = 2
    score_function: str = "softmax"
    aux_loss_coeff: float = 0.01
    z_loss_coeff: float = 0.001
    rope_base: float = 10_000.0
    tie_embeddings: bool = False
    remat: bool = False
    scan: bool = False

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1; the nearest is 1.")
        step = 2 * self.num_heads
        if self.hidden_size < 1 or self.hidden_size % step:
            nearest = max(1, round(self.hidden_size / step)) * step
            raise ValueError(
                f"hidden_size={self.hidden_size} must be a multiple of 2 * num_heads ({step}); "
                f"the nearest is {nearest}."
            )
        for name in ("aux_loss_coeff", "z_loss_coeff"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)} must be a finite number of at least 0.")
        if not 0 < self.rope_base < math.inf:
            raise ValueError(f"rope_base={self.rope_base} must be a finite number above 0, such as 10000.")
