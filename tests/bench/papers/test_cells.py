"""Cells of a paper's sweep: kept whole, found by what decides them, and never believed beyond that.

Would catch: an interrupted simulation that starts anew, or ends in other bytes; a cell of another setting, paper, smoe
or version, or half a file, that is taken for the right one.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

import smoe
from bench.papers import cells, duoserve, hobbit
from bench.papers import smoe as paper_smoe
from bench.papers.cells import Cells
from bench.papers.claims import Cell, Setting
from bench.papers.hobbit import MACHINES, MODELS

CELL = Cell([Setting("here", "smoe", 0.1 + 0.2, 1 / 3, 64, 2e9)], {"LRU": 1.1})


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in ("duoserve", "hobbit", "smoe"):
        monkeypatch.setattr(f"bench.papers.{name}.usable_cores", lambda: 1)  # all in this process
    return tmp_path / "smoe" / "simulated"


def interrupted_after(count: int) -> Any:
    def tick(done: int) -> None:
        nonlocal count
        count -= done
        if count <= 0:
            raise KeyboardInterrupt

    return tick


@pytest.mark.parametrize(
    ("paper", "settings"),
    [
        (duoserve, duoserve.SETTINGS[:5]),
        (hobbit, [(model, MACHINES[0]) for model in MODELS]),
        (paper_smoe, [(paper_smoe.MACHINES[0], 1), (paper_smoe.MACHINES[0], 3)]),
    ],
)
def test_what_is_interrupted_goes_on(paper: Any, settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many cells as were done are not simulated again, and the end is the same, byte for byte."""
    name = paper.__name__.rpartition(".")[2]
    simulate = "_in_case" if name == "duoserve" else "_systems"
    original, made = getattr(paper, simulate), list[Any]()
    monkeypatch.setattr(paper, simulate, lambda setting: made.append(setting) or original(setting))
    monkeypatch.setattr(paper, "SETTINGS", settings)
    monkeypatch.setattr(paper, "NEW_TOKENS", 12)
    monkeypatch.setattr(paper, "_claims", lambda *_: [])
    monkeypatch.setattr(duoserve, "_memory", lambda *_: None)

    def reproduced(kept: Cells | None, tick: Any = lambda done: None) -> str:
        found = paper.reproduce(tick, kept)
        return json.dumps([setting.as_json() for setting in found.settings])

    whole = reproduced(None)
    made.clear()
    first = len(settings) // 2
    with pytest.raises(KeyboardInterrupt):
        reproduced(Cells(name), interrupted_after(first))
    assert made == settings[:first]
    assert reproduced(Cells(name)) == whole and made == settings, "the rest alone"
    assert reproduced(Cells(name)) == whole and made == settings, "nothing"
    assert reproduced(Cells(name, is_fresh=True)) == whole and made == [*settings, *settings]


def test_a_cell_is_found_for_what_decides_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Cells("hobbit").keep(("a", 1), CELL)
    assert Cells("hobbit").find(("a", 1)) == CELL
    assert Cells("hobbit").find(("a", 2)) is None and Cells("smoe").find(("a", 1)) is None
    assert Cells("hobbit", is_fresh=True).find(("a", 1)) is None
    monkeypatch.setattr(smoe, "__version__", "another")
    cells._decided_by.cache_clear()
    assert Cells("hobbit").find(("a", 1)) is None
    Cells("hobbit").keep(("a", 1), CELL)
    assert len(list(folder.iterdir())) == 2, "another checkout may be at work"
    monkeypatch.setattr(smoe, "__version__", "a third")
    cells._decided_by.cache_clear()
    for other in folder.iterdir():
        os.utime(other, (0, 0))
    Cells("hobbit").keep(("a", 1), CELL)
    assert len(list(folder.iterdir())) == 1, "those that nobody has written to for long are of no use"
    monkeypatch.undo()
    cells._decided_by.cache_clear()


@pytest.mark.parametrize("damage", [lambda text: text[: len(text) // 2], lambda text: text.replace("system", "sister")])
def test_a_damaged_cell_is_none(damage: Any, folder: Path) -> None:
    Cells("hobbit").keep("a", CELL)
    (path,) = folder.glob("*/*")
    path.write_text(damage(path.read_text()))
    assert Cells("hobbit").find("a") is None


def test_what_cannot_be_kept_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    Cells("hobbit").keep("a", CELL)
    assert Cells("hobbit").find("a") is None
