"""`moe`: the public function. Checks arguments while tracing, then hands over to one of three implementations.

A call's way from here: ``megakernel.moe`` (the fused FFI call), ``xla.moe`` (XLA's own operations) or
``reference.moe`` (the definition). All three mean the same.
"""

import functools
import os
import sys
import warnings
from typing import Literal, get_args, overload

import jax

from mok_jax import checks, megakernel, reference, support, xla
from mok_jax.activation import Activation
from mok_jax.config import MoKConfig, require_choice
from mok_jax.semantics import group_size
from mok_jax.stats import MoEStats

Implementation = Literal["megakernel", "xla", "reference"]


@overload
def moe(
    x: jax.Array,
    expert_ids: jax.Array,
    expert_weights: jax.Array,
    wi_0: jax.Array,
    wi_1: jax.Array,
    wo: jax.Array,
    *,
    axis_name: str | tuple[str, ...] | None = ...,
    activation: Activation = ...,
    activation_limit: float | None = ...,
    config: MoKConfig = ...,
    implementation: Implementation | None = ...,
    return_stats: Literal[False] = ...,
) -> jax.Array: ...
@overload
def moe(
    x: jax.Array,
    expert_ids: jax.Array,
    expert_weights: jax.Array,
    wi_0: jax.Array,
    wi_1: jax.Array,
    wo: jax.Array,
    *,
    axis_name: str | tuple[str, ...] | None = ...,
    activation: Activation = ...,
    activation_limit: float | None = ...,
    config: MoKConfig = ...,
    implementation: Implementation | None = ...,
    return_stats: Literal[True],
) -> tuple[jax.Array, MoEStats]: ...
def moe(
    x: jax.Array,
    expert_ids: jax.Array,
    expert_weights: jax.Array,
    wi_0: jax.Array,
    wi_1: jax.Array,
    wo: jax.Array,
    *,
    axis_name: str | tuple[str, ...] | None = None,
    activation: Activation = "swiglu",
    activation_limit: float | None = None,
    config: MoKConfig = MoKConfig(),  # noqa: B008 (frozen)
    implementation: Implementation | None = None,
    return_stats: bool = False,
) -> jax.Array | tuple[jax.Array, MoEStats]:
    """Sends each token through its experts and sums what they return, weighted by the router.

    ``y[t] = sum_k w[t, k] * (silu(x[t] @ wi_0[e]) * (x[t] @ wi_1[e])) @ wo[e]`` with ``e = expert_ids[t, k]``, or what
    ``activation`` puts in place of SwiGLU. Inside ``jax.shard_map`` all arrays are this rank's, and the experts of the
    ranks of ``axis_name``, in their order, are one set of ``E = E_local * EP`` experts; no token is ever dropped.
    Reverse-mode differentiable in ``x, expert_weights, wi_0, wi_1, wo``.

    With ``shard_map(check_vma=False)`` and the gradient taken inside it, gradients of weights that are replicated over
    other mesh axes are this rank's share: sum them over those axes. In all other cases JAX has done that.

    Args:
      x: ``[T, H]`` bfloat16 or float32 (``"reference"`` and ``"xla"``: float64 too). Products are computed in it.
      expert_ids: int32 ``[T, K]``, global expert ids; -1 is no expert. A token with any other id outside ``[0, E)`` is
        bad: it is sent nowhere and its rows of ``y`` and of the gradients of ``x`` and ``expert_weights`` are NaN. An
        id that occurs twice in a token counts twice.
      expert_weights: float32 ``[T, K]``.
      wi_0: ``[E_local, H, I]``, gate projection; bfloat16 or float32, whatever ``x`` is, or float64 with a float64
        ``x``; all three alike. Rounded to ``x.dtype`` for the products; the gradient has the weight's own dtype.
      wi_1: ``[E_local, H, I]``, up projection; as ``wi_0``.
      wo: ``[E_local, I, H]``, down projection; as ``wi_0``.
      axis_name: mesh axis of the expert-parallel group, or a tuple of axes, first major. None: one rank.
      activation: of ``gate = x @ wi_0`` and ``up = x @ wi_1``. ``"swiglu"``: ``silu(gate) * up`` (Shazeer 2020, "GLU
        Variants Improve Transformer"). ``"gpt_oss"``: ``gate * sigmoid(1.702 * gate) * (up + 1)`` (``swiglu`` in the
        ``gpt_oss/torch/model.py`` of OpenAI's gpt-oss, which has a limit of 7).
      activation_limit: L > 0 first clamps the gate from above to L and up to ``[-L, L]``. None: no clamp.
      config: schedule and memory of the megakernel; no effect on results.
      implementation: ``"megakernel"``, ``"xla"``, ``"reference"``. None: ``"megakernel"`` where it can run, else
        ``"xla"`` with one warning that says why. That is decided while tracing, for the devices of a concrete ``x``, of
        the mesh around the call, or else the default one; a ``jit`` of arguments that are committed to others does not
        show that, nor does ``jax.export`` for another platform, and what cannot run there is refused when lowered: name
        ``"xla"``. Of several CPU processes it is ``"megakernel"`` with one rank only; name it where a mesh is of one.
      return_stats: also return ``MoEStats``.

    Returns:
      ``y [T, H]`` in ``x.dtype``, or ``(y, MoEStats)``.

    Raises:
      TypeError, ValueError: an argument is illegal; the text names it, its value and the nearest legal one.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> x = jnp.ones((4, 16)); wi = jnp.ones((2, 16, 8)); wo = jnp.ones((2, 8, 16))
      >>> ids = jnp.zeros((4, 1), jnp.int32)
      >>> moe(x, ids, jnp.ones((4, 1)), wi, wi, wo).shape
      (4, 16)
    """
    checks.check_arguments(
        x, expert_ids, expert_weights, wi_0, wi_1, wo, axis_name, activation, activation_limit, config
    )
    ranks = group_size(axis_name)
    implementation = choose_implementation(implementation, x, wi_0, ranks, activation)
    if implementation == "megakernel":
        support.check(support.Place(), x, wi_0, ranks, activation)
    operands = x, expert_ids, expert_weights, wi_0, wi_1, wo
    y, stats = _run(implementation, axis_name, activation, activation_limit, config, *operands)
    return (y, stats) if return_stats else y


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4), inline=True)
def _run(implementation, axis_name, activation, activation_limit, config, *operands):
    """One program where ``moe`` is called eagerly, compiled once; part of the caller's where it is traced."""
    options = {"axis_name": axis_name, "activation": activation, "activation_limit": activation_limit}
    if implementation == "megakernel":
        return megakernel.moe(*operands, **options, config=config)
    return {"xla": xla.moe, "reference": reference.moe}[implementation](*operands, **options)


def choose_implementation(implementation: Implementation | None, x, wi_0, ranks, activation) -> Implementation:
    """What None means for these arguments, where they will probably run; any other name is checked and returned."""
    if implementation is not None:
        require_choice("implementation", implementation, get_args(Implementation))
        return implementation
    refusal = support.why_not_here(x, wi_0, ranks, activation)
    if refusal is None:
        return "megakernel"
    _warn_once(f"mok_jax: using implementation='xla': {refusal}")
    return "xla"


@functools.cache
def _warn_once(text: str) -> None:
    # The line of whoever calls ``moe``, or a layer by way of JAX and Flax.
    packages = (sys.modules[name] for name in ("mok_jax", "jax", "flax") if name in sys.modules)
    warnings.warn(text, skip_file_prefixes=tuple(os.path.dirname(str(package.__file__)) for package in packages))
