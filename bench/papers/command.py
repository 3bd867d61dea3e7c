"""What `smoe simulate` does: it simulates a paper's settings and shows its claims next to our results."""

from __future__ import annotations

from importlib import import_module
from itertools import chain

from rich.table import Table

from bench.papers.cells import Cells
from bench.papers.claims import Claim, Reproduction
from smoe.cli.console import note, output, print_json, progress
from smoe.cli.keeping import ResultDestination
from smoe.errors import ConfigError
from smoe.units import format_bytes, format_seconds

PAPERS = ("smoe", "hobbit", "duoserve", "od-moe")


def simulate(paper: str, *, is_fresh: bool, as_json: bool) -> None:
    """Simulate all settings of the paper; `is_fresh`: also those whose results are stored."""
    if paper not in PAPERS:
        raise ConfigError.no_choice("paper", paper, PAPERS)
    evaluation, cells = import_module(f"bench.papers.{paper.replace('-', '_')}"), Cells(paper, is_fresh=is_fresh)
    count = len(evaluation.SETTINGS)
    known = sum(cells.find(setting) is not None for setting in evaluation.SETTINGS)
    if known:
        note(f"{known} of {count} settings were simulated before; --fresh simulates them again")
    how = "the same command, without --fresh, continues" if is_fresh else "the same command continues"
    words = f"{how} from the settings that are done" if ResultDestination().can_keep else ""
    try:
        with progress("simulate", "settings") as bars:
            task = bars.add_task(paper, total=count, amount="", skipped=known)
            found = evaluation.reproduce(lambda done: bars.update(task, advance=done), cells)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(words) from None
    if as_json:
        print_json(found.as_json())
    else:
        _print(found)


def _print(found: Reproduction) -> None:
    rows: dict[str, list[tuple[str, ...]]] = {}
    for each in found.settings:
        seconds = (each.ttft_seconds, each.seconds_per_token, each.end_to_end_seconds)
        cells = (each.system, *map(format_seconds, seconds), format_bytes(each.memory_bytes))
        rows.setdefault(each.name, []).append(cells)
    heads = ("system", "first token", "a token", "end to end", "memory")
    widths = [max(map(len, column)) for column in zip(heads, *chain(*rows.values()), strict=True)]
    for number, (name, of) in enumerate(rows.items()):
        settings = Table(box=None, header_style="dim", pad_edge=False, show_header=number == 0)
        for head, width in zip(heads, widths, strict=True):
            settings.add_column(head, justify="left" if head == "system" else "right", min_width=width)
        for cells in of:
            settings.add_row(*cells)
        output().print(f"[bold]{name}[/bold]", soft_wrap=True)
        output().print(settings)
    for case in dict.fromkeys(claim.case for claim in found.claims):
        output().print(f"\n[bold]{found.paper}'s claims{f', {case}' if case else ''}[/bold]")
        of_case = [claim for claim in found.claims if claim.case == case]
        for is_figure, head in ((False, "how many times better"), (True, "what")):
            if rows_of := [claim for claim in of_case if (claim.within is not None) == is_figure]:
                _print_claims(rows_of, head)
    for remark in dict.fromkeys(f"{claim.where}: {claim.remark}" for claim in found.claims if claim.remark):
        note(remark)
    for remark in found.remarks:
        note(remark)


def _print_claims(of_case: list[Claim], what: str) -> None:
    claims = Table(box=None, header_style="dim", pad_edge=False)
    for head in ("", what, "paper", "here", ""):
        claims.add_column(head, no_wrap=head != what)
    for claim in of_case:
        places = 4 if claim.within is not None and _hardly_differs(claim.ours) else 2
        claims.add_row(claim.where, claim.what, _times(claim.paper), _times(claim.ours, places), claim.verdict)
    output().print(claims)


def _hardly_differs(ours: tuple[float, float]) -> bool:
    """Whether a figure hardly differs from 1, where it says which of two is better."""
    return any(0 < abs(value - 1) < 0.01 for value in ours)


def _times(span: tuple[float, float], places: int = 2) -> str:
    low, high = (f"{value:.{places}f}" for value in span)
    return low if low == high else f"{low} - {high}"
