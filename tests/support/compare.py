"""How far two results are apart: from the oracle by relative L2, from another run by bits."""

import numpy as np

from support.oracle import Outputs, forward_backward


def relative_l2(actual, expected) -> float:
    """``|actual - expected| / |expected|`` over all elements, in float64; inf where the two cannot be compared.

    NaNs must be at the same places, which are then left out; infinities must be equal and are left out likewise. If
    everything expected is zero, anything but exact zeros is infinitely wrong.
    """
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    if actual.shape != expected.shape:
        return np.inf
    finite = np.isfinite(expected)
    if not np.array_equal(actual[~finite], expected[~finite], equal_nan=True) or not np.isfinite(actual[finite]).all():
        return np.inf
    error, scale = np.linalg.norm(actual[finite] - expected[finite]), np.linalg.norm(expected[finite])
    if scale == 0:
        return 0.0 if error == 0 else np.inf
    return float(error / scale)


def assert_close(actual, expected, tolerance):
    """Each of six outputs, by relative L2."""
    errors = dict(zip(Outputs._fields, map(relative_l2, actual, expected), strict=True))
    assert max(errors.values()) <= tolerance, errors


def assert_harm_stays(actual, inputs, token, tolerance):
    """A value of ``token`` is not finite, or its first router weight: others, and experts that it does not reach, are
    as if it were absent; its own rows, and the gradients of the experts that it reaches, are not finite.
    """
    reached = token, (slice(None) if np.isfinite(inputs.expert_weights).all() else 0)
    ids = inputs.expert_ids.copy()
    ids[reached] = -1
    expected = forward_backward(*inputs._replace(expert_ids=ids).for_oracle())
    experts = np.unique(inputs.expert_ids[reached])
    others = np.arange(len(inputs.x)) != token
    untouched = np.setdiff1d(np.arange(len(inputs.wi_0)), experts)
    kept = (others,) * 3 + (untouched,) * 3
    assert_close(*([output[k] for output, k in zip(six, kept, strict=True)] for six in (actual, expected)), tolerance)
    assert not np.isfinite(np.concatenate([output[token] for output in actual[:3]])).all()
    assert not any(np.isfinite(actual.d_wo[expert]).all() for expert in experts)


def assert_dtypes(actual, inputs):
    """Each output has the dtype of the input that it belongs to."""
    like = (inputs.x, inputs.x, inputs.expert_weights, inputs.wi_0, inputs.wi_1, inputs.wo)
    assert [a.dtype for a in actual] == [a.dtype for a in like]


def differences(actual, expected):
    """By output, the number of elements that are not the same bits: of NaN and of the sign of zero as well."""
    return {name: count_differences(getattr(actual, name), getattr(expected, name)) for name in expected._fields}


def count_differences(actual, expected):
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    bits = np.dtype(f"u{actual.dtype.itemsize}")
    return int((actual.view(bits) != expected.view(bits)).sum())
