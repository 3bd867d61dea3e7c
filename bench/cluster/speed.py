"""How fast a cluster decodes: workers, placements and links in turns, round after round.

Every cell of every round has processes of its own, all started anew: workers by invitation, then main, which reads a
prompt, decodes some tokens untimed and the others timed. *finish* and *od-moe* are placements with so many experts in
each worker's memory; *resident* and *resident-od-moe* the same with every expert in every worker's memory, read before.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from bench.cluster.acting import Dials, Times
from bench.cluster.child import Child
from bench.cluster.decoding import Decoding, decode
from bench.cluster.network import LINKS, Network
from bench.cluster.results import spread, write
from bench.cluster.workers import Shape, Workers

_DRAFT: dict[str, Any] = {"prefetch": "draft-model", "draft_precision": "int4"}
_APART: dict[str, Any] = {"draft_on": "cluster"}
KINDS: dict[str, dict[str, Any]] = {
    "finish": {},
    "finish-draft": _DRAFT,
    "finish-draft-apart": _DRAFT | _APART,
    "finish-draft-spare": _DRAFT | {"draft_extra": 1},
    "od-moe": {"preset": "od-moe", "draft_precision": "int4"},
    "od-moe-apart": {"preset": "od-moe", "draft_precision": "int4"} | _APART,
    "od-moe-at-once": {"preset": "od-moe", "draft_precision": "int4", "draft_start": "at-once"},
    "od-moe-at-once-apart": {"preset": "od-moe", "draft_precision": "int4", "draft_start": "at-once"} | _APART,
    "od-moe-int8": {"preset": "od-moe"},
    "od-moe-next-gate": {"preset": "od-moe", "prefetch": "next-gate"},
    "od-moe-blind": {"preset": "od-moe", "prefetch": "none"},
    "resident": {},
    "resident-od-moe": {"preset": "od-moe", "prefetch": "none"},
    "resident-od-moe-draft": {"preset": "od-moe", "draft_precision": "int4"},
    "resident-od-moe-draft-apart": {"preset": "od-moe", "draft_precision": "int4"} | _APART,
}
"""Preset and switches of main; of *apart* the draft is a machine more."""
_CELLS = "1xfinish,4xfinish,1xod-moe,4xod-moe,4xresident,4xresident-od-moe"
_RUN_SECONDS = 300.0
_AT_ONCE = Times(0.0, 0.0)


class Cell(NamedTuple):
    """One setting that is measured."""

    workers: int
    kind: str
    """One of `KINDS`."""
    link: str
    """One of `LINKS`."""
    slots: int
    """Experts in each worker's memory; 0: all."""

    @classmethod
    def named(cls, text: str, link: str, slots: int) -> Cell:
        """`4xfinish`, or `4xfinish@8` for other slots."""
        found = re.fullmatch(r"([0-9]+)x([a-z0-9-]+)(?:@([0-9]+))?", text)
        if found is None or found[2] not in KINDS or link not in LINKS:
            known = f"WORKERSxKIND[@SLOTS], of {', '.join(KINDS)}; a link one of {', '.join(LINKS)}"
            raise SystemExit(f"{text!r} at {link!r}: a cell is {known}")
        slots = 0 if found[2].startswith("resident") else int(found[3] or slots)
        return cls(int(found[1]), found[2], link, slots)

    @property
    def is_resident(self) -> bool:
        return self.slots == 0

    @property
    def reference(self) -> Cell:
        """The same cluster with everything resident."""
        return self._replace(kind="resident-od-moe" if self.kind.startswith("od-moe") else "resident", slots=0)

    def __str__(self) -> str:
        return f"{self.workers} x {self.kind}{f' @ {self.slots}' if self.slots else ''}, {self.link}"


