"""Reads single rows of a stored matrix from its file when they are needed."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence

import numpy as np

from smoe.errors import CheckpointError
from smoe.memory.expert_files import check_identity, opening
from smoe.memory.safetensors_index import StoredTensor


class StoredRows:
    """A matrix that stays on disk. Reads use the page cache, which holds frequently read rows while memory is free. The
    file stays open until this object is deleted."""

    def __init__(self, tensor: StoredTensor) -> None:
        """Open the file. Raises `CheckpointError` if it has changed since it was indexed."""
        self.tensor = tensor
        self.row_bytes = tensor.nbytes // tensor.shape[0]
        self._file = opening()(tensor.path, False)
        weakref.finalize(self, self._file.close)
        if hasattr(os, "posix_fadvise"):  # no read-ahead: rows are far apart
            os.posix_fadvise(self._file.descriptor, tensor.offset, tensor.nbytes, os.POSIX_FADV_RANDOM)
        self._check()

    def read(self, rows: Sequence[int]) -> np.ndarray:
        """Return the rows with the indices `rows` as uint8 [n, bytes of a row]. Raise `CheckpointError` if the file has
        changed."""
        self._check()
        out = np.empty((len(rows), self.row_bytes), np.uint8)
        for row, to in zip(rows, out, strict=True):
            assert 0 <= row < self.tensor.shape[0], (row, self.tensor.shape)
            self._read(self.tensor.offset + row * self.row_bytes, to.data)
        return out

    def _read(self, offset: int, to: memoryview) -> None:
        done = 0
        while done < len(to):
            came = self._file.read_into(to[done:], offset + done)
            if not came:
                raise CheckpointError(
                    f"{self.tensor.path} is cut short: it ends inside the tensor {self.tensor.key!r}; download it again"
                )
            done += came

    def _check(self) -> None:
        if self.tensor.identity is not None:
            check_identity(self.tensor.path, self._file.descriptor, self.tensor.identity)
