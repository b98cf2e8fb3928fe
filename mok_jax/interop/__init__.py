"""Published layers in and out: ``config.json``, and weights in the layouts of Hugging Face's checkpoints.

:func:`arguments` says what a ``config.json`` describes; :func:`load_layer` reads a layer's weights onto a mesh, and
:func:`save_layer` writes them back. Which tensor is which parameter stands in ``mok_jax/interop/layouts.py``. Weights
need the package safetensors, which the extra ``interop`` brings; nothing here needs PyTorch.
"""

from mok_jax.interop.checkpoint import arguments_of, load_layer, save_layer
from mok_jax.interop.config import MODEL_TYPES, arguments
from mok_jax.interop.parameters import assign, linen_variables, parameters_of

__all__ = [
    "MODEL_TYPES",
    "arguments",
    "arguments_of",
    "assign",
    "linen_variables",
    "load_layer",
    "parameters_of",
    "save_layer",
]