def run(options: argparse.Namespace) -> None:
    """All cells, and what they come to."""
    shape = Shape.of(options.model)
    cells = [
        Cell.named(each, link, options.slots) for link in options.links.split(",") for each in options.cells.split(",")
    ]
    results: dict[Cell, list[dict[str, Any]]] = {cell: [] for cell in cells}
    alone = one_machine(options, shape)
    for _ in range(options.rounds):
        for cell in cells:
            found = measure(options, shape, cell)
            found["is_exact"] = found["logits"] == alone["logits"]
            results[cell].append(found)
            print(f"{cell}: {line(found)}", file=sys.stderr, flush=True)
    write(options, {"alone": alone, "shape": shape.described(), "cells": rows(results, shape)}, table(results, shape))
    if not all(found["is_exact"] for runs in results.values() for found in runs):
        raise SystemExit("the logits are not those of one machine alone")


def measure(options: argparse.Namespace, shape: Shape, cell: Cell, begin: int = 0) -> dict[str, Any]:
    """One run of a cell; its prompt begins there in the text."""
    load = 0.0 if cell.is_resident else options.load_ms / 1e3
    times = Times(load, options.expert_ms / 1e3)
    asked = Decoding(
        shape,
        main_times(options),
        load,
        cell.workers,
        KINDS[cell.kind],
        tokens=options.tokens,
        reads_all=cell.is_resident,
        begin=begin,
    )
    slots, has_draft = cell.slots or shape.all_experts, KINDS[cell.kind].get("draft_on") == "cluster"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with (
            Network(cell.workers + 1 + has_draft, LINKS[cell.link]) as network,
            Workers(network, folder, shape, times, slots, cell.workers, has_draft) as workers,
        ):
            machines = {0: Dials()} | workers.dials
            main = workers.main(lambda child: child.say(decode(asked, machines)))
            try:
                found: dict[str, Any] = workers.hear(main, _RUN_SECONDS)
                found["peak_rss_bytes"] = {n: child.peak_rss_bytes() for n, child in workers.running.items()}
            finally:
                main.kill()
    return found


def one_machine(options: argparse.Namespace, shape: Shape, times: Times = _AT_ONCE, begin: int = 0) -> dict[str, Any]:
    """The same in one process, without a cluster; if nothing is said as fast as it goes."""
    asked = Decoding(shape, times, 0.0, 0, tokens=options.tokens, begin=begin)
    child = Child("alone", lambda child: child.say(decode(asked, {0: Dials()})))
    try:
        return dict(child.hear(_RUN_SECONDS))
    finally:
        child.kill()


def main_times(options: argparse.Namespace) -> Times:
    """Of the main machine."""
    return Times(options.main_load_ms / 1e3, options.expert_ms / 1e3, options.layer_ms / 1e3)


# -- what comes of it -------------------------------------------------------------------------------------------------


def seconds(found: dict[str, Any]) -> float:
    """Of a token: the mean, as loads come in lumps."""
    return float(sum(found["seconds"]) / len(found["seconds"]))


def line(found: dict[str, Any]) -> str:
    """One run for whoever waits."""
    loads = sum(found["loads"][n] for n in found["loads"] if n != 0)
    return (
        f"{1e3 * seconds(found):.0f} ms a token, first {found['ttft_seconds']:.2f} s, {loads:.1f} loads at workers for "
        f"{found['at_workers']:.1f} experts, {'exact' if found['is_exact'] else 'NOT EXACT'}"
    )


def rows(results: dict[Cell, list[dict[str, Any]]], shape: Shape) -> list[dict[str, Any]]:
    """Of each cell the median and range over rounds; ratios are of runs of the same round."""
    found = []
    for cell, runs in results.items():
        one = _speed_over(results, cell, cell._replace(workers=1))
        resident = _speed_over(results, cell, cell.reference)
        held = sum(member["slots"] for member in runs[0]["workers"]) + runs[0]["slots"]
        draft = runs[0]["draft_bytes"] / shape.expert_bytes
        found.append(
            {
                "cell": cell._asdict(),
                "seconds_per_token": spread([seconds(each) for each in runs]),
                "ttft_seconds": spread([each["ttft_seconds"] for each in runs]),
                "speed_over_one_worker": one,
                "share_of_resident_speed": resident,
                "share_of_experts_in_memory": (held + draft) / shape.all_experts,
                "is_exact": all(each["is_exact"] for each in runs),
                "runs": runs,
            }
        )
    return found


