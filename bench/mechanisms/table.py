"""The table of an ablation: a line for every step, no wider than 80 columns; what its words mean stands below it."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from bench.mechanisms.ablation import Line
from smoe.cli.console import errors
from smoe.units import format_digits

WIDTH = 80
_HEADS = ("TPOT\nms", "change\n%", "hits\n%", "{traffic}", "swap\n%", "right\n%", "wait\nms")
_LEGEND = (
    "TPOT: ms a token; change: % against the first line; hits: % of the experts used that were in memory; {traffic}; "
    "swap: % of the routes computed by a substitute; right: % of the prefetched experts that were used; wait: ms a "
    "token for loads and for the CPU"
)


def print_table(lines: list[Line], has_device: bool, is_emulated: bool) -> None:
    """Figures on stderr, and below them what they are and how far to trust emulated times."""
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim", pad_edge=False)
    table.add_column("\n", no_wrap=True)
    for head in _HEADS:
        traffic = "CPU\n%" if has_device else "read\nMiB"
        table.add_column(head.format(traffic=traffic), justify="right", no_wrap=True)
    for line in lines:
        table.add_row(*_row(line, lines[0], has_device))
    console = errors()
    console.width = max(console.width, WIDTH)
    console.print(table)
    for text in _legend(lines, has_device, is_emulated):
        console.print(text, style="dim", markup=False)


def _row(line: Line, first: Line, has_device: bool) -> list[str]:
    values = line.as_json()

    def percent(name: str) -> str:
        return "-" if values[name] is None else f"{100 * values[name]:.0f}"

    return [
        line.step.name,
        format_digits(1e3 * line.seconds),
        f"{100 * (line.seconds / first.seconds - 1):+.0f}",
        percent("hit_ratio"),
        percent("host_computed_share") if has_device else format_digits(values["bytes_read_per_token"] / 2**20),
        percent("substituted_share"),
        percent("prefetch_precision"),
        format_digits(1e3 * (values["wait_seconds_per_token"] + values["host_wait_seconds_per_token"])),
    ]


def _legend(lines: list[Line], has_device: bool, is_emulated: bool) -> list[str]:
    traffic = "CPU: % of the experts used that it computed" if has_device else "read: MiB a token from disk"
    shown = [
        f"{lines[0].turns[0].resident_share:.0%} of the experts resident. CE: eviction by score; CR: substitution; "
        "Pre: prefetch; BA: balance of CPU and link.",
        _LEGEND.format(traffic=traffic),
    ]
    if is_emulated:
        late: Any = max(line.share(lambda c: c.late_seconds, lambda c: c.forward_seconds) or 0.0 for line in lines)
        shown.append(
            f"emulated times; this machine was late by {late:.0%} at most "
            "(above a few per cent the figures partly measure this machine)"
        )
    return shown
