"""The table of output formats in the documentation. Would catch a format that loses a property, or a page that promises
more than is true.

SMOE_LLAMA_CPP names a source tree of llama.cpp; without it only the page is read.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.server.format_matrix import COLUMNS, table

FOLDER = Path(os.environ.get("SMOE_LLAMA_CPP", "/nonexistent"))
PAGE = Path(__file__).parents[2] / "docs" / "output-formats.md"


@pytest.mark.skipif(not (FOLDER / "models").is_dir(), reason="SMOE_LLAMA_CPP names no source tree of llama.cpp")
def test_the_page_has_the_table_of_today() -> None:
    assert table(FOLDER) in PAGE.read_text(encoding="utf8"), "print it: python -m tests.server.format_matrix FOLDER"


def test_no_cell_is_empty() -> None:
    rows = [line for line in PAGE.read_text(encoding="utf8").splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert tuple(cells[0][1:]) == COLUMNS and len(cells) > 50
    assert {cell for row in cells[2:] for cell in row[1:]} == {"yes", "-"}
