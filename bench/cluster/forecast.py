"""What was foretold of clusters beside what they took: cell after cell, round after round.

A forecast is made of pieces that were measured apart (`pieces.py`) and of a run without a cluster, of another part of
the text (`recorded.py`); nothing of the cell itself. Every run is a line of the file of runs: what is interrupted goes
on from there, with the same options.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from statistics import fmean, median
from typing import Any

from bench.cluster import pieces as measured
from bench.cluster.acting import Times
from bench.cluster.child import Child
from bench.cluster.decoding import Decoding
from bench.cluster.pieces import UNSHAPED, Hops, Pieces
from bench.cluster.recorded import DRAFT, as_tokens, before, record
from bench.cluster.results import spread, write
from bench.cluster.speed import KINDS, Cell, aligned, circumstances, main_times, measure, one_machine, seconds
from bench.cluster.workers import Shape
from smoe.presets import configure
from smoe.simulator.cluster import SimulatedRun, TokenWaits
from smoe.simulator.cluster_draft import DraftTimes
from smoe.simulator.cluster_forecast import foretell

MOST_MEDIAN, MOST_WORST = 0.15, 0.35
"""Errors that forecasts may have."""
_WORKERS = "1,2,4,8"
_KINDS = "finish,finish-draft,od-moe,od-moe-blind,resident,resident-od-moe"
_LINKS = "100mbit,1gbit,unshaped"
_RUN_SECONDS = 200.0
_RECORDED, _PIECES = (160, 230, 300), 80
"""Where in the text prompts begin of what is replayed, and of what pieces are measured with."""
_TRACE, _ALONE, _LOADING = "trace", "pieces, main alone", "pieces, loading"
_RESIDENT, _WITH_DRAFT = "pieces, resident", "pieces, resident with a draft"


def run(options: argparse.Namespace) -> None:
    """All that is asked for and not in the file of runs yet, as far as the time goes; then what it comes to."""
    shape, runs = Shape.of(options.model), Runs(options)
    cells = [
        Cell.named(f"{workers}x{kind}", link, options.slots)
        for workers in options.workers.split(",")
        for kind in options.kinds.split(",")
        for link in options.links.split(",")
    ]
    began = time.monotonic()
    for key, find in _work(options, shape, cells):
        if key in runs.found:
            continue
        if options.seconds is not None and time.monotonic() - began > options.seconds:
            print(f"{options.runs}: more is to come; the same command goes on", file=sys.stderr)
            break
        runs.add(key, find())
        print(key, file=sys.stderr, flush=True)
    report(options, shape, runs.found, cells)


class Runs:
    """What was found, by name: one line each in a file."""

    def __init__(self, options: argparse.Namespace) -> None:
        """Raises `SystemExit` where the file is of other options."""
        self._path: Path = options.runs
        self.found: dict[str, Any] = {}
        asked = {name: getattr(options, name) for name in _CIRCUMSTANCES} | {"model": options.model.name}
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        for line in lines:
            each = json.loads(line)
            self.found[each["what"]] = each["found"]
        if self.found.setdefault("asked", asked) != asked:
            raise SystemExit(f"{self._path} is of other options: {self.found['asked']}; give another --runs")
        if not lines:
            self.add("asked", asked)

    def add(self, what: str, found: Any) -> None:
        self.found[what] = found
        with self._path.open("a") as file:
            file.write(json.dumps({"what": what, "found": found}) + "\n")


def _work(
    options: argparse.Namespace, shape: Shape, cells: list[Cell]
) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """(name, what finds it) of all runs: first the pieces, then rounds of cells."""
    yield _TRACE, lambda: _recorded(options, shape)
    yield _ALONE, lambda: one_machine(options, shape, main_times(options), _PIECES)
    few = Cell(1, "od-moe-blind", UNSHAPED, options.slots)
    every, with_draft = (few._replace(kind=kind, slots=0) for kind in ("resident-od-moe", "resident-od-moe-draft"))
    for key, cell in ((_RESIDENT, every), (_WITH_DRAFT, with_draft), (_LOADING, few)):
        yield key, lambda cell=cell: measure(options, shape, cell, begin=_PIECES)  # type: ignore[misc]
    for link in dict.fromkeys([UNSHAPED, *options.links.split(",")]):
        yield _hops_of(link), lambda link=link: asdict(measured.hops(link))  # type: ignore[misc]
    yield "alone", lambda: one_machine(options, shape)
    for number in range(options.rounds):
        for cell in cells:
            yield _run_of(cell, number), lambda cell=cell: measure(options, shape, cell)  # type: ignore[misc]


def _hops_of(link: str) -> str:
    return f"hops, {link}"


def _run_of(cell: Cell, number: int) -> str:
    return f"{cell}, round {number + 1}"


def _recorded(options: argparse.Namespace, shape: Shape) -> dict[str, Any]:
    asked = Decoding(shape, Times(0.0, 0.0), 0.0, 0, DRAFT, tokens=options.tokens)
    child = Child("alone", lambda child: child.say(record(asked, _RECORDED)))
    try:
        return dict(child.hear(_RUN_SECONDS))
    finally:
        child.kill()


# -- forecasts --------------------------------------------------------------------------------------------------------


def pieces_of(shape: Shape, found: dict[str, Any], has_draft: bool) -> Pieces:
    """All cells' forecasts are made of these: a draft, where there is one, wants the same cores as main."""
    return Pieces.of(found[_WITH_DRAFT if has_draft else _RESIDENT], found[_LOADING], found[_ALONE], shape.layers)


