"""An ablation as one picture: where the time of a token goes, step by step, and which experts were missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from smoe.errors import ConfigError

_PARTS = (
    ("other_layers_seconds_per_token", "other layers", "#8c9aa5"),
    ("expert_seconds_per_token", "experts", "#2f6d8c"),
    ("wait_seconds_per_token", "waiting for loads", "#b3423a"),
    ("host_wait_seconds_per_token", "waiting for the CPU", "#d99a3d"),
    ("look_ahead_seconds_per_token", "looking ahead", "#6a8f4e"),
    ("python_seconds_per_token", "Python", "#c9c4b8"),
)


def draw(steps: Sequence[Mapping[str, Any]], title: str, path: Path) -> None:
    """Write the picture of an ablation's steps, as its JSON has them, to `path` (.png, .svg or .pdf).

    Raises `ConfigError` without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib: pip install matplotlib") from error
    names = [step["name"] for step in steps]
    figure = Figure(figsize=(10, 1.2 + 0.34 * len(steps)), layout="constrained")
    time, missing = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    left = [0.0] * len(steps)
    for key, label, colour in _PARTS:
        widths = [1e3 * step[key] for step in steps]
        time.barh(names, widths, left=left, color=colour, label=label)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for n, step in enumerate(steps):
        time.text(left[n], n, f" {1e3 * step['seconds_per_token']:.1f}", va="center", fontsize=8)
    time.set(xlabel="ms a token", xlim=(0, 1.12 * max(left)))
    time.invert_yaxis()
    missing.barh(names, [100 * (1 - (step["hit_ratio"] or 0.0)) for step in steps], color="#d9d4c8", label="missing")
    loaded = [100 * (1 - (s["hit_ratio"] or 0.0) - (s["host_computed_share"] or 0.0)) for s in steps]
    missing.barh(names, loaded, color="#b3423a", height=0.4, label="of these, loaded")
    missing.set(xlabel="experts of a token, %")
    for axes in (time, missing):
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", frameon=False, fontsize=8, ncols=4)
    figure.suptitle(title)
    figure.savefig(path, dpi=150)
