"""Turns a differentiable JAX function of tokens and weights into programs: forward, backward, or both in one."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from benchmarks.implementations.base import BACKWARD_RESULTS, Bind, Program
from benchmarks.problem import Tokens

# layer(x, expert_ids, expert_weights, *parameters) -> y
Layer = Callable[..., Any]


def build(layer: Layer, parameters: Sequence[jax.Array], pass_name: str, split: Callable | None = None) -> Bind:
    """Programs of ``layer``, compiled when first bound.

    Args:
      layer: the function; differentiable in ``x``, ``expert_weights`` and ``parameters``.
      parameters: its weights, in whatever layout it likes best.
      pass_name: one of ``flops.PASSES``.
      split: from gradients of ``parameters`` to those of ``wi_0, wi_1, wo``; None if they are the same.
    """

    def gradients(cotangents: Sequence[jax.Array]) -> dict[str, Any]:
        dx, d_expert_weights, *rest = cotangents
        return dict(zip(BACKWARD_RESULTS, (dx, d_expert_weights, *(split(*rest) if split else rest)), strict=True))

    step, name_results = {
        "forward": (_forward(layer), lambda y: {"y": y}),
        "forward+saves": (_forward_saves(layer), lambda out: {"y": out[0]}),
        "backward": (lambda vjp, dy: vjp(dy), gradients),
        "forward+backward": (_forward_backward(layer), lambda out: {"y": out[0], **gradients(out[1])}),
    }[pass_name]
    # One for all bindings: only then do the saved values have the tree that the compiled backward expects.
    linearize = jax.jit(_linearize(layer))
    compiled: list[Any] = []

    def bind(token_sets: Sequence[Tokens]) -> Program:
        if pass_name == "backward":
            arguments = [(linearize(t.x, t.expert_ids, t.expert_weights, *parameters)[1], t.dy) for t in token_sets]
        else:
            extra = [(t.dy,) if pass_name == "forward+backward" else () for t in token_sets]
            arguments = [
                (t.x, t.expert_ids, t.expert_weights, *more, *parameters)
                for t, more in zip(token_sets, extra, strict=True)
            ]
        if not compiled:
            compiled.append(jax.jit(step).lower(*arguments[0]).compile())
        run = compiled[0]

        def launch(i: int) -> Any:
            return run(*arguments[i % len(arguments)])

        return Program(launch, wait, peak_bytes(run), lambda i: name_results(launch(i)))

    return bind


def wait(results: Any) -> None:
    """Returns when a launch's results are there. They all come at once, so one is enough."""
    jax.tree.leaves(results)[0].block_until_ready()


def peak_bytes(compiled: Any) -> int | None:
    """What XLA planned for one device: arguments, results and temporaries; not the megakernel's workspace on a GPU."""
    memory = compiled.memory_analysis()
    if memory is None:
        return None
    return memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes


def _forward(layer):
    def forward(x, expert_ids, expert_weights, *parameters):
        return layer(x, expert_ids, expert_weights, *parameters)

    return forward


def _forward_saves(layer):
    def forward_saves(*arguments):
        y, vjp = _linearize(layer)(*arguments)
        # Of what the backward needs, the arguments are there anyway: as results they would be copied.
        return y, [saved for saved in jax.tree.leaves(vjp) if not any(saved is a for a in arguments)]

    return forward_saves


def _linearize(layer):
    def linearize(x, expert_ids, expert_weights, *parameters):
        return jax.vjp(lambda x, w, *p: layer(x, expert_ids, w, *p), x, expert_weights, *parameters)

    return linearize


def _forward_backward(layer):
    def forward_backward(x, expert_ids, expert_weights, dy, *parameters):
        y, vjp = _linearize(layer)(x, expert_ids, expert_weights, *parameters)
        return y, vjp(dy)

    return forward_backward
