"""The list of slow tests. Would catch a test that has another name by now, and is therefore in `make test`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.slow import LIST, cells_kept, spread

ROOT = Path(__file__).parents[1]
TEST = """
import pytest
@pytest.mark.parametrize("cell", range(9))
def test_some(cell): pass
def test_one(): pass
def test_none(): pass
"""


def test_every_test_of_the_list_is_there() -> None:
    for name in cells_kept():
        file, first, *_ = name.split("::")
        assert re.search(rf"(def|class) {first}\(", (ROOT / file).read_text("utf8")), name


def test_the_list_is_in_order() -> None:
    names = [line.split()[0] for line in LIST.read_text("utf8").splitlines() if not line.startswith("#")]
    assert names == sorted(set(names))


@pytest.mark.parametrize(
    ("cells", "kept", "expected"), [(9, 3, {0, 3, 6}), (5, 2, {0, 2}), (4, 4, {0, 1, 2, 3}), (4, 0, set())]
)
def test_cells_are_spread(cells: int, kept: int, expected: set[int]) -> None:
    assert spread(cells, kept) == expected


def test_cells_beyond_those_kept_are_slow(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    file = "test_cells_beyond_those_kept_are_slow.py"
    pytester.makepyfile(TEST)
    monkeypatch.setattr("tests.slow.cells_kept", lambda: {f"{file}::test_some": 3, f"{file}::test_none": 0})
    found = pytester.runpytest_inprocess("-p", "tests.slow", "-p", "no:cacheprovider", "-n0", "-m", "not slow", "-v")
    found.assert_outcomes(passed=4, deselected=7)
    found.stdout.fnmatch_lines(["*test_some?0?*", "*test_some?3?*", "*test_some?6?*", "*test_one*"])
