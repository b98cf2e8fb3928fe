"""MXFP4, in which gpt-oss was published: 32 values of four bits share a power of two.

A tensor ``w [..., n]`` is stored as ``w_blocks [..., n / 32, 16]``, uint8 with the earlier value in the lower four
bits, and ``w_scales [..., n / 32]``, uint8 exponents with a bias of 127. A value is one sign, two bits of exponent, one
of mantissa (E2M1).
"""

import numpy as np

BLOCK = 32
"""Values that share a scale."""

BYTES = BLOCK // 2
"""That their bits take."""

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = np.array([*_MAGNITUDES, *(-value for value in _MAGNITUDES)], np.float32)


def dequantize(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The values, f32 ``[..., n]``; bf16 holds them exactly as well.

    Args:
      blocks: uint8 ``[..., n / 32, 16]``.
      scales: uint8 ``[..., n / 32]``.

    Example:
      >>> dequantize(np.full((1, 16), 0x2A, np.uint8), np.array([128], np.uint8))[:3]
      array([-2.,  2., -2.], dtype=float32)
    """
    values = np.stack([_VALUES[blocks & 15], _VALUES[blocks >> 4]], axis=-1)
    values = values.reshape(*scales.shape, BLOCK)
    values = np.ldexp(values, scales.astype(np.int32)[..., None] - 127)
    return values.reshape(*scales.shape[:-1], scales.shape[-1] * BLOCK)
