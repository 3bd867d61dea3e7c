"""Whether other programs have the cores: what the system counts of the calling thread.

Would catch: the time of another thread, a unit mistaken, an error where the system counts nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from smoe.machine import processor


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The system's file about the thread."""
    path = tmp_path / "schedstat"

    def place(given: str) -> Any:
        assert given == "/proc/thread-self/schedstat"
        return path

    monkeypatch.setattr(processor, "Path", place)
    return path


def test_waiting_is_counted_in_seconds_and_as_a_share(counted: Path) -> None:
    counted.write_text("3000000000 1000000000 42\n")
    assert processor.waited_seconds() == 1.0 and processor.waited_share() == 0.25


@pytest.mark.parametrize("content", [None, "", "a b c", "5", "0 0 0"])
def test_a_system_that_does_not_count_it(counted: Path, content: str | None) -> None:
    if content is not None:
        counted.write_text(content)
    assert processor.waited_share() is None
    assert processor.waited_seconds() in (None, 0.0)
