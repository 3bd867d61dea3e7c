"""Rows of a matrix in a file. Oracle: NumPy on the same bytes."""

from __future__ import annotations

from dataclasses import replace
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


@pytest.mark.parametrize("rows", [[0], [8, 0, 3, 4, 5], []])
def test_rows_of_several_tensors_follow_each_other(rows: list[int], stored: StoredTensor, tmp_path: Path) -> None:
    """Of unequal lengths, two of them in one file in another order."""
    other = tmp_path / "other"
    other.write_bytes(data()[3:5].tobytes())
    row = NBYTES
    parts = (
        replace(stored, nbytes=3 * row, shape=(3, 32)),
        replace(stored, path=other, offset=0, nbytes=2 * row, shape=(2, 32), identity=None),
        replace(stored, offset=OFFSET + 5 * row, nbytes=4 * row, shape=(4, 32)),
    )
    matrix = StoredRows(*parts)
    assert matrix.shape == (ROWS, 32)
    assert np.array_equal(matrix.read(rows), data()[rows])
    assert [matrix.tensor_of(each) for each in (2, 3, 8)] == list(parts)


def test_a_file_that_was_written_to_meanwhile_is_refused(stored: StoredTensor) -> None:
    rows = StoredRows(stored)
    with stored.path.open("ab") as file:
        file.write(b"more")
    with pytest.raises(CheckpointError, match="written or replaced"):
        rows.read([1])