def foretold(shape: Shape, found: dict[str, Any], cell: Cell) -> list[SimulatedRun]:
    """A cell by what was found apart from it: on each of the recorded texts as many tokens as it decodes."""
    hops, unshaped = (Hops(**found[_hops_of(link)]) for link in (cell.link, UNSHAPED))
    settings = dict(KINDS[cell.kind])
    config = configure(settings.pop("preset", "exact"), **settings)
    has_draft = config.prefetch == "draft-model"
    is_early = (config.draft_start or "at-once") == "at-once"
    pieces = pieces_of(shape, found, has_draft)
    times = DraftTimes(pieces.draft_layer, is_early=is_early)
    worker = measured.worker_of(pieces, hops, unshaped, cell.slots or shape.all_experts, loads=not cell.is_resident)
    count = Decoding.untimed + found["asked"]["tokens"]
    return [
        foretell(
            as_tokens(text, count, has_draft),
            measured.main_of(pieces, hops, shape.chosen),
            [worker] * cell.workers,
            config.placement or "finish",
            times if has_draft else None,
            measured.port_of(cell.link, shape.row_bytes),
            before(text),
        )
        for text in found[_TRACE]["texts"]
    ]


def report(options: argparse.Namespace, shape: Shape, found: dict[str, Any], cells: list[Cell]) -> None:
    """What there is of both."""
    if _LOADING not in found:
        return
    rows = list(rows_of(options, shape, found, cells))
    errors = sorted(abs(row["error"]) for row in rows)
    said: dict[str, Any] = {"cells": rows}
    said |= {"pieces": [asdict(pieces_of(shape, found, has_draft)) for has_draft in (False, True)]}
    said |= {"hops": {link: found.get(_hops_of(link)) for link in options.links.split(",")}}
    if errors:
        said |= {"median_error": median(errors), "worst_error": errors[-1]}
    write(options, said, table(rows))


