"""Draws the pictures of `smoe trace plot`. Each figure answers one question, and its title is the answer. This module
needs matplotlib."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from io import BytesIO
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from smoe.trace.curves import BOUND, Curves, turns
from smoe.trace.survey import TraceSurvey
from smoe.trace.usage import BySequence
from smoe.units import format_bytes

BLUE, ORANGE, GREEN, RED, PURPLE, SKY, GREY = (
    "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#7f7f7f"
)  # fmt: skip
"""Okabe and Ito's colours, which the colour-blind can distinguish."""
_POLICIES = {
    "auto": (BLUE, "-", "o"),
    "lru": (RED, "--", "s"),
    "lfu": (GREEN, "-.", "^"),
    "score": (ORANGE, "--", "v"),
    "multidimensional": (PURPLE, ":", "D"),
    "learned": (SKY, "-", "P"),
    BOUND: ("black", "-", ""),
}
"""The colour, line style and marker of each policy. No two policies have two of these in common."""
LEADER = "auto"
"""The policy whose knee and plateau are marked: the default policy."""
_MOST_SEQUENCES = 24
"""The largest number of sequences in a picture, each with one row."""


def reuse_by_rank(survey: TraceSurvey) -> Figure | None:
    """Draw how often an expert is chosen again within a given number of tokens, by its rank among a token's scores
    (SMoE, figure 6). Return None if the trace has no scores."""
    ranks, top_k = survey.ranks, survey.header.layers[0].top_k
    if ranks is None:
        return None
    reuse, experts = 100 * ranks.reuse, len(ranks.reuse)
    figure, axes = _figure()
    axes.plot(range(1, experts + 1), reuse, color=BLUE, marker="o", markersize=_dots(experts), label="recorded")
    axes.axhline(100 * ranks.reuse_by_chance, color=GREY, linestyle=":", label="if experts were chosen at random")
    _mark_chosen(axes, top_k, experts)
    axes.set(xlabel="rank of the expert by score", ylabel=f"chosen within the next {ranks.ahead} tokens, %")
    axes.set_ylim(0, 105)
    title = f"The first expert comes again within {ranks.ahead} tokens in {reuse[0]:.0f} % of cases"
    if experts > top_k:
        title += f",\nthe first not chosen (rank {top_k + 1}) in {reuse[top_k]:.0f} %"
    return _finished(figure, title, survey)


def score_concentration(survey: TraceSurvey) -> Figure | None:
    """Draw how a token's scores are distributed over the ranks of experts (SMoE, figure 4). Return None if the trace
    has no scores."""
    ranks, top_k = survey.ranks, survey.header.layers[0].top_k
    if ranks is None:
        return None
    experts = len(ranks.share)
    places = range(1, experts + 1)
    figure, axes = _figure()
    axes.fill_between(places, 100 * ranks.low, 100 * ranks.high, color=BLUE, alpha=0.2, linewidth=0, label="10 to 90 %")
    axes.plot(places, 100 * ranks.share, color=BLUE, marker="o", markersize=_dots(experts), label="mean")
    axes.axhline(100 / experts, color=GREY, linestyle=":", label="all experts alike")
    _mark_chosen(axes, top_k, experts)
    axes.set(xlabel="rank of the expert by score", ylabel="share of the router's scores, %", ylim=(0, None))
    first, chosen = 100 * ranks.share[0], 100 * ranks.share[:top_k].sum()
    of = f", the {top_k} chosen {chosen:.0f} %" if top_k > 1 else ""
    return _finished(figure, f"The first expert has {first:.0f} % of a token's score{of}", survey)


