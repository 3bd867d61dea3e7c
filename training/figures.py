"""The two pictures of a run: its loss curve and the usage of the experts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import numpy.typing as npt

matplotlib.use("Agg")
import matplotlib.pyplot as plt

Floats = npt.NDArray[np.float64]

GREY, BLUE, ORANGE = "0.55", "tab:blue", "tab:orange"


def smooth(values: Floats, width: int) -> Floats:
    """Running mean over up to `width` past values, ignoring missing ones: [n] -> [n]."""
    known = ~np.isnan(values)
    total = np.cumsum(np.where(known, values, 0.0))
    count = np.cumsum(known)
    total[width:] -= total[:-width].copy()
    count[width:] -= count[:-width].copy()
    mean: Floats = total / np.maximum(count, 1)
    return mean


def draw_loss(log: Path, path: Path) -> None:
    """Loss on text and on the answers of generated questions, and the learning rate, against tokens."""
    records = [json.loads(line) for line in log.read_text().splitlines()]
    tokens = np.array([record["tokens"] for record in records]) / 1e6
    figure, axis = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for key, colour, label in (("loss", BLUE, "text"), ("answer_loss", ORANGE, "answers of generated questions")):
        values = np.array([record[key] for record in records], dtype=float)
        axis.plot(tokens, values, color=colour, alpha=0.2, linewidth=0.6)
        axis.plot(tokens, smooth(values, 40), color=colour, label=label)
    axis.set(xlabel="training tokens, millions", ylabel="cross-entropy, nats a token", xlim=(0, None), ylim=(0, 6))
    rate = axis.twinx()
    rate.plot(tokens, [record["scale"] for record in records], color=GREY, linestyle=":", label="learning rate")
    rate.set(ylabel="learning rate, share of the peak", ylim=(0, 1.05))
    handles = [line for part in (axis, rate) for line in part.get_legend_handles_labels()[0]]
    axis.legend(
        handles,
        [str(handle.get_label()) for handle in handles],
        frameon=False,
        loc="upper right",
        bbox_to_anchor=(1, 0.9),
    )
    axis.grid(alpha=0.3)
    save(figure, path)


def draw_usage(chosen: Any, path: Path) -> None:
    """Heat map of the expert usage, [L, E] counts, in multiples of the even share; experts sorted within a layer."""
    counts = np.sort(np.asarray(chosen, dtype=float), axis=1)[:, ::-1]
    share = counts / counts.sum(axis=1, keepdims=True) * counts.shape[1]
    figure, axis = plt.subplots(figsize=(9, 3.6), layout="constrained")
    image = axis.imshow(share, aspect="auto", cmap="viridis", vmin=0)
    axis.set(xlabel="experts of the layer, most used first", ylabel="layer", yticks=range(counts.shape[0]))
    figure.colorbar(image, ax=axis, label="usage, multiples of the even share")
    save(figure, path)


def save(figure: Any, path: Path) -> None:
    """Write a picture and forget it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
