"""Reads single rows of a stored matrix from its files when they are needed."""

from __future__ import annotations

import os
import weakref
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate

import numpy as np

from smoe.errors import CheckpointError
from smoe.memory.expert_files import ExpertFile, check_identity, opening
from smoe.memory.safetensors_index import StoredTensor

_CAN_ADVISE = hasattr(os, "posix_fadvise")


class StoredRows:
    """A matrix that stays on disk, as one tensor or as several with consecutive rows. Reads use the page cache, which
    holds frequently read rows while memory is free. The files stay open until this object is deleted."""

    def __init__(self, *tensors: StoredTensor) -> None:
        """Open the files. Raises `CheckpointError` if one has changed since it was indexed. The tensors have the same
        type and number of columns."""
        self.tensors = tensors
        self._ends = list(accumulate(tensor.shape[0] for tensor in tensors))
        self.shape = (self._ends[-1], tensors[0].shape[1])
        self.row_bytes = tensors[0].nbytes // tensors[0].shape[0]
        self._files: dict[str, ExpertFile] = {}
        for tensor in tensors:
            self._open(tensor)
        self._check(tensors)

    def read(self, rows: Sequence[int]) -> np.ndarray:
        """Return the rows with the indices `rows` as uint8 [n, bytes of a row]. Raise `CheckpointError` if a file has
        changed."""
        places = [(self.tensor_of(row), row) for row in rows]
        self._check(tensor for tensor, _ in places)
        offsets = [self._offset(*place) for place in places]
        if _CAN_ADVISE and len(rows) > 1:  # the disk then reads several rows at a time
            for (tensor, _), offset in zip(places, offsets, strict=True):
                os.posix_fadvise(self._file(tensor).descriptor, offset, self.row_bytes, os.POSIX_FADV_WILLNEED)
        out = np.empty((len(rows), self.row_bytes), np.uint8)
        for (tensor, _), offset, to in zip(places, offsets, out, strict=True):
            self._read(tensor, offset, to.data)
        return out

    def tensor_of(self, row: int) -> StoredTensor:
        """Return the stored tensor that contains a row of the matrix."""
        assert 0 <= row < self.shape[0], (row, self.shape)
        return self.tensors[bisect_right(self._ends, row)]

    def _offset(self, tensor: StoredTensor, row: int) -> int:
        """Return the offset in its file of a row of the matrix, which is in `tensor`."""
        first = self._ends[bisect_right(self._ends, row)] - tensor.shape[0]
        return tensor.offset + (row - first) * self.row_bytes

    def _open(self, tensor: StoredTensor) -> None:
        path = str(tensor.path)
        if path not in self._files:
            file = self._files[path] = opening()(tensor.path, False)
            weakref.finalize(self, file.close)
        if _CAN_ADVISE:  # no read-ahead: rows are far apart
            os.posix_fadvise(self._files[path].descriptor, tensor.offset, tensor.nbytes, os.POSIX_FADV_RANDOM)

    def _file(self, tensor: StoredTensor) -> ExpertFile:
        return self._files[str(tensor.path)]

    def _read(self, tensor: StoredTensor, offset: int, to: memoryview) -> None:
        file, done = self._file(tensor), 0
        while done < len(to):
            came = file.read_into(to[done:], offset + done)
            if not came:
                raise CheckpointError(
                    f"{tensor.path} is cut short: it ends inside the tensor {tensor.key!r}; download it again"
                )
            done += came

    def _check(self, tensors: Iterable[StoredTensor]) -> None:
        for tensor in {tensor.path: tensor for tensor in tensors}.values():
            if tensor.identity is not None:
                check_identity(tensor.path, self._file(tensor).descriptor, tensor.identity)