def _speed_over(results: dict[Cell, list[dict[str, Any]]], cell: Cell, other: Cell) -> dict[str, float] | None:
    if other == cell or other not in results:
        return None
    pairs = zip(results[cell], results[other], strict=True)
    return spread([seconds(there) / seconds(here) for here, there in pairs])


def table(results: dict[Cell, list[dict[str, Any]]], shape: Shape) -> str:
    """For people: medians, ranges, and where a token's time went."""
    heads = ("cell", "memory", "ms a token", "first token", "x one worker", "of resident", "loads", "experts", "RSS")
    lines = [heads]
    for row in rows(results, shape):
        runs, cell = row["runs"], Cell(**row["cell"])
        loads = [sum(each["loads"][n] for n in each["loads"] if n != 0) for each in runs]
        lines.append(
            (
                str(cell),
                f"{row['share_of_experts_in_memory']:.0%}",
                _words(row["seconds_per_token"], 1e3, ".0f"),
                f"{row['ttft_seconds']['median']:.2f} s",
                _words(row["speed_over_one_worker"], 1, ".2f"),
                _words(row["share_of_resident_speed"], 100, ".0f"),
                f"{median(loads):.1f} + {median(each['loads'][0] for each in runs):.1f}",
                f"{median(each['at_workers'] for each in runs):.1f} of {median(e['experts'] for e in runs):.1f}",
                f"{max(max(each['peak_rss_bytes'].values()) for each in runs) >> 20} MiB",
            )
        )
    text = aligned(lines)
    waited = [("ms a token of", *(name for name in next(iter(results.values()))[0]["waits"]))]
    for cell, runs in results.items():
        parts = [(name, median(each["waits"][name] for each in runs)) for name in runs[0]["waits"]]
        waited.append(
            (
                str(cell),
                *(f"{part:.0%}" if name.startswith("requests") else f"{1e3 * part:.0f}" for name, part in parts),
            )
        )
    exact = all(each["is_exact"] for runs in results.values() for each in runs)
    return f"{text}\n\n{aligned(waited)}\n\nlogits {'equal' if exact else 'NOT EQUAL'} to those of one machine\n"


def _words(found: dict[str, float] | None, scale: float, form: str) -> str:
    if found is None:
        return "-"
    middle, least, most = (format(scale * found[key], form) for key in ("median", "least", "most"))
    return f"{middle} ({least}-{most})"


def aligned(lines: Sequence[Iterable[str]]) -> str:
    """As a table."""
    cells = [list(each) for each in lines]
    widths = [max(len(each[n]) for each in cells) for n in range(len(cells[0]))]
    return "\n".join("  ".join(text.ljust(width) for text, width in zip(each, widths, strict=True)) for each in cells)


def options_of(parser: argparse.ArgumentParser) -> None:
    """What can be asked."""
    parser.add_argument("model", type=Path, help="a folder")
    parser.add_argument("--cells", default=_CELLS, help=f"WORKERSxKIND[@SLOTS], of {', '.join(KINDS)}")
    parser.add_argument("--links", default="1gbit", help=", ".join(LINKS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=24, help="timed ones")
    circumstances(parser)


def circumstances(parser: argparse.ArgumentParser) -> None:
    """What every machine has, and how fast it is."""
    parser.add_argument("--slots", type=int, default=8, help="experts in each worker's memory")
    parser.add_argument("--load-ms", type=float, default=28.0, help="of an expert from a worker's disk")
    parser.add_argument("--main-load-ms", type=float, default=28.0, help="... from main's")
    parser.add_argument("--expert-ms", type=float, default=1.5, help="of computing one")
    parser.add_argument("--layer-ms", type=float, default=4.5, help="on main, of what lies between two layers' experts")
