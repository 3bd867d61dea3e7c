"""Quality and time per token against alpha, as one picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from smoe.errors import ConfigError
from smoe.eval.price import Price

_LOSS, _SPEED = "#b3423a", "#2f6d8c"


def draw(prices: Sequence[Price], title: str, path: Path) -> None:
    """Write the picture to `path` (.png, .svg or .pdf); needs matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib: pip install matplotlib") from error
    alphas = [price.quality.alpha for price in prices]
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    loss, speed = figure.subplots(1, 2)
    low, middle, high = ([100 * getattr(p.perplexity, name) for p in prices] for name in ("low", "value", "high"))
    if all(price.has_enough_tokens for price in prices):
        loss.fill_between(alphas, low, high, color=_LOSS, alpha=0.2, linewidth=0, label="95 % interval")
    loss.plot(alphas, middle, color=_LOSS, marker="o", markersize=3, label="perplexity")
    loss.axhline(0, color="grey", linewidth=0.8)
    loss.set(xlabel="alpha", ylabel="change of perplexity, %", title="what it costs")
    loss.legend(frameon=False, loc="upper left")
    times = [1e3 * p.quality.median_seconds for p in prices]
    speed.plot(alphas, times, color=_SPEED, marker="o", markersize=3)
    speed.set(xlabel="alpha", ylabel="ms a token (median)", title="what it buys", ylim=(0, 1.15 * max(times) or 1))
    hits = speed.twinx()
    hits.plot(alphas, [100 * p.quality.hit_ratio for p in prices], color="grey", linestyle="--")
    hits.set(ylabel="experts in memory, % (dashed)", ylim=(0, 100))
    for axes in (loss, speed, hits):
        axes.spines["top"].set_visible(False)
    figure.suptitle(title)
    figure.savefig(path, dpi=150)