def rows_of(
    options: argparse.Namespace, shape: Shape, found: dict[str, Any], cells: list[Cell]
) -> Iterator[dict[str, Any]]:
    """Of each cell that was measured."""
    for cell in cells:
        runs = [found[key] for n in range(options.rounds) if (key := _run_of(cell, n)) in found]
        if not runs:
            continue
        told, untimed = foretold(shape, found, cell), Decoding.untimed
        times = [each for run in told for each in run.token_seconds[untimed:]]
        took, mean = spread([seconds(each) for each in runs]), fmean(times)
        waits = [fmean(of) for of in zip(*(each for run in told for each in run.waits[untimed:]), strict=True)]
        loads = [sum(of) / len(times) for of in zip(*(run.loads_since(untimed) for run in told), strict=True)]
        yield {
            "cell": cell._asdict(),
            "measured": took,
            "rounds": len(runs),
            "foretold": mean,
            "error": mean / took["median"] - 1,
            "foretold_waits": dict(zip(TokenWaits._fields, waits, strict=True)),
            "measured_waits": {name: median(each["waits"][name] for each in runs) for name in runs[0]["waits"]},
            "foretold_loads": [0.0, 0.0] if cell.is_resident else loads,  # which take nothing there
            "measured_loads": loads_measured(runs),
            "is_exact": all(each["logits"] == found["alone"]["logits"] for each in runs),
        }


def loads_measured(runs: list[dict[str, Any]]) -> tuple[float, float]:
    """(at workers, at main) a token."""
    there = [sum(count for n, count in each["loads"].items() if int(n)) for each in runs]
    return median(there), median(next(count for n, count in each["loads"].items() if not int(n)) for each in runs)


def table(rows: list[dict[str, Any]]) -> str:
    """For people: both, the error, and where they differ. Milliseconds a token."""
    heads = ("cell", "measured", "foretold", "error", "loads", "foretold", "waits for loads", "foretold", "between")
    lines: list[tuple[str, ...]] = [(*heads, "foretold")]
    for row in rows:
        took, told, was = row["measured"], row["foretold_waits"], row["measured_waits"]
        span = f"{1e3 * took['median']:.0f} ({1e3 * took['least']:.0f}-{1e3 * took['most']:.0f})"
        loads = [f"{there:.1f} + {here:.1f}" for there, here in (row["measured_loads"], row["foretold_loads"])]
        own = was["waiting for its own loads"]
        waits = [
            f"{1e3 * there:.0f} + {1e3 * here:.0f}"
            for there, here in ((was["loads there"], own), (told["loads"], told["own_loads"]))
        ]
        between = [f"{1e3 * each:.1f}" for each in (was["between"], told["between"])]
        error = f"{100 * row['error']:+.0f}%"
        lines.append((str(Cell(**row["cell"])), span, f"{1e3 * row['foretold']:.0f}", error, *loads, *waits, *between))
    text = aligned(lines) + "\n"
    errors = sorted(abs(row["error"]) for row in rows)
    if errors:
        middle, worst = median(errors), errors[-1]
        is_met = middle <= MOST_MEDIAN and worst <= MOST_WORST
        text += (
            f"\n{len(rows)} cells: the error is {middle:.0%} in the middle, {worst:.0%} at most; allowed are "
            f"{MOST_MEDIAN:.0%} and {MOST_WORST:.0%}: {'met' if is_met else 'missed'}\n"
            f"logits {'equal' if all(row['is_exact'] for row in rows) else 'NOT EQUAL'} to those of one machine\n"
        )
    return text


_CIRCUMSTANCES = ("tokens", "slots", "load_ms", "main_load_ms", "expert_ms", "layer_ms")


def options_of(parser: argparse.ArgumentParser) -> None:
    """What can be asked."""
    parser.add_argument("model", type=Path, help="a folder")
    parser.add_argument("--runs", type=Path, required=True, help="the file of runs, which is gone on with")
    parser.add_argument("--workers", default=_WORKERS)
    parser.add_argument("--kinds", default=_KINDS, help=f"of {', '.join(KINDS)}")
    parser.add_argument("--links", default=_LINKS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, help="begin nothing after so long")
    parser.add_argument("--tokens", type=int, default=16, help="timed ones")
    circumstances(parser)
