"""Flax language models on top of :mod:`mok_jax`: examples, run from a checkout and not installed with it."""
