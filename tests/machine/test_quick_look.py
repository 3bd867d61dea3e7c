"""A first look at the machine: taken by another process, kept for a day, and taken again where it does not hold.

Would catch a look that is never kept, one of another machine or of a busy hour that is believed, memory that stays.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from smoe.machine import quick_look as module
from smoe.machine.quick_look import QuickLook, quick_look
from tests.fixtures import cache_with

LOOK = QuickLook(memory=1e10, experts=2e9, products=1e11, disk=None)


@pytest.fixture
def looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The sizes that were looked at."""
    found: list[int] = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(module, "_looked_apart", lambda nbytes: (found.append(nbytes), (LOOK, False))[1])
    quick_look.cache_clear()
    yield found
    quick_look.cache_clear()


def again(nbytes: int) -> QuickLook:
    """As another process would ask."""
    quick_look.cache_clear()
    return quick_look(nbytes)


def test_it_is_kept_by_the_size_of_an_expert(looks: list[int]) -> None:
    assert again(4096) == again(4096) == again(8192) == again(4096) == LOOK
    assert looks == [4096, 8192]


@pytest.mark.parametrize("changed", ["machine", "at", "rates"])
def test_what_does_not_hold_is_looked_at_again(changed: str, looks: list[int], tmp_path: Path) -> None:
    again(4096)
    path = tmp_path / "smoe" / "quick-look.json"
    stored = json.loads(path.read_text())
    if changed == "machine":
        stored["machine"]["cores"] += 1
    else:
        stored["4096"][changed] = 0
    path.write_text(json.dumps(stored))
    again(4096)
    assert looks == [4096, 4096]


def test_what_was_disturbed_is_kept_for_minutes(
    looks: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_looked_apart", lambda nbytes: (looks.append(nbytes), (LOOK, True))[1])
    assert again(4096) == again(4096) == LOOK and looks == [4096]
    path = tmp_path / "smoe" / "quick-look.json"
    stored = json.loads(path.read_text())
    stored["4096"]["at"] -= 3600
    path.write_text(json.dumps(stored))
    assert again(4096) == LOOK and looks == [4096, 4096], "an hour later it is looked at again"


def test_numpy_multiplies_on_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch products of several threads, of which each waits for the one that another program interrupts."""
    given: list[dict[str, str]] = []

    def run(*_: object, env: dict[str, str], **__: object) -> CompletedProcess[bytes]:
        given.append(env)
        return CompletedProcess([], 0, stdout=b"2.5e9", stderr=b"")

    monkeypatch.setattr(module.subprocess, "run", run)
    assert module._answered("memory") == b"2.5e9"
    assert given[0]["OPENBLAS_NUM_THREADS"] == given[0]["MKL_NUM_THREADS"] == "1"


def test_where_nothing_can_be_kept(looks: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert again(4096) == LOOK


def test_another_process_answers(tmp_path: Path, object_code: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", cache_with(object_code, tmp_path / "cache"))
    look, _ = LOOKED_APART(1 << 20)
    assert min(look.memory, look.experts, look.products) > 0 and look.disk is not None and look.disk > 0


LOOKED_APART = module._looked_apart
"""The real one: imported before any fixture has replaced it."""
MEMORY_RATE = module.memory_rate
"""Likewise."""


@pytest.fixture
def rates(looks: list[int], monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What another process was asked for."""
    asked: list[str] = []
    monkeypatch.setattr(module, "_answered", lambda word: (asked.append(word), b"7e9\n")[1])
    MEMORY_RATE.cache_clear()  # type: ignore[attr-defined]
    yield asked
    MEMORY_RATE.cache_clear()  # type: ignore[attr-defined]


def test_the_memory_alone_is_measured_by_another_process_once(rates: list[str], tmp_path: Path) -> None:
    assert MEMORY_RATE() == MEMORY_RATE() == 7e9 and rates == ["memory"]
    assert not (tmp_path / "smoe" / "quick-look.json").exists(), "a rate alone is no look"


def test_a_stored_look_has_the_rate_of_the_memory(rates: list[str]) -> None:
    again(4096)
    assert MEMORY_RATE() == LOOK.memory and rates == []


def test_another_process_measures_the_memory() -> None:
    """Would catch an answer that cannot be read, and 256 MiB that the process of a model holds outside its budget."""
    assert 1e8 < float(ANSWERED("memory")) < 1e13


ANSWERED = module._answered
