"""Draws the recall of draft models: for each token number (OD-MoE, figure 3), and for each combination of alignment
periods (figure 6)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from smoe.eval.draft_recall import DraftRecall, RecallComparison

_COLOURS = ("#2f6d8c", "#b3423a", "#d99a3d", "#6a8f4e", "#7d5a94", "#8c9aa5")
_SMOOTH_TOKENS = 8
"""The number of tokens over which curves are averaged, because with few prompts single tokens vary strongly."""
_MOST_LINES = 5
_PANEL_INCHES = 4.2
_LEAST_INCHES = 8.0
"""The smallest width of a picture in inches, which titles and legends need even for one panel."""


def draw_by_token(found: RecallComparison, title: str, path: Path) -> None:
    """Draw the recall against the token number, with one panel for each precision of the draft model. Each panel has
    lines for the shortest and the longest alignment periods."""
    by_precision = _by_precision(found)
    figure = Figure(figsize=(max(_LEAST_INCHES, 0.8 + _PANEL_INCHES * len(by_precision)), 3.8), layout="constrained")
    panels = figure.subplots(1, len(by_precision), sharey=True, squeeze=False)[0]
    for axes, (precision, drafts) in zip(panels, by_precision.items(), strict=True):
        for draft, colour in zip(_extremes(drafts), _COLOURS, strict=False):
            curve = _smooth(100 * draft.recall.by_token)
            axes.plot(range(1, len(curve) + 1), curve, color=colour, linewidth=1.4, label=str(draft.alignment))
        best = found.best_gate
        if best is not None:
            label = f"{best[0]}, all tokens"
            axes.axhline(100 * best[1].overall, color="grey", linestyle="--", linewidth=1, label=label)
        axes.set(title=precision, xlabel="token after the prompt")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set(ylabel=f"recall, % (means of {_SMOOTH_TOKENS} tokens)")
    lines, names = panels[0].get_legend_handles_labels()
    figure.legend(lines, names, loc="outside lower center", frameon=False, fontsize=8, ncols=len(names))
    figure.suptitle(title)
    figure.savefig(path, dpi=120)


def draw_by_periods(found: RecallComparison, title: str, path: Path) -> None:
    """Draw the recall for each combination of token period and KV period, with one panel and colour scale for each
    precision of the draft model."""
    by_precision = _by_precision(found)
    width = max(_LEAST_INCHES, 0.8 + 0.8 * _PANEL_INCHES * len(by_precision))
    figure = Figure(figsize=(width, 3.6), layout="constrained")
    panels = figure.subplots(1, len(by_precision), squeeze=False)[0]
    for axes, (precision, drafts) in zip(panels, by_precision.items(), strict=True):
        tokens = sorted({draft.alignment.token for draft in drafts}, key=_rarely)
        keys = sorted({draft.alignment.kv for draft in drafts}, key=_rarely)
        shares = np.full((len(tokens), len(keys)), np.nan)
        for draft in drafts:
            shares[tokens.index(draft.alignment.token), keys.index(draft.alignment.kv)] = 100 * draft.recall.overall
        axes.imshow(shares, cmap="YlGnBu", vmin=np.nanmin(shares) - 0.2 * np.nanstd(shares) - 1e-6, aspect="auto")
        middle = (np.nanmin(shares) + np.nanmax(shares)) / 2
        for row, column in zip(*np.nonzero(~np.isnan(shares)), strict=True):
            share = shares[row, column]
            colour = "white" if share > middle else "black"
            axes.text(column, row, f"{share:.2f}", ha="center", va="center", color=colour, fontsize=8)
        axes.set_xticks(range(len(keys)), [_period(kv) for kv in keys])
        axes.set_yticks(range(len(tokens)), [_period(token) for token in tokens])
        axes.set(title=f"{precision}: recall, %", xlabel="KV period")
    panels[0].set(ylabel="token period")
    figure.suptitle(title)
    figure.savefig(path, dpi=120)


def _by_precision(found: RecallComparison) -> dict[str, list[DraftRecall]]:
    groups: dict[str, list[DraftRecall]] = {}
    for draft in found.drafts:
        groups.setdefault(draft.precision, []).append(draft)
    return groups


def _extremes(drafts: list[DraftRecall]) -> list[DraftRecall]:
    """Return the results with the shortest and with the longest alignment periods, which are the lines of figure 3. If
    there are few results, return all."""
    if len(drafts) <= _MOST_LINES:
        return drafts
    tokens = sorted({draft.alignment.token for draft in drafts}, key=_rarely)
    keys = sorted({draft.alignment.kv for draft in drafts}, key=_rarely)
    ends = ({tokens[0], tokens[-1]}, {keys[0], keys[-1]})
    return [draft for draft in drafts if draft.alignment.token in ends[0] and draft.alignment.kv in ends[1]]


def _rarely(period: int) -> float:
    """Return a sort key of an alignment period. 0, which means never, comes last."""
    return period or float("inf")


def _period(period: int) -> str:
    return str(period) if period else "never"


def _smooth(curve: np.ndarray) -> np.ndarray:
    """Return the mean over the last `_SMOOTH_TOKENS` tokens at each token. NaN values are ignored."""
    begins = [max(0, n + 1 - _SMOOTH_TOKENS) for n in range(len(curve))]
    return np.array([_mean(curve[begin : n + 1]) for n, begin in enumerate(begins)])


def _mean(values: np.ndarray) -> float:
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else float("nan")
