"""Where tokens go: random routings, with distinct experts within each token as any top-k router gives them."""

import numpy as np

# Expert number r, in order of popularity, is as popular as 1 / r.
ZIPF_EXPONENT = 1.0


def uniform(random: np.random.Generator, tokens: int, experts: int, top_k: int) -> np.ndarray:
    """int32 ``[tokens, top_k]``: every set of experts is equally likely.

    Example:
      >>> uniform(np.random.default_rng(0), tokens=5, experts=8, top_k=2).shape
      (5, 2)
    """
    return _top_k_of(np.zeros(experts), random, tokens, top_k)


def zipf(random: np.random.Generator, tokens: int, experts: int, top_k: int) -> np.ndarray:
    """int32 ``[tokens, top_k]``: drawn without replacement with probability 1 / rank; who is popular is random too."""
    log_popularity = -ZIPF_EXPONENT * np.log(1 + np.arange(experts))
    return _top_k_of(random.permutation(log_popularity), random, tokens, top_k)


ROUTINGS = {"uniform": uniform, "zipf": zipf}


def router_weights(random: np.random.Generator, tokens: int, top_k: int) -> np.ndarray:
    """float32 ``[tokens, top_k]``, positive, with sum 1."""
    weights = random.uniform(0.1, 1.0, (tokens, top_k)).astype(np.float32)
    return weights / weights.sum(axis=1, keepdims=True)


def _top_k_of(log_popularity, random, tokens, top_k):
    # The k largest of logits plus Gumbel noise are a draw of k without replacement.
    noisy = log_popularity + random.gumbel(size=(tokens, len(log_popularity)))
    return np.argsort(-noisy, axis=1)[:, :top_k].astype(np.int32)
