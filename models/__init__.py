"""Flax language models on top of :mod:`mok_jax`: examples, run from a checkout and not installed with it."""

import mok_jax  # noqa: F401 - refuses a Python that cannot read what follows.
