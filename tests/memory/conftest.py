"""A file that is read from, and memory to read into."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from smoe.memory.arena import Arena
from smoe.memory.store import PAGE
from tests.memory.pages import DATA


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "data.bin"
    file.write_bytes(DATA)
    return file


@pytest.fixture
def buffer() -> Iterator[memoryview]:
    arena = Arena([(1, 32 * PAGE)], torch.device("cpu"))
    yield arena.buffer(0)
