"""Marks tests as slow by `slow.txt`: of each test there, so many cells are in `make test`, spread over its parameters.

A test that takes seconds of a core, or whose cells together do, is a line of that file; `make test-all` runs all cells.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

LIST = Path(__file__).with_suffix(".txt")


def cells_kept() -> dict[str, int]:
    """For each test in the list, the number of cells that are not slow."""
    lines = (line.split() for line in LIST.read_text("utf8").splitlines() if line and not line.startswith("#"))
    return {name: int(count) for name, count in lines}


def spread(cells: int, kept: int) -> set[int]:
    """The numbers of those that are kept: the first, and others at equal distances."""
    return {number * cells // kept for number in range(kept)}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Before cells are chosen by their marks."""
    listed, cells = cells_kept(), defaultdict[str, list[pytest.Item]](list)
    for item in items:
        name = item.nodeid.partition("[")[0]
        if name in listed:
            cells[name].append(item)
    for name, all_cells in cells.items():
        kept = spread(len(all_cells), min(listed[name], len(all_cells)))
        for number, item in enumerate(all_cells):
            if number not in kept:
                item.add_marker(pytest.mark.slow)
