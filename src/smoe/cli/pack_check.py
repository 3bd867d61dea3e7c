"""Verifies a packed file against its checksums, with a progress bar."""

from __future__ import annotations

from smoe.cli.console import progress
from smoe.models.packed import Contents, Packed
from smoe.packing.writer import damaged_layers
from smoe.units import format_bytes


def find_damage(packed: Packed, contents: Contents, command: str) -> list[int]:
    """Return the layers of a packed file whose bytes differ from their checksums. `command` begins the progress lines
    if stderr is no terminal."""
    with progress(command) as bars:
        task = bars.add_task("checking the packed file", total=contents.experts * contents.stride, amount="")

        def show(done: int, total: int) -> None:
            bars.update(task, completed=done, amount=f"{format_bytes(done)} of {format_bytes(total)}")

        return damaged_layers(packed, contents, show)