def activation_by_sequence(survey: TraceSurvey) -> Figure | None:
    """Draw which experts consecutive tokens have in common, and which experts sequences prefer (HOBBIT, figure 10).
    Return None if no sequence has two tokens."""
    reuse, sequences = survey.next_token, survey.by_sequence
    if reuse is None:
        return None
    figure: Any = Figure(figsize=(10, 5), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=(1, 1.1)) if sequences else (figure, None)
    axes, layers = left.subplots(), _layers(survey)
    look: dict[str, Any] = {"markersize": _dots(len(layers)), "linewidth": 1.2}
    axes.plot(layers, 100 * reuse.some, color=GREEN, marker="^", **look, label="at least one of its experts")
    axes.plot(layers, 100 * reuse.heaviest, color=BLUE, marker="o", **look, label="its first expert")
    axes.plot(layers, 100 * reuse.share, color=ORANGE, marker="s", **look, label="of its experts, the share")
    axes.plot(layers, 100 * reuse.chance_of_some, color=GREEN, linestyle=":", label="at least one, by chance")
    axes.plot(layers, 100 * reuse.chance, color=GREY, linestyle=":", label="the others by chance")
    axes.set(xlabel="layer", ylabel="used again by the next token, %", ylim=(0, 105))
    _whole_numbers(axes)
    _plain_frame(axes)
    if sequences is not None and right is not None:
        _draw_sequences(right, sequences, layers)
    again, chance = 100 * reuse.share.mean(), 100 * reuse.chance.mean()
    title = f"The next token uses {again:.0f} % of a token's experts again (by chance {chance:.0f} %)"
    return _finished(figure, title, survey, columns=3)


