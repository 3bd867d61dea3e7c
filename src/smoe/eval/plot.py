"""Draws quality and time per token against alpha in one picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from smoe.errors import ConfigError
from smoe.eval.price import Price

_LOSS, _SPEED = "#b3423a", "#2f6d8c"


def _lines(*axes: Any) -> tuple[list[Any], list[str]]:
    """Return (lines, their names) of two axes that share one panel, for a common legend."""
    found = [axis.get_legend_handles_labels() for axis in axes]
    return [line for lines, _ in found for line in lines], [name for _, names in found for name in names]


def draw(prices: Sequence[Price], title: str, path: Path) -> None:
    """Write the picture of quality and time against alpha to `path` (.png, .svg or .pdf). Raise `ConfigError` if
    matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("a plot needs matplotlib: pip install matplotlib") from error
    alphas = [price.quality.alpha for price in prices]
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    loss, speed = figure.subplots(1, 2)
    low, middle, high = ([100 * getattr(p.perplexity, name) for p in prices] for name in ("low", "value", "high"))
    has_interval = all(price.has_enough_tokens for price in prices)
    if has_interval:
        loss.fill_between(alphas, low, high, color=_LOSS, alpha=0.2, linewidth=0, label="95 % interval")
    loss.plot(
        alphas,
        middle,
        color=_LOSS,
        marker="o",
        markersize=3,
        label="perplexity" if has_interval else "perplexity (text too short for an interval)",
    )
    loss.axhline(0, color="grey", linewidth=0.8, label="exact model")
    loss.set(xlabel="alpha", ylabel="change of perplexity, %", title="what it costs")
    times = [1e3 * p.quality.median_seconds for p in prices]
    speed.plot(alphas, times, color=_SPEED, marker="o", markersize=3, label="time a token, median (left)")
    speed.set(xlabel="alpha", ylabel="ms a token", title="what it buys", ylim=(0, 1.15 * max(times) or 1))
    hits = speed.twinx()
    hits.plot(alphas, [100 * p.quality.hit_ratio for p in prices], color="grey", linestyle="--", label="hits (right)")
    hits.set(ylabel="experts found in memory, %", ylim=(0, 100))
    loss.legend(frameon=False, loc="upper left")
    speed.legend(*_lines(speed, hits), frameon=False, loc="lower left")
    for axes in (loss, speed, hits):
        axes.spines["top"].set_visible(False)
    figure.suptitle(title)
    figure.savefig(path, dpi=150)
