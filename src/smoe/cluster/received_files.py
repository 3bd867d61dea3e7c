"""Stores downloaded files in a folder of the worker; each gets its name when it is complete and verified.

    model.safetensors.part    verified chunks at their places; the gaps are not downloaded yet
    model.safetensors         all chunks, read again and compared with the file's SHA-256

The files of an interrupted download are read and compared chunk by chunk; correct chunks are not downloaded again. An
existing file of the same name with other content is not changed.
"""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO

from smoe.cluster.files import CHUNK_BYTES, Manifest, SentFile
from smoe.cluster.sums import keep_sums, make_sums, sums_of
from smoe.errors import ClusterError, DiskSpaceError
from smoe.file_lock import FileLock
from smoe.models.files import check_disk
from smoe.whole_file import take_place

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class ReceivedFiles:
    """The folder into which a manifest's files are downloaded, and the chunks that are still missing. `close` releases
    the folder for other processes."""

    def __init__(self, folder: Path, sent: Manifest, before: Callable[[int], None] = lambda _: None) -> None:
        """Read the files that exist in the folder; `before(nbytes)` is called before each read.

        Raises `ClusterError` if another process downloads into the folder, or if the folder has a different file of the
        same name. Raises `DiskSpaceError` if the missing chunks do not fit.
        """
        self._folder, self._sent, self._before = folder, sent, before
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = _taken(folder)
        try:
            self.missing: dict[int, set[int]] = {}
            """The missing chunks by file; complete files have no entry."""
            self.missing_bytes = 0
            for number, file in enumerate(sent.files):
                self._look_at(number, file)
            check_disk(folder, self.missing_bytes, f"fetching {len(sent.files)} files into {folder}")
            for number in [number for number, chunks in self.missing.items() if not chunks]:
                self._finish(number)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Release the folder. Repeated calls have no effect."""
        self._lock.close()

    def keep(self, number: int, chunk: int, data: bytes | bytearray) -> bool:
        """Write a chunk of a file. Return False, and write nothing, if the content does not match the chunk's checksum.

        After the last chunk the file is complete. If the disk then returns other bytes than were written, the wrong
        chunks count as missing again. Raises `DiskSpaceError`, `OSError`, and `ClusterError` if the coordinator's
        checksums contradict each other.
        """
        if hashlib.sha256(data).digest() != self._sent.files[number].sum_of(chunk):
            return False
        try:
            part = self._part(number)
            part.touch()
            with part.open("r+b", buffering=0) as file:
                if _write_at(file, data, chunk * CHUNK_BYTES) != len(data):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            if error.errno not in _FULL:
                raise
            raise DiskSpaceError(
                f"the disk of {self._folder} is full ({error.strerror}); make room, then run the same command: it "
                "continues where it stopped"
            ) from error
        self.missing[number].discard(chunk)
        self.missing_bytes -= len(data)
        if not self.missing[number]:
            self._finish(number)
        return True

    def _part(self, number: int) -> Path:
        return self._folder / f"{self._sent.files[number].name}.part"

    def _look_at(self, number: int, file: SentFile) -> None:
        """Compare an existing file, complete or partial, with the manifest's checksums. Record which chunks are
        missing."""
        path, part = self._folder / file.name, self._part(number)
        for each in (path, part):
            if (each.exists() or each.is_symlink()) and not each.is_file():
                raise ClusterError(f"the download must write {each}, which exists and is not a file; move it away")
        if path.exists():
            is_other = path.stat().st_size != file.nbytes
            if is_other or sums_of(path, file.name, self._before).digest != file.digest:
                raise ClusterError(
                    f"{path} exists already and differs from the coordinator's file; delete it, or give another "
                    "folder (`fetch`)",
                    setting="fetch",
                    given=str(self._folder),
                    allowed="a folder that is empty, or has this model's files",
                )
            return
        missing = set(range(file.chunks))
        if part.exists():
            if part.stat().st_size > file.nbytes:
                os.truncate(part, file.nbytes)
            missing = _unlike(make_sums(part, file.name, self._before), file)
        self._lacks(number, missing)

    def _lacks(self, number: int, chunks: set[int]) -> None:
        self.missing[number] = chunks
        self.missing_bytes += sum(self._sent.files[number].chunk_bytes(chunk) for chunk in chunks)

    def _finish(self, number: int) -> None:
        """Read a file whose chunks are all there again, and verify its SHA-256. Then rename it from its `.part`
        name."""
        file, part = self._sent.files[number], self._part(number)
        with part.open("r+b") as written:
            os.fsync(written.fileno())
        made = make_sums(part, file.name, self._before)
        wrong = _unlike(made, file)
        if wrong:
            self._lacks(number, wrong)
            return
        if made.digest != file.digest:
            raise ClusterError(
                f"the coordinator's checksums of {file.name} contradict each other; this is a bug in smoe, please "
                "report it"
            )
        path = self._folder / file.name
        take_place(part, path)
        keep_sums(path, made)
        del self.missing[number]


def _write_at(file: IO[bytes], data: bytes | bytearray, offset: int) -> int:
    """Write bytes at an offset. Return how many were written."""
    file.seek(offset)
    return file.write(data)


def _taken(folder: Path) -> FileLock:
    try:
        return FileLock(folder)
    except BlockingIOError as error:
        raise ClusterError(
            f"another process is fetching into {folder}; wait for it to end, or give another folder"
        ) from error


def _unlike(made: SentFile, file: SentFile) -> set[int]:
    """Return the numbers of the chunks of `file` for which the checksums of `made` are different or absent."""
    return {chunk for chunk in range(file.chunks) if made.sum_of(chunk) != file.sum_of(chunk)}
