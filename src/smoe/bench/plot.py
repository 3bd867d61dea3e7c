"""An ablation as one picture: where the time of a token goes, step by step, and which experts were missing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from smoe.bench.ablation import Line
from smoe.errors import ConfigError

_PARTS = (
    ("other_layers_seconds_per_token", "other layers", "#8c9aa5"),
    ("expert_seconds_per_token", "experts", "#2f6d8c"),
    ("wait_seconds_per_token", "waiting for loads", "#b3423a"),
    ("host_wait_seconds_per_token", "waiting for the CPU", "#d99a3d"),
    ("look_ahead_seconds_per_token", "looking ahead", "#6a8f4e"),
    ("python_seconds_per_token", "Python", "#c9c4b8"),
)


def draw(lines: Sequence[Line], title: str, path: Path) -> None:
    """Write the picture to `path` (.png, .svg or .pdf); needs matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib: pip install matplotlib") from error
    values = [line.as_json() for line in lines]
    names = [line.step.name for line in lines]
    figure = Figure(figsize=(10, 1.2 + 0.34 * len(lines)), layout="constrained")
    time, missing = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    left = [0.0] * len(lines)
    for key, label, colour in _PARTS:
        widths = [1e3 * value[key] for value in values]
        time.barh(names, widths, left=left, color=colour, label=label)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for n, line in enumerate(lines):
        time.text(left[n], n, f" {1e3 * line.seconds:.1f}", va="center", fontsize=8)
    time.set(xlabel="ms a token", xlim=(0, 1.12 * max(left)))
    time.invert_yaxis()
    time.legend(frameon=False, fontsize=8, loc="lower right")
    missing.barh(names, [100 * (1 - (value["hit_ratio"] or 0.0)) for value in values], color="#d9d4c8", label="missing")
    loaded = [100 * (1 - (v["hit_ratio"] or 0.0) - (v["host_computed_share"] or 0.0)) for v in values]
    missing.barh(names, loaded, color="#b3423a", height=0.4, label="of these, loaded")
    missing.set(xlabel="experts of a token, %")
    missing.legend(frameon=False, fontsize=8, loc="lower right")
    for axes in (time, missing):
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title)
    figure.savefig(path, dpi=150)
