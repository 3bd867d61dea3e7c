"""Our counterparts of the pictures in the paper on SMoE, one PNG each (`docs/papers/smoe.md`).

    python -m bench.figures OUT --trace FILE --ablation FILE.json [--only 4,6,table-1]

FILE is a routing trace of `smoe record`, FILE.json an ablation of `bench.ablations` of the same model. A picture for
which these have too little is left out, and a line on stderr says why.
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from bench.figure_data import (
    Cell,
    missing_of,
    prefetches_per_token,
    simulated_seconds,
    step_of,
    steps_by_alpha,
    steps_of,
    time_shares,
)
from bench.mechanisms.plot import MECHANISMS
from smoe.bounds import EMULATED
from smoe.config import DEFAULT_ALPHA
from smoe.errors import ConfigError
from smoe.trace.file import Trace
from smoe.trace.ranks import AHEAD, reuse_by_rank, shares_by_rank, stretches, width

BLUE, RED, ORANGE, GREEN, GREY, SAND = "#2f6d8c", "#b3423a", "#d99a3d", "#6a8f4e", "#8c9aa5", "#c9c4b8"
STEPS = ("LRU on demand", "CE", "CE + CR", "CE + CR + Pre", "all four (+ BA)")
"""What the mechanisms add, one after the other."""
PREFETCHING = ("CE + CR + Pre", "all four (+ BA)", "always Pre", "Pre of all (v1)")
BALANCING = ("CE", "CE + BA", "CE + CR + Pre", "BA as printed", "all four (+ BA)")
"""Steps without and with the balancer."""
MEANINGS = {**MECHANISMS, "LRU": "the least recently used is evicted", "v1": "as in the paper's first version"}
PAPER_TIME = (0.42, 0.29, 0.29, 0.0)
"""Table I: low-score loading, top-score loading, computing."""
PAPER_TOP_SCORE, PAPER_ACTIVE = 0.82, 0.95
"""Figure 17, as the text around it says."""


def main() -> None:
    """Draw what is asked for."""
    given = parse()
    unknown = sorted(set(given.only) - set(FIGURES))
    if unknown:
        sys.exit(f"no such picture: {', '.join(unknown)}; there are {', '.join(FIGURES)}")
    cell = json.loads(given.ablation.read_text("utf8"))
    lacking = sorted({"alpha", "seconds_per_token_by_round", "hit_ratio"}.difference(*cell["steps"]))
    if lacking:
        sys.exit(f"{given.ablation} is of an older format: its steps have no {', '.join(lacking)}; measure it again")
    draw_all(Trace(given.trace), cell, given.out, given.only)


def parse() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description="Our counterparts of the pictures in the paper on SMoE.")
    parser.add_argument("out", type=Path, help="folder for the PNG files")
    parser.add_argument("--trace", type=Path, required=True, help="routing trace, as smoe record writes it")
    parser.add_argument("--ablation", type=Path, required=True, help="JSON file of bench.ablations")
    parser.add_argument(
        "--only", type=lambda names: names.split(","), default=list(FIGURES), help=f"of {','.join(FIGURES)}"
    )
    return parser.parse_args()


def draw_all(trace: Trace, cell: Cell, out: Path, names: Sequence[str]) -> list[Path]:
    """The files written; a picture without enough data is left out."""
    out.mkdir(parents=True, exist_ok=True)
    written = []
    for name in names:
        path = out / (f"smoe-figure-{name}.png" if name.isdigit() else f"smoe-{name}.png")
        try:
            figure = FIGURES[name](trace, cell)
        except ConfigError as error:
            print(f"{path.name} left out: {error}", file=sys.stderr)
            continue
        figure.savefig(path, dpi=120)
        written.append(path)
    return written


def figure_4(trace: Trace, cell: Cell) -> Figure:
    """How the scores of a token spread over the ranks."""
    shares, (experts, top_k) = 100 * shares_by_rank(stretches(trace)), width(trace)
    ranks = np.arange(1, experts + 1)
    low, high = np.percentile(shares, [10, 90], axis=0)
    figure = Figure(figsize=(7.5, 4.2), layout="constrained")
    axes = figure.subplots()
    axes.fill_between(ranks, low, high, color=BLUE, alpha=0.2, linewidth=0, label="10 to 90 % of tokens and layers")
    axes.plot(ranks, shares.mean(axis=0), color=BLUE, marker="o", markersize=3, label="mean")
    axes.axhline(100 / experts, color="grey", linestyle=":", linewidth=1, label="all experts alike")
    _mark_chosen(axes, top_k, experts)
    axes.set(xlabel="rank of the expert by score", ylabel="share of the router's scores, %", ylim=(0, None))
    return _finished(figure, f"Scores by rank: {trace.header.model}", _of_trace(trace), 2)


def figure_6(trace: Trace, cell: Cell) -> Figure:
    """How soon an expert is chosen again, by its rank."""
    reuse, (experts, top_k) = 100 * reuse_by_rank(stretches(trace)), width(trace)
    figure = Figure(figsize=(7.5, 4.2), layout="constrained")
    axes = figure.subplots()
    axes.plot(range(1, experts + 1), reuse, color=BLUE, marker="o", markersize=3, label="recorded")
    by_chance = 100 * (1 - (1 - top_k / experts) ** AHEAD)
    axes.axhline(by_chance, color="grey", linestyle=":", linewidth=1, label="if experts were chosen at random")
    _mark_chosen(axes, top_k, experts)
    axes.set(xlabel="rank of the expert by score", ylabel=f"chosen within the next {AHEAD} tokens, %", ylim=(0, None))
    return _finished(figure, f"Reuse within {AHEAD} tokens by rank: {trace.header.model}", _of_trace(trace), 3)


def figure_10(trace: Trace, cell: Cell) -> Figure:
    """Time per token against alpha."""
    steps = steps_by_alpha(cell)
    alphas, times = [step["alpha"] for step in steps], [1e3 * step["seconds_per_token"] for step in steps]
    grid = np.linspace(0.0, max(alphas), 7)
    simulated = [1e3 * seconds for seconds in simulated_seconds(trace, cell, grid.tolist())]
    figure = Figure(figsize=(7.5, 4.4), layout="constrained")
    axes = figure.subplots()
    ranges = [abs(time - np.array(_rounds(step))) for time, step in zip(times, steps, strict=True)]
    look: dict[str, Any] = {
        "fmt": "o",
        "markersize": 4,
        "color": BLUE,
        "ecolor": "black",
        "elinewidth": 1.2,
        "capsize": 4,
    }
    axes.errorbar(alphas, times, np.transpose(ranges), **look, label="measured: median, fastest to slowest round")
    line = np.polyval(np.polyfit(alphas, times, 1), grid)
    axes.plot(grid, line, color=BLUE, linewidth=1, label="straight line, least squares")
    axes.plot(
        grid, simulated, color=ORANGE, linestyle="--", marker="s", markersize=3, label="simulated: the trace replayed"
    )
    axes.set(xlabel="alpha", ylabel="ms a token", ylim=(0, 1.15 * max(*times, *simulated)))
    more = (
        "Measured: the preset smoe at each alpha. Simulated: score eviction, best split, no prefetch, the weights "
        "beside the experts left out"
    )
    return _finished(figure, f"Time against alpha: {_device(cell)}", _caption(cell, [], more), 2)


def table_1(trace: Trace, cell: Cell) -> Figure:
    """Where the time of a token goes when every missing expert is loaded on demand."""
    alphas = sorted({DEFAULT_ALPHA, step_of(cell, "CE + CR")["alpha"]})
    names = ["the paper: Qwen on an A6000", *(f"ours, told apart at alpha {alpha:g}" for alpha in alphas)]
    rows = [PAPER_TIME, *(time_shares(trace, cell, alpha) for alpha in alphas)]
    figure = Figure(figsize=(8.5, 1.9 + 0.45 * len(rows)), layout="constrained")
    axes = figure.subplots()
    parts = (
        ("low-score loading", RED),
        ("top-score loading", ORANGE),
        ("computing", BLUE),
        ("deciding (Python)", SAND),
    )
    _stack(axes, names, [[100 * part for part in row] for row in rows], parts)
    axes.set(xlabel="share of a token's time, %", xlim=(0, 100))
    more = "Loading: what a token waits for, shared out by the missing experts of the replayed trace"
    return _finished(
        figure, f"Time of a token, LRU on demand: {_device(cell)}", _caption(cell, ["LRU on demand"], more), 4
    )


def figure_15(trace: Trace, cell: Cell) -> Figure:
    """Which experts are missing, step by step."""
    alpha = step_of(cell, "CE + CR")["alpha"]
    rows = [[100 * share for share in missing_of(trace, cell, name, alpha)] for name in STEPS]
    figure = Figure(figsize=(8.5, 4.0), layout="constrained")
    axes = figure.subplots()
    parts = (("top-score, missing", RED), ("low-score, missing", ORANGE), ("low-score, missing and substituted", SAND))
    _stack(axes, STEPS, rows, parts)
    axes.set(xlabel="share of a token's experts, %", xlim=(0, 1.08 * max(map(sum, rows))))
    more = "Without CR, the kinds are told apart by the replayed trace at the same alpha"
    return _finished(figure, f"Missing experts by kind: {_device(cell)}", _caption(cell, STEPS, more), 3)


def figure_16(trace: Trace, cell: Cell) -> Figure:
    """Busy link and time per token, step by step."""
    steps = steps_of(cell, STEPS)
    figure = Figure(figsize=(8.5, 4.2), layout="constrained")
    axes = figure.subplots()
    pairs = (
        ("time per token", [1e3 * step["seconds_per_token"] for step in steps], BLUE),
        ("link busy", [1e3 * step["link_seconds_per_token"] for step in steps], RED),
    )
    _pairs(axes, [step["name"] for step in steps], pairs, " {:.1f}", [max(_rounds(step)) for step in steps])
    for n, step in enumerate(steps):
        label = "" if n else "fastest to slowest round"
        axes.plot(_rounds(step), [n - 0.2] * 2, color="black", linewidth=1.2, label=label)
    axes.set(xlabel="ms a token", xlim=(0, 1.12 * max(max(_rounds(step)) for step in steps)))
    more = "Link busy: a load was running, waited for or not"
    return _finished(figure, f"Link and time per token: {_device(cell)}", _caption(cell, STEPS, more), 3)


def figure_17(trace: Trace, cell: Cell) -> Figure:
    """What the prefetched experts turned out to be."""
    steps = [step for step in steps_of(cell, PREFETCHING, 1) if step["prefetch_top_score_share"] is not None]
    if not steps:
        raise ConfigError("no step of the ablation prefetched anything")
    names = []
    for step in steps:
        count = prefetches_per_token(trace, cell, step)
        names.append(step["name"] if count is None else f"{step['name']}\n{count:.2g} prefetched a token")
    figure = Figure(figsize=(8.5, 2.2 + 0.55 * len(steps)), layout="constrained")
    axes = figure.subplots()
    pairs = (
        ("top-score", [_percent(step["prefetch_top_score_share"]) for step in steps], BLUE),
        ("active, of the others", [_percent(step["prefetch_active_among_others"]) for step in steps], GREEN),
    )
    _pairs(axes, names, pairs, " {:.0f} %", None, " no others")
    for share, colour, label in (
        (PAPER_TOP_SCORE, BLUE, "the paper: top-score"),
        (PAPER_ACTIVE, GREEN, "the paper: active, of the others"),
    ):
        axes.axvline(100 * share, color=colour, linestyle="--", linewidth=1.2, label=label)
    axes.set(xlabel="share of prefetched experts, %", xlim=(0, 112), xticks=range(0, 101, 20))
    caption = _caption(cell, [step["name"] for step in steps], "The last two: all four, with Pre changed")
    return _finished(figure, f"What was prefetched: {_device(cell)}", caption, 4)


def figure_18(trace: Trace, cell: Cell) -> Figure:
    """CPU beside link, without and with the balancer."""
    steps = steps_of(cell, BALANCING)
    figure = Figure(figsize=(8.5, 4.2), layout="constrained")
    axes = figure.subplots()
    times = [[1e3 * step[key] for step in steps] for key in ("host_seconds_per_token", "link_seconds_per_token")]
    names = [step["name"] for step in steps]
    _pairs(axes, names, (("CPU, computing experts", times[0], ORANGE), ("link, loading", times[1], RED)), " {:.1f}")
    axes.set(xlabel="busy, ms a token", xlim=(0, 1.12 * max(map(max, times))))
    more = "BA as printed: all four, with the paper's split in place of the best"
    return _finished(figure, f"CPU and link: {_device(cell)}", _caption(cell, names, more), 2)


FIGURES: dict[str, Callable[[Trace, Cell], Figure]] = {
    "4": figure_4,
    "6": figure_6,
    "10": figure_10,
    "table-1": table_1,
    "15": figure_15,
    "16": figure_16,
    "17": figure_17,
    "18": figure_18,
}


def _mark_chosen(axes: Any, top_k: int, experts: int) -> None:
    axes.axvline(top_k + 0.5, color=RED, linestyle="--", linewidth=1, label=f"rank k = {top_k} is the last chosen")
    axes.set_xticks([1, *range(top_k, experts + 1, max(1, experts // 8))])


def _stack(axes: Any, names: Sequence[str], rows: Sequence[Sequence[float]], parts: Sequence[tuple[str, str]]) -> None:
    """One bar of several parts for each name, from above; parts of some width carry their number."""
    left, whole = [0.0] * len(rows), max(map(sum, rows))
    for number, (label, colour) in enumerate(parts):
        widths = [row[number] for row in rows]
        axes.barh(names, widths, left=left, color=colour, label=label, height=0.65)
        for n, (start, length) in enumerate(zip(left, widths, strict=True)):
            if length > 0.03 * whole:
                ink = "black" if colour in (SAND, ORANGE) else "white"
                axes.text(start + length / 2, n, f"{length:.0f}", ha="center", va="center", fontsize=8, color=ink)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.invert_yaxis()


def _pairs(
    axes: Any,
    names: Sequence[str],
    pairs: Sequence[tuple[str, Sequence[float | None], str]],
    form: str,
    ends: Sequence[float] | None = None,
    without: str = "",
) -> None:
    """Two bars for each name, from above; `ends`: where the numbers of the first may stand, if not at the bar's end."""
    for number, (label, values, colour) in enumerate(pairs):
        places = [n + 0.4 * number - 0.2 for n in range(len(names))]
        axes.barh(places, [value or 0.0 for value in values], height=0.36, color=colour, label=label)
        for n, value in enumerate(values):
            end = (value or 0.0) if ends is None or number else max(ends[n], value or 0.0)
            text = without if value is None else form.format(value)
            axes.text(end, places[n], text, va="center", fontsize=8)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()


