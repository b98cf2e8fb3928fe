"""torch's ``_grouped_mm`` with permutation and combine around it, eager and compiled.

The layer is what a careful user writes: gate and up side by side in one product, gathers both ways whose derivatives
are gathers too (autograd's own would be scatter-adds), no wait for the device. torch is imported here alone, when
something is built. Arrays are shared with JAX without a copy.
"""

import functools
import importlib.util
from collections.abc import Sequence

import jax

from benchmarks.implementations import grouped
from benchmarks.implementations.base import BACKWARD_RESULTS, Bind, Implementation, Program
from benchmarks.problem import Problem, Tokens


def _build(compile_it: bool, problem: Problem, pass_name: str) -> Bind:
    import torch
    import torch._dynamo.config
    import torch._functorch.config

    torch.cuda.set_device(problem.mesh.devices.flat[0].local_hardware_id)
    torch.cuda.empty_cache()
    layer = make_layer()
    if compile_it:
        # What a forward has saved is used by every launch of a backward.
        torch._functorch.config.donated_buffer = False
        # Every shape compiles the same function again; beyond the default limit it would silently run eagerly.
        torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 256
        layer = torch.compile(layer, dynamic=False)
    arrays = grouped.side_by_side(problem.weights)
    parameters = [torch.from_dlpack(jax.block_until_ready(a)).requires_grad_(pass_name != "forward") for a in arrays]

    def bind(token_sets: Sequence[Tokens]) -> Program:
        sets = [[torch.from_dlpack(jax.block_until_ready(array)) for array in tokens] for tokens in token_sets]
        for x, _, expert_weights, _ in sets:
            x.requires_grad_(pass_name != "forward")
            expert_weights.requires_grad_(pass_name != "forward")
        run = _RUNNERS[pass_name](torch, layer, parameters, sets)

        def launch(i: int):
            results = run(i % len(sets))
            done = torch.cuda.Event()
            done.record()
            return done, results

        def results(i: int):
            done, results = launch(i)
            done.synchronize()
            return _name(pass_name, results)

        def wait(handle):
            handle[0].synchronize()

        wait(launch(0))  # What compiles, does so now.
        return Program(launch, wait, _peak_bytes(torch, launch, sets, parameters), results, queue="torch")

    return bind


def make_layer():
    """``(x, expert_ids, expert_weights, wi [E, H, 2I], wo [E, I, H]) -> y``, differentiable."""
    import torch

    class Rows(torch.autograd.Function):
        """Rows of tokens in expert order; the derivative gathers each token's K rows and sums them."""

        @staticmethod
        def forward(ctx, x, slot, row, top_k):
            ctx.save_for_backward(row)
            ctx.top_k = top_k
            return x.index_select(0, slot // top_k)

        @staticmethod
        def backward(ctx, d_rows):
            (row,) = ctx.saved_tensors
            d_slots = d_rows.index_select(0, row)
            return d_slots.view(-1, ctx.top_k, d_rows.shape[1]).sum(1), None, None, None

    class Slots(torch.autograd.Function):
        """Expert order back to slot order: a permutation, whose derivative is its inverse."""

        @staticmethod
        def forward(ctx, rows, slot, row):
            ctx.save_for_backward(slot)
            return rows.index_select(0, row)

        @staticmethod
        def backward(ctx, d_slots):
            (slot,) = ctx.saved_tensors
            return d_slots.index_select(0, slot), None, None

    def layer(x, expert_ids, expert_weights, wi, wo):
        tokens, top_k = expert_ids.shape
        sorted_ids, slot = torch.sort(expert_ids.view(-1), stable=True)
        row = torch.empty_like(slot)
        row[slot] = torch.arange(slot.numel(), device=slot.device)
        experts = torch.arange(wi.shape[0], device=slot.device, dtype=sorted_ids.dtype)
        ends = torch.searchsorted(sorted_ids, experts, right=True).to(torch.int32)
        gate, up = torch._grouped_mm(Rows.apply(x, slot, row, top_k), wi, offs=ends).chunk(2, dim=1)
        outputs = torch._grouped_mm(torch.nn.functional.silu(gate) * up, wo, offs=ends)
        outputs = Slots.apply(outputs, slot, row).view(tokens, top_k, -1)
        # As a batched product the weighted sum reads every row once and accumulates in float32.
        return torch.bmm(expert_weights.to(x.dtype).unsqueeze(1), outputs).squeeze(1)

    return layer


def _forward(torch, layer, parameters, sets):
    def run(i):
        x, expert_ids, expert_weights, _ = sets[i]
        with torch.set_grad_enabled(parameters[0].requires_grad):
            return (layer(x, expert_ids, expert_weights, *parameters),)

    return run


def _forward_backward(torch, layer, parameters, sets):
    def run(i):
        x, expert_ids, expert_weights, dy = sets[i]
        y = layer(x, expert_ids, expert_weights, *parameters)
        return y.detach(), *torch.autograd.grad(y, (x, expert_weights, *parameters), dy)

    return run


def _backward(torch, layer, parameters, sets):
    outputs = [layer(x, ids, expert_weights, *parameters) for x, ids, expert_weights, _ in sets]

    def run(i):
        x, _, expert_weights, dy = sets[i]
        return torch.autograd.grad(outputs[i], (x, expert_weights, *parameters), dy, retain_graph=True)

    return run


_RUNNERS = {
    "forward": _forward,
    "forward+saves": _forward,
    "backward": _backward,
    "forward+backward": _forward_backward,
}


def _name(pass_name, results):
    if "backward" not in pass_name:
        return {"y": results[0]}
    *first, dx, d_expert_weights, d_wi, d_wo = results
    gradients = (dx, d_expert_weights, *d_wi.chunk(2, dim=2), d_wo)
    return dict(zip(("y",), first, strict=False)) | dict(zip(BACKWARD_RESULTS, gradients, strict=True))


def _peak_bytes(torch, launch, sets, parameters):
    """Arguments of one launch, which are JAX's, and torch's own peak during it."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    launch(0)[0].synchronize()
    arguments = sum(tensor.numel() * tensor.element_size() for tensor in (*sets[0], *parameters))
    return arguments + torch.cuda.max_memory_allocated()


def _why_not(problem: Problem) -> str | None:
    if importlib.util.find_spec("torch") is None:
        return "not installed"
    if problem.platform != "gpu":
        return "its grouped product is for GPUs"
    if problem.ranks > 1:
        return "it is a layer of one device"
    if problem.dtype != jax.numpy.bfloat16:
        return "its grouped product takes bfloat16 only"
    return None


TORCH = Implementation("torch", _why_not, functools.partial(_build, False))
TORCH_COMPILED = Implementation("torch-compiled", _why_not, functools.partial(_build, True))
