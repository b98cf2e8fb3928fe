"""Refusals at trace time: each names the argument, its value and the nearest legal value or the remedy."""

import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mok_jax.activation import ACTIVATIONS
from mok_jax.config import ROW_BLOCK, MoKConfig, require_choice
from mok_jax.semantics import accumulator_dtype, axis_names, group_size


def check_arguments(x, expert_ids, expert_weights, wi_0, wi_1, wo, axis_name, activation, activation_limit, config):
    """Checks the arguments of ``mok_jax.moe`` that every implementation shares."""
    check_expert_step(activation, activation_limit, config)
    _check_axis_name(axis_name)
    for name, array, rank, letters in (
        ("x", x, 2, "[T, H]"),
        ("expert_ids", expert_ids, 2, "[T, K]"),
        ("expert_weights", expert_weights, 2, "[T, K]"),
        ("wi_0", wi_0, 3, "[E_local, H, I]"),
        ("wi_1", wi_1, 3, "[E_local, H, I]"),
        ("wo", wo, 3, "[E_local, I, H]"),
    ):
        if not isinstance(array, jax.Array | np.ndarray):
            raise TypeError(f"{name} is of type {type(array).__name__}; it must be an array: jnp.asarray({name})")
        if array.ndim != rank:
            raise ValueError(
                f"{name} has shape {array.shape}; it must have {rank} dimensions, {letters}"
                + (f": {name}.reshape(-1, {array.shape[-1]})" if array.ndim > rank == 2 else "")
            )
    _check_dtypes(x, expert_ids, expert_weights, wi_0, wi_1, wo)
    _check_shapes(x, expert_ids, expert_weights, wi_0, wi_1, wo)
    ranks = group_size(axis_name)
    _check_top_k(expert_ids.shape[1], wi_0.shape[0] * ranks)
    check_rows(ranks, x.shape[0], expert_ids.shape[1], wi_0.shape[0])


def check_expert_step(activation: Any, activation_limit: Any, config: Any) -> None:
    """Checks what says how experts compute, and not on what."""
    require_choice("activation", activation, ACTIVATIONS)
    check_activation_limit("activation_limit", activation_limit)
    if not isinstance(config, MoKConfig):
        raise TypeError(f"config is {config!r}; it must be a mok_jax.MoKConfig, such as mok_jax.MoKConfig()")


def check_activation_limit(name: str, limit: Any) -> None:
    """Checks a clamp of gate and up."""
    if limit is None:
        return
    if isinstance(limit, bool | jax.Array) or not isinstance(limit, numbers.Real):
        raise TypeError(f"{name} is {limit!r}; it must be None or a Python number, known while tracing, such as 7.0")
    if not float(limit) > 0:
        raise ValueError(f"{name} is {limit!r}; it must be None or a positive number, such as 7.0")


def _check_axis_name(axis_name) -> None:
    if axis_name is None:
        return
    if not isinstance(axis_name, str) and not (
        isinstance(axis_name, tuple) and axis_name and all(isinstance(name, str) for name in axis_name)
    ):
        raise TypeError(
            f"axis_name is {axis_name!r}; it must be the name of a mesh axis, a tuple of such names, or None"
        )
    there = jax.sharding.get_abstract_mesh().manual_axes
    missing = [name for name in axis_names(axis_name) if name not in there]
    if missing:
        raise ValueError(
            f"axis_name is {axis_name!r}, but no jax.shard_map around this call is manual over {missing} (it is over "
            f"{sorted(there)}). Call mok_jax.moe inside jax.shard_map over all axes of a mesh that has it, or with "
            "axis_name=None for one rank"
        )


def _check_dtypes(x, expert_ids, expert_weights, wi_0, wi_1, wo) -> None:
    if x.dtype == jnp.float16 or not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"x has dtype {x.dtype}; it must be bfloat16 or float32: x.astype(jnp.bfloat16)")
    if expert_ids.dtype != jnp.int32:
        raise TypeError(f"expert_ids has dtype {expert_ids.dtype}; it must be int32: expert_ids.astype(jnp.int32)")
    wide = accumulator_dtype(x.dtype)
    if expert_weights.dtype not in (jnp.float32, wide):
        raise TypeError(
            f"expert_weights has dtype {expert_weights.dtype}; it must be float32: expert_weights.astype(jnp.float32)"
        )
    for name, weight in (("wi_0", wi_0), ("wi_1", wi_1), ("wo", wo)):
        if weight.dtype not in (jnp.float32, jnp.bfloat16, wide):
            legal = " or ".join(sorted({"bfloat16", "float32", str(wide)}))
            raise TypeError(f"{name} has dtype {weight.dtype}; it must be {legal}: {name}.astype({str(x.dtype)!r})")
        if weight.dtype != wi_0.dtype:
            raise TypeError(
                f"{name} has dtype {weight.dtype} and wi_0 has {wi_0.dtype}; all weights must have one dtype"
            )


def _check_shapes(x, expert_ids, expert_weights, wi_0, wi_1, wo) -> None:
    (tokens, hidden), (experts, _, intermediate) = x.shape, wi_0.shape
    for name, array, expected, why in (
        ("expert_ids", expert_ids, (tokens, expert_ids.shape[1]), f"x has {tokens} tokens"),
        ("expert_weights", expert_weights, expert_ids.shape, "that is the shape of expert_ids"),
        ("wi_0", wi_0, (experts, hidden, intermediate), f"x has width {hidden}"),
        ("wi_1", wi_1, wi_0.shape, "that is the shape of wi_0"),
        ("wo", wo, (experts, intermediate, hidden), f"wi_0 has shape {wi_0.shape}"),
    ):
        if array.shape != expected:
            raise ValueError(f"{name} has shape {array.shape}; it must have shape {expected}, since {why}")
    for name, argument, size in (
        ("T", "x", tokens),
        ("H", "x", hidden),
        ("K", "expert_ids", expert_ids.shape[1]),
        ("E_local", "wi_0", experts),
        ("I", "wi_0", intermediate),
    ):
        if size < 1:
            raise ValueError(f"{name}, of {argument}, is {size}; the nearest legal value is 1")


def _check_top_k(top_k: int, experts: int) -> None:
    if top_k > experts:
        raise ValueError(f"expert_ids has K = {top_k} experts per token of {experts}; the nearest legal K is {experts}")


def check_rows(ranks: int, tokens: int, top_k: int, local_experts: int) -> None:
    """Rows are counted in int32, whatever computes them: on the device, in the row table, in XLA's indices."""
    limit, slots = 2**31 - ROW_BLOCK, ranks * tokens * top_k
    # As max_rows in csrc/moe/shape.h; here too, because "xla" needs no extension.
    rows = (slots + min(local_experts, slots) * (ROW_BLOCK - 1)) // ROW_BLOCK * ROW_BLOCK
    if rows > limit:
        nearest = (limit - local_experts * (ROW_BLOCK - 1)) // (ranks * top_k)
        raise ValueError(
            f"T, tokens of x on each device, is {tokens}: with EP = {ranks} and K = {top_k}, {rows} rows may arrive at "
            f"one, more than {limit}; the nearest legal T is {nearest}"
        )
