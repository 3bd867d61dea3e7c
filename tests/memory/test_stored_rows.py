"""Rows of a matrix in a file. Oracle: NumPy on the same bytes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from smoe.errors import CheckpointError
from smoe.memory.expert_files import identity_of
from smoe.memory.safetensors_index import StoredTensor
from smoe.memory.stored_rows import StoredRows

ROWS, NBYTES, OFFSET = 9, 34, 100


@pytest.fixture
def stored(tmp_path: Path) -> StoredTensor:
    path = tmp_path / "file"
    path.write_bytes(bytes(OFFSET) + data().tobytes())
    with path.open("rb") as file:
        identity = identity_of(file.fileno())
    return StoredTensor(path, OFFSET, ROWS * NBYTES, "Q8_0", (ROWS, 32), "matrix", identity)


def data() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (ROWS, NBYTES), np.uint8)


@pytest.mark.parametrize("rows", [[0], [8, 0, 3], []])
def test_rows_are_those_of_the_file(rows: list[int], stored: StoredTensor) -> None:
    assert np.array_equal(StoredRows(stored).read(rows), data()[rows])


def test_a_file_that_was_written_to_meanwhile_is_refused(stored: StoredTensor) -> None:
    rows = StoredRows(stored)
    with stored.path.open("ab") as file:
        file.write(b"more")
    with pytest.raises(CheckpointError, match="written or replaced"):
        rows.read([1])
