"""The collection of garbage is paused for a block only, and stays off where it was off; so is the exclusion of objects.

Would catch a program whose garbage is never collected, and a command that collects it when it ends.
"""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
import weakref
from collections.abc import Iterator

import pytest

from smoe import garbage
from smoe.garbage import collection_paused, exclude_libraries, present_objects_excluded


class Node:
    """An object that may refer to itself."""

    node: Node


@pytest.fixture(autouse=True)
def enabled_afterwards() -> Iterator[None]:
    yield
    gc.enable()


@pytest.mark.parametrize("is_on", [True, False])
def test_a_block_without_collections(is_on: bool) -> None:
    if not is_on:
        gc.disable()
    with collection_paused():
        assert not gc.isenabled()
    assert gc.isenabled() is is_on


def test_a_block_that_raises() -> None:
    with pytest.raises(ValueError, match="x"), collection_paused():
        raise ValueError("x")
    assert gc.isenabled()


@pytest.fixture
def nothing_excluded() -> Iterator[None]:
    """The suite excludes what it has imported (`fixtures.py`)."""
    gc.unfreeze()
    yield
    gc.freeze()


@pytest.mark.usefixtures("nothing_excluded")
def test_objects_are_excluded_for_a_block() -> None:
    with present_objects_excluded():
        excluded = gc.get_freeze_count()
        assert excluded > 10_000
        with present_objects_excluded():
            assert gc.get_freeze_count() >= excluded
        assert gc.get_freeze_count() >= excluded, "the outer block's objects"
    assert gc.get_freeze_count() == 0


@pytest.mark.usefixtures("nothing_excluded")
def test_libraries_are_excluded_until_the_model_is_closed() -> None:
    exclude_libraries()
    libraries = gc.get_freeze_count()
    assert libraries > 10_000
    with present_objects_excluded():
        with present_objects_excluded():
            pass
        assert gc.get_freeze_count() >= libraries, "the outer block's objects"
    assert gc.get_freeze_count() == 0


def test_objects_that_the_program_excludes_stay_excluded() -> None:
    excluded = gc.get_freeze_count()
    assert excluded > 0  # the suite's
    exclude_libraries()
    assert gc.get_freeze_count() == excluded
    with present_objects_excluded():
        pass
    assert gc.get_freeze_count() >= excluded


@pytest.mark.usefixtures("nothing_excluded")
def test_what_python_excludes_itself_counts_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in Python 3.12. Would catch models that stay in memory when they are closed."""
    gc.freeze()
    monkeypatch.setattr(garbage, "_AT_FIRST", gc.get_freeze_count())
    with present_objects_excluded():
        cycle = Node()
        cycle.node = cycle
        seen = weakref.ref(cycle)
        with present_objects_excluded():
            del cycle
    gc.collect()
    assert seen() is None


def test_a_command_does_not_collect_when_it_ends() -> None:
    """That takes a second with torch. Functions for the end run last registered first."""
    lines = """
    import atexit, gc, sys
    atexit.register(lambda: print("excluded", gc.get_freeze_count() > 0))
    sys.argv = ["smoe", "--version"]
    from smoe.__main__ import main
    main()
    """
    ran = subprocess.run([sys.executable, "-c", textwrap.dedent(lines)], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines()[-1] == "excluded True"
