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


MECHANISMS = {
    "CE": "eviction by score",
    "CR": "substitution by score",
    "Pre": "prefetch",
    "BA": "balance of link and CPU",
}
"""The papers' abbreviations, which the names of steps are made of."""


def draw(steps: Sequence[Mapping[str, Any]], title: str, path: Path) -> None:
    """Write the picture of an ablation's steps, as its JSON has them, to `path` (.png, .svg or .pdf).

    Raises `ConfigError` without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("a plot needs matplotlib: pip install matplotlib") from error
    names = [step["name"] for step in steps]
    figure = Figure(figsize=(10, 1.2 + 0.34 * len(steps)), layout="constrained")
    time, missing = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    left = [0.0] * len(steps)
    for key, label, colour in _PARTS:
        widths = [1e3 * step[key] for step in steps]
        time.barh(names, widths, left=left, color=colour, label=label)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for n, step in enumerate(steps):
        rounds = [1e3 * seconds for seconds in step["seconds_per_token_by_round"]]
        if len(rounds) > 1:
            time.plot(
                [min(rounds), max(rounds)],
                [n, n],
                color="black",
                linewidth=1.2,
                label=_once("fastest to slowest round", n),
            )
        time.text(max([left[n], *rounds]), n, f" {1e3 * step['seconds_per_token']:.1f}", va="center", fontsize=8)
    time.set(xlabel="ms a token", xlim=(0, 1.15 * max(left)))
    time.invert_yaxis()
    missing.barh(names, [100 * (1 - (step["hit_ratio"] or 0.0)) for step in steps], color="#d9d4c8", label="missing")
    loaded = [100 * (1 - (s["hit_ratio"] or 0.0) - (s["host_computed_share"] or 0.0)) for s in steps]
    missing.barh(names, loaded, color="#b3423a", height=0.4, label="of these, loaded")
    missing.set(xlabel="experts of a token, %")
    for axes in (time, missing):
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(
        loc="outside lower center", frameon=False, fontsize=8, ncols=5, title=_caption(steps), title_fontsize=8
    )
    figure.suptitle(title)
    figure.savefig(path, dpi=150)


def _once(label: str, number: int) -> str:
    """A name in the legend for the first of several lines of a kind."""
    return label if number == 0 else ""


def _caption(steps: Sequence[Mapping[str, Any]]) -> str:
    """What the abbreviations mean, and how many rounds stand behind a bar."""
    words = {word for step in steps for word in step["name"].replace("(", " ").replace(")", " ").split()}
    meant = [f"{short}: {long}" for short, long in MECHANISMS.items() if short in words]
    rounds = min(len(step["seconds_per_token_by_round"]) for step in steps)
    return "; ".join([*meant, "one round: no spread is known" if rounds == 1 else f"medians of {rounds} rounds"])
