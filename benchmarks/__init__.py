"""Measurements of the layer beside everything else that can compute it; ``python -m benchmarks.layer --help``."""

import mok_jax  # noqa: F401 - refuses a Python that cannot read what follows.
