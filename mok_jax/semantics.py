"""What a call means, apart from how experts are reached: bad tokens, the weighted sum, statistics, dtypes.

The definition (:mod:`mok_jax.reference`) and XLA's way (:mod:`mok_jax.xla`) are made of these. The executors of the
megakernel do the same in code of their own.
"""

import jax
import jax.numpy as jnp
import numpy as np

from mok_jax.stats import MoEStats


def combine(outputs, ids, expert_weights):
    """Weighted sum over k, ascending, in the accumulator's dtype: ``outputs [T, K, H]`` to ``[T, H]``.

    A slot with id -1 is selected away rather than multiplied by zero: its weight may be anything, NaN included.
    """
    accumulator = accumulator_dtype(outputs.dtype)
    used = ids >= 0
    expert_weights = jnp.where(used, expert_weights.astype(accumulator), 0)
    terms = jnp.where(used[..., None], expert_weights[..., None] * outputs.astype(accumulator), 0)
    total = terms[:, 0]
    for k in range(1, terms.shape[1]):
        total = total + terms[:, k]
    return total


def drop_bad_tokens(expert_ids, num_experts):
    """Ids with every slot of a bad token replaced by -1, and which tokens are bad (bool ``[T]``)."""
    bad = jnp.any((expert_ids < -1) | (expert_ids >= num_experts), axis=1)
    return jnp.where(bad[:, None], -1, expert_ids), bad


def poison(y, bad, x, expert_weights):
    """Makes rows of bad tokens NaN in ``y [T, H]`` and in the gradients of ``x`` and ``expert_weights``.

    NaN times the token's own inputs does both: the same factor multiplies the cotangent, even a zero one. For other
    tokens the factor is 0 and the term is selected away, so their infinities do not become NaN here.
    """
    factor = jnp.where(bad, jnp.nan, 0).astype(y.dtype)[:, None]
    inputs = x.astype(y.dtype) + expert_weights.astype(y.dtype).sum(axis=1, keepdims=True)
    return y + jnp.where(bad[:, None], factor * inputs, 0)


def routing_stats(ids, bad, num_experts, num_local_experts, axis_name):
    """``MoEStats`` of this rank from its ``ids [T, K]`` (bad tokens dropped) and those of its peers."""
    rows = jnp.bincount(ids.reshape(-1) + 1, length=num_experts + 1)[1:].astype(jnp.int32)
    if axis_name is not None:
        first = jax.lax.axis_index(axis_name) * num_local_experts
        rows = jax.lax.dynamic_slice(jax.lax.psum(rows, axis_name), (first,), (num_local_experts,))
    return MoEStats(rows=rows.sum(dtype=jnp.int32), rows_per_expert=rows, bad_tokens=bad.sum(dtype=jnp.int32))


def group_size(axis_name):
    """Ranks that share the experts: of the mesh axis, or axes, of that name; 1 for None."""
    return 1 if axis_name is None else jax.lax.axis_size(axis_name)


def axis_names(axis_name) -> tuple[str, ...]:
    """The names of a mesh axis, or of several together; none for None.

    Example:
      >>> axis_names("expert"), axis_names(("rack", "expert")), axis_names(None)
      (('expert',), ('rack', 'expert'), ())
    """
    return () if axis_name is None else (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)


def accumulator_dtype(dtype):
    """The dtype that sums are kept in: float64 for float64, else float32."""
    return np.promote_types(dtype, np.float32)


def vary_alike(*arrays, axis_name):
    """Types all arrays as varying over the union of their manual axes and ``axis_name``.

    Under ``shard_map``'s ``check_vma=True`` a loop carry must have one type throughout, and a weight that is replicated
    over a data axis gets its gradient summed over that axis by the transpose of this cast. Elsewhere nothing happens.
    """
    axes = set(axis_names(axis_name)).union(*(jax.typeof(array).manual_axis_type.varying for array in arrays))

    def vary(array):
        missing = axes - jax.typeof(array).manual_axis_type.varying
        return jax.lax.pcast(array, tuple(sorted(missing)), to="varying") if missing else array

    return tuple(vary(array) for array in arrays)
