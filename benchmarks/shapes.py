"""The shapes that are measured: one expert-parallel rank's share of the layers of known models."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Shape:
    """One layer.

    Attributes:
      name: what records call it.
      hidden: ``H``.
      intermediate: ``I`` of one expert.
      experts: experts of one rank, or of all together where ``whole``.
      tokens: tokens of one rank, or of all together where ``whole``.
      top_k: ``K`` experts per token.
      whole: ``experts`` and ``tokens`` are shared out, so that all layouts of ranks do the same work.
    """

    name: str
    hidden: int
    intermediate: int
    experts: int
    tokens: int
    top_k: int
    whole: bool = False

    def over(self, ep: int, data: int) -> "Sizes":
        """Sizes over ``data`` groups of ``ep`` ranks.

        Example:
          >>> SHAPES["demo"].over(ep=4, data=2)
          Sizes(tokens=4096, experts=8)
        """
        if self.whole:
            if self.experts % ep or self.tokens % (ep * data):
                raise ValueError(
                    f"--ep {ep} --data {data}: shape {self.name} has {self.experts} experts for {ep} ranks and "
                    f"{self.tokens} tokens for {ep * data}; both must divide"
                )
            return Sizes(self.tokens, self.experts)
        return Sizes(self.tokens * ep * data, self.experts * ep)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Tokens of all ranks of all groups, and experts of one group."""

    tokens: int
    experts: int


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("v3", hidden=7168, intermediate=2048, experts=16, tokens=4096, top_k=8),  # Kimi K2's too
        Shape("qwen3.5", hidden=4096, intermediate=1024, experts=32, tokens=8192, top_k=10),
        Shape("short", hidden=7168, intermediate=2048, experts=32, tokens=2048, top_k=8),  # 512 rows an expert
        Shape("glm-5.2", hidden=6144, intermediate=2048, experts=16, tokens=4096, top_k=8),
        Shape("v4-pro", hidden=7168, intermediate=3072, experts=16, tokens=4096, top_k=6),
        Shape("mixtral", hidden=4096, intermediate=14336, experts=8, tokens=4096, top_k=2),
        Shape("demo", hidden=128, intermediate=128, experts=8, tokens=4096, top_k=2, whole=True),  # of `make demo`
        Shape("tiny", hidden=64, intermediate=48, experts=4, tokens=96, top_k=2),
    )
}

GPU_SHAPES = ("v3", "qwen3.5", "short", "glm-5.2", "v4-pro", "mixtral")
CPU_SHAPES = ("demo",)