def _rounds(step: Mapping[str, Any]) -> list[float]:
    """Fastest and slowest round, ms a token."""
    times = [1e3 * seconds for seconds in step["seconds_per_token_by_round"]]
    return [min(times), max(times)]


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def _device(cell: Cell) -> str:
    """Of what an ablation is, in words for a title."""
    device = f"{cell['profile']}, emulated" if cell["device"] == EMULATED else cell["device"]
    return f"{device}, batch {cell['batch']}, {cell['resident_share']:.0%} resident"


def _of_trace(trace: Trace) -> str:
    """Of what a trace is, in words for a caption."""
    layers, (experts, top_k) = trace.header.layers, width(trace)
    tokens = np.count_nonzero(trace.rows["layer"] == layers[0].layer)
    return f"{tokens} tokens, {len(layers)} layers of {experts} experts, {top_k} chosen"


def _caption(cell: Cell, names: Sequence[str], more: str) -> str:
    """What the abbreviations in names mean, and what stands behind a number."""
    words = {word for name in names for word in name.replace("(", " ").replace(")", " ").split()}
    if any("all four" in name for name in names):
        words |= set(MECHANISMS)
    meant = [f"{short}: {long}" for short, long in MEANINGS.items() if short in words]
    alphas = sorted({step["alpha"] for step in cell["steps"] if step["name"] in names and step["alpha"] > 0})
    if alphas:
        more = f"{more}; alpha {', '.join(f'{alpha:g}' for alpha in alphas)} with CR"
    rounds = cell["steps"][0]["seconds_per_token_by_round"]
    count = "One round" if len(rounds) == 1 else f"{len(rounds)} rounds"
    return ". ".join([*filter(None, ["; ".join(meant)]), more, count])


def _finished(figure: Figure, title: str, caption: str, columns: int) -> Figure:
    """Legend and caption below, title above."""
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    legend = figure.legend(
        loc="outside lower center",
        frameon=False,
        fontsize=8,
        ncols=columns,
        title=textwrap.fill(caption, round(15 * figure.get_figwidth())),
        title_fontsize=8,
    )
    legend.get_title().set_multialignment("center")
    figure.suptitle(title, fontsize=11)
    return figure


if __name__ == "__main__":
    main()