def _draw_sequences(figure: Any, found: BySequence, layers: Sequence[int]) -> None:
    """Draw the uses of experts in the first, the middle and the last layer, with one row for each sequence."""
    drawn = sorted({0, len(layers) // 2, len(layers) - 1})
    squares = np.atleast_1d(figure.subplots(len(drawn), 1, sharex=True))
    values = found.times_even[:_MOST_SEQUENCES, drawn]
    most = float(np.nanpercentile(values, 99.5))
    for axes, place in zip(squares, drawn, strict=True):
        rows = found.times_even[:_MOST_SEQUENCES, place]
        image = axes.imshow(rows, aspect="auto", interpolation="nearest", cmap="viridis", vmin=0, vmax=most)
        axes.set_ylabel(f"layer {layers[place]}\n{'part of the text' if found.has_parts else 'sequence'}", fontsize=9)
        _whole_numbers(axes)
    squares[-1].set_xlabel("expert")
    bar = figure.colorbar(image, ax=list(squares), extend="max")
    bar.set_label("uses, in multiples of an even share")


def affinity(survey: TraceSurvey) -> Figure | None:
    """Draw which experts are popular, and which experts follow each other from layer to layer (DuoServe, figure 2)."""
    found, layers = survey.affinity, _layers(survey)
    figure: Any = Figure(figsize=(10, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2) if found is not None else (figure.subplots(), None)
    _heat(figure, left, survey.times_even, "uses, in multiples of an even share")
    left.set(xlabel="expert", ylabel="layer", title="popularity")
    step = max(1, len(layers) // 12)
    left.set_yticks(range(0, len(layers), step), layers[::step])
    rare = np.nanmax(survey.times_even)
    title = f"The most used expert has {rare:.1f} times its even share"
    if found is not None and right is not None:
        at, follows = found.strongest, found.follows * found.follows.shape[1]
        _heat(figure, right, follows, "how often it follows, in multiples of an even share")
        right.set(xlabel=f"expert of layer {layers[at + 1]}", ylabel=f"expert of layer {layers[at]}")
        right.set_title("affinity of the two layers where it tells most")
        by_affinity, by_popularity = 100 * found.by_affinity.mean(), 100 * found.by_popularity.mean()
        title += (
            f". Affinity names {by_affinity:.0f} % of the next layer's experts,\n"
            f"popularity {by_popularity:.0f} % (learned from the first half, judged on the second)"
        )
    return _finished(figure, title, survey)


def entropy(survey: TraceSurvey) -> Figure | None:
    """Draw for each layer how evenly its experts are used."""
    found, layers = survey.entropy, _layers(survey)
    figure, axes = _figure()
    look: dict[str, Any] = {"markersize": _dots(len(layers))}
    axes.plot(layers, found.most, color=GREY, linestyle=":", label="all experts alike: log2 E")
    axes.plot(layers, found.used, color=BLUE, marker="o", **look, label="uses, over all tokens")
    if found.of_a_token is not None:
        axes.plot(layers, found.of_a_token, color=RED, marker="s", **look, label="the router's scores, for one token")
    axes.set(xlabel="layer", ylabel="entropy, bits", ylim=(0, 1.08 * float(found.most.max())))
    _whole_numbers(axes)
    even, whole = 2 ** found.used.mean(), 2 ** found.most.mean()
    title = f"Over the whole run experts are used about as evenly as {even:.0f} of {whole:.0f} would be"
    if found.of_a_token is not None:
        title += f",\nfor one token scores spread over about {2 ** found.of_a_token.mean():.0f}"
    return _finished(figure, title, survey)


def miss_ratio(survey: TraceSurvey) -> Figure | None:
    """Draw the misses of every policy by cache size. Return None if there are no decode steps."""
    found = survey.curves
    if found is None:
        return None
    figure = Figure(figsize=(9, 5.4), layout="constrained")
    axes = figure.subplots()
    shares = [100 * share for share in found.shares]
    for name in found.misses:
        colour, line, marker = _POLICIES[name]
        label = (
            f"{name} (no policy misses less)" if name == BOUND else f"{name} (the default)" if name == LEADER else name
        )
        look: dict[str, Any] = {"marker": marker, "markersize": 4, "linewidth": 1.9 if name == LEADER else 1.2}
        axes.plot(shares, found.per_step(name), color=colour, linestyle=line, label=label, **look)
    unit = "token" if found.steps_are_tokens else "step"
    first_uses = found.per_step(BOUND)[-1]
    axes.axhline(first_uses, color=GREY, linestyle=":", linewidth=1, label="first uses, which miss at any size")
    axes.set(xlabel="experts in memory, %", ylabel=f"misses a {unit}", xlim=(0, 101), ylim=(0, None))
    axes.set_xticks(range(0, 101, 10))
    axes.grid(color="#e5e5e5", linewidth=0.6)
    _second_scale(axes.secondary_yaxis, "right", 100 * found.steps / found.uses).set_ylabel("miss ratio, %")
    if survey.experts_bytes:
        name, scale = _scale(survey.experts_bytes)
        _second_scale(axes.secondary_xaxis, "top", survey.experts_bytes / 100 / scale).set_xlabel(
            f"memory for experts, {name}"
        )
    title = _mark_turns(axes, found)
    return _finished(figure, title, survey)


def _second_scale(add: Callable[..., Any], side: str, factor: float) -> Any:
    """Add an axis that shows the figure's values in another unit."""

    def there(value: Any) -> Any:
        return value * factor

    def back(value: Any) -> Any:
        return value / factor

    return add(side, functions=(there, back))


def _mark_turns(axes: Any, found: Curves) -> str:
    """Mark the knee and the plateau of the default policy. Return the figure's title."""
    turn, misses, shares = turns(found, LEADER), found.per_step(LEADER), found.shares
    unit = "token" if found.steps_are_tokens else "step"
    marks = [(turn.plateau, "plateau", 0.91)] if 0 < turn.plateau < len(shares) - 1 else []
    if turn.knee is not None:
        marks.append((turn.knee, "knee", 0.97))
    for place, name, height in marks:
        axes.axvline(100 * shares[place], color=GREY, linewidth=1, zorder=0)
        axes.annotate(
            f" {name}: {100 * shares[place]:.0f} % ",
            (100 * shares[place], height),
            xycoords=("data", "axes fraction"),
            va="top",
            ha="right" if shares[place] > 0.8 else "left",
            fontsize=9,
            color="#444444",
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1},
        )
    if turn.plateau == 0:
        return f"With {100 * shares[0]:.2g} % of the experts in memory hardly more is missed than with all"
    if turn.knee is None:
        saved, left = misses[0] - misses[turn.plateau], misses[turn.plateau] - misses[-1]
        span = f"from {100 * shares[0]:.2g} to {100 * shares[turn.plateau]:.0f} %"
        rest = f", all the rest {left:.2g}" if turn.plateau < len(shares) - 1 else ""
        return f"Experts in memory {span}: {saved:.3g} misses a {unit} less, evenly{rest}"
    saved, left = misses[0] - misses[turn.knee], misses[turn.knee] - misses[-1]
    return (
        f"The first {100 * shares[turn.knee]:.0f} % of the experts in memory save {saved:.3g} misses a {unit}, "
        f"all the rest {left:.3g}"
    )


PICTURES: dict[str, Callable[[TraceSurvey], Figure | None]] = {
    "miss-ratio": miss_ratio,
    "reuse-by-rank": reuse_by_rank,
    "score-concentration": score_concentration,
    "activation-by-sequence": activation_by_sequence,
    "affinity": affinity,
    "entropy": entropy,
}
"""The drawing functions, by the name of the file without its ending."""


def drawn(survey: TraceSurvey, form: str) -> dict[str, bytes]:
    """Return {name: file content} of every picture that can be drawn. `form`: png, svg or pdf."""
    found = {}
    for name, draw in PICTURES.items():
        figure = draw(survey)
        if figure is not None:
            content = BytesIO()
            figure.savefig(content, format=form, dpi=110)
            found[name] = content.getvalue()
    return found


def _figure() -> tuple[Figure, Any]:
    figure = Figure(figsize=(7.8, 4.6), layout="constrained")
    return figure, figure.subplots()


def _finished(figure: Figure, title: str, survey: TraceSurvey, columns: int = 4) -> Figure:
    """Add the legend, the caption and the title to a figure."""
    for axes in figure.axes:
        _plain_frame(axes)
    caption = f"{survey.header.model}: {survey.size}"
    if survey.alpha > 0:
        caption += f"; recorded with alpha {survey.alpha:g}, so substitutes have changed the routers' inputs"
    handles: dict[str, Any] = {}
    for axes in _all_axes(figure):
        found, names = axes.get_legend_handles_labels()
        handles |= dict(zip(names, found, strict=True))
    width = round(12 * figure.get_figwidth())
    if handles:
        legend = figure.legend(
            handles.values(), handles.keys(), loc="outside lower center", frameon=False, fontsize=9, ncols=columns,
            title=textwrap.fill(caption, width), title_fontsize=8,
        )  # fmt: skip
        legend.get_title().set_multialignment("center")
    else:
        figure.supxlabel(textwrap.fill(caption, width), fontsize=8)
    figure.suptitle(title, fontsize=12)
    return figure


def _all_axes(figure: Figure) -> list[Any]:
    """Return the axes of a figure and of its subfigures."""
    found = [axes for inner in figure.subfigs for axes in inner.axes]
    return [*(axes for axes in figure.axes if axes not in found), *found]


def _plain_frame(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)


def _mark_chosen(axes: Any, top_k: int, experts: int) -> None:
    axes.axvline(top_k + 0.5, color=RED, linestyle="--", linewidth=1, label=f"the first {top_k} are chosen")
    axes.set_xticks(sorted({1, *range(top_k, experts + 1, max(1, experts // 8))}))


def _whole_numbers(axes: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True)) if axes.images else None


def _heat(figure: Figure, axes: Any, values: np.ndarray, label: str) -> None:
    most = float(np.nanpercentile(values, 99.5))
    image = axes.imshow(values, aspect="auto", interpolation="nearest", cmap="viridis", vmin=0, vmax=most or 1)
    figure.colorbar(image, ax=axes, extend="max").set_label(label)


def _layers(survey: TraceSurvey) -> list[int]:
    return [layer.layer for layer in survey.header.layers]


def _dots(count: int) -> float:
    """Return the size of the markers of a curve with `count` points."""
    return 4.0 if count <= 40 else 2.5


def _scale(nbytes: int) -> tuple[str, int]:
    """Return (name, bytes) of the unit in which a size in bytes has few digits."""
    unit = format_bytes(nbytes).split()[1]
    return unit, 1024 ** ["B", "KiB", "MiB", "GiB", "TiB"].index(unit)
