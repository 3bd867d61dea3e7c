"""Prints how many misses each eviction policy has on the traces that it was fitted to, and on other traces."""

from __future__ import annotations

from collections.abc import Mapping

from rich.table import Table

from smoe.cli.console import output


def print_evictions(
    heading: str, unit: str, usual: str, figures: Mapping[str, float], held_out: Mapping[str, float] | None
) -> None:
    """Print a heading, then one line for each policy: its number in `unit`, and the difference from the number of the
    policy `usual`."""
    table = Table(box=None, header_style="dim", pad_edge=False)
    table.add_column("eviction")
    columns = {unit: figures} | ({"held out": held_out} if held_out else {})
    for head in columns:
        table.add_column(head, justify="right")
        table.add_column(f"relative to {usual}", justify="right")
    for name in figures:
        cells = []
        for found in columns.values():
            base = found[usual]
            cells += [f"{found[name]:,.0f}", f"{found[name] / base - 1:+.1%}" if base else ""]
        table.add_row(name, *cells)
    output().print(heading, markup=False, soft_wrap=True)
    output().print(table)
