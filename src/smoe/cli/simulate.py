"""`smoe simulate`: a paper's own settings on the virtual clock, its figures beside ours."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Annotated

import typer

from smoe.cli.options import Debug, Json
from smoe.errors import ConfigError

if TYPE_CHECKING:
    from smoe.papers.claims import Claim, Reproduction

EPILOG = """Examples:

smoe simulate --paper duoserve

smoe simulate --paper hobbit --json

Nothing is measured here: routing is synthetic, devices are profiles.
"""
PAPERS = ("smoe", "hobbit", "duoserve")


def command(
    paper: Annotated[str, typer.Option(help=f"Whose evaluation: {', '.join(PAPERS)}.")],
    fresh: Annotated[bool, typer.Option("--fresh", help="Simulate anew what was simulated before.")] = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Simulate what a paper measured, on the devices that it names, and set its claims beside what comes out.

    The engine's own plans run on a virtual clock. Claims are relative: how many times better one system is than
    another; a claim holds where the least gain here is nine tenths of the paper's least.

    Every setting that is done is kept in the user's cache folder: what is interrupted goes on from there, and what was
    simulated by this smoe is not simulated again.
    """
    from smoe.cli.console import note, print_json, progress

    if paper not in PAPERS:
        raise ConfigError.no_choice("paper", paper, PAPERS)
    from smoe.papers.cells import Cells

    evaluation, cells = import_module(f"smoe.papers.{paper}"), Cells(paper, is_fresh=fresh)
    count = len(evaluation.SETTINGS)
    known = sum(cells.find(setting) is not None for setting in evaluation.SETTINGS)
    if known:
        note(f"{known} of {count} settings were simulated before; --fresh simulates them anew")
    try:
        with progress("simulate", "settings") as bars:
            task = bars.add_task(paper, total=count, amount="", skipped=known)
            found = evaluation.reproduce(lambda done: bars.update(task, advance=done), cells)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("interrupted; the same command goes on from the settings that are done") from None
    if json:
        print_json(found.as_json())
    else:
        _print(found)


def _print(found: Reproduction) -> None:
    from rich.table import Table

    from smoe.cli.console import note, output
    from smoe.units import format_bytes, format_seconds

    settings = Table(box=None, header_style="dim", pad_edge=False)
    for head in ("setting", "system", "first token", "a token", "end to end", "memory"):
        settings.add_column(head, justify="left" if head in ("setting", "system") else "right")
    last = ""
    for each in found.settings:
        seconds = (each.ttft_seconds, each.seconds_per_token, each.end_to_end_seconds)
        shown = each.name if each.name != last else ""
        last = each.name
        settings.add_row(shown, each.system, *map(format_seconds, seconds), format_bytes(each.memory_bytes))
    output().print(settings)
    claims = Table(box=None, header_style="dim", pad_edge=False)
    for head in ("", "claim", "paper", "here", ""):
        claims.add_column(head)
    for claim in found.claims:
        claims.add_row(claim.where, claim.what, _times(claim.paper), _times(claim.ours), _verdict(claim))
    output().print()
    output().print(claims)
    for remark in found.remarks:
        note(remark)


def _times(span: tuple[float, float]) -> str:
    low, high = (f"{value:.2f}" for value in span)
    return f"{low}x" if low == high else f"{low}x to {high}x"


def _verdict(claim: Claim) -> str:
    return f"{claim.verdict} ({claim.remark})" if claim.remark else claim.verdict
