"""Measurements of the layer beside everything else that can compute it; ``python -m benchmarks.layer --help``."""
