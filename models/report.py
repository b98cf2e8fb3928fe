"""Pictures of a training run, drawn from its metrics file alone, so that a run that was cut short has them as well."""

import math
import os
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # No display is needed, or looked for.
import matplotlib.pyplot as plt
import numpy as np

from models.metrics import LOAD_PICTURE, LOSS_PICTURE, read_metrics


def draw_report(metrics: Path, folder: Path) -> list[Path]:
    """Draws the pictures of a run into ``folder`` and returns their paths; none for a run without an interval."""
    intervals, results = read_metrics(metrics)
    if not intervals:
        return []
    pictures = {LOSS_PICTURE: draw_loss(intervals, results), LOAD_PICTURE: draw_expert_load(intervals)}
    for name, figure in pictures.items():
        # Renamed when it is whole: Ctrl-C may end the process at any time.
        unfinished = folder / f"unfinished-{name}"
        figure.savefig(unfinished, dpi=120)
        os.replace(unfinished, folder / name)
        plt.close(figure)
    return [folder / name for name in pictures]


def draw_loss(intervals: list[dict], results: dict) -> plt.Figure:
    """Training loss over steps, with the held-out losses as lines, in nats per byte."""
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    losses = np.array([i["loss"] for i in intervals], dtype=float)  # None, of a run that diverged, is NaN.
    axes.plot([i["step"] for i in intervals], losses, color="C0", label="training")
    lines = (("held_out_loss", "held out", "C1"), ("held_out_loss_without_experts", "held out, experts zeroed", "C3"))
    for key, label, colour in lines:
        if results.get(key) is not None:
            axes.axhline(results[key], color=colour, linestyle="--", label=f"{label}: {results[key]:.3f}")
    axes.set(xlabel="step", ylabel="loss (nats per byte)")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    return figure


def draw_expert_load(intervals: list[dict]) -> plt.Figure:
    """One heat map a layer: each expert's share of the tokens over the steps, as a multiple of an even share."""
    load = np.array([i["expert_load"] for i in intervals], dtype=float)  # [intervals, layers, E]
    share = load / np.maximum(load.mean(axis=-1, keepdims=True), 1)
    layers = share.shape[1]
    figure, rows = plt.subplots(
        layers, 1, figsize=(7, 1 + 1.8 * layers), sharex=True, squeeze=False, layout="constrained"
    )
    steps = [i["step"] for i in intervals]
    edges = [0, *steps]
    # Even is the middle of the scale; twice the share is as far from it as none at all.
    limit = max(2.0, math.ceil(share.max()))
    norm = matplotlib.colors.TwoSlopeNorm(vcenter=1.0, vmin=0.0, vmax=limit)
    for layer, axes in enumerate(rows[:, 0]):
        image = axes.pcolormesh(edges, np.arange(share.shape[2] + 1) - 0.5, share[:, layer].T, norm=norm, cmap="RdBu_r")
        axes.set(ylabel=f"layer {layer}\nexpert")
    rows[-1, 0].set(xlabel="step")
    figure.colorbar(image, ax=rows[:, 0].tolist(), label="tokens / even share")
    return figure
