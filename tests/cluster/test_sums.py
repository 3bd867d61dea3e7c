"""Checksums are made once. Would catch a model that is read as a whole at every start, and sums of a file that was
written since.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from smoe.cluster.files import CHUNK_BYTES
from smoe.cluster.sums import stored_sums, sums_of
from smoe.user_cache import PLACE

pytestmark = pytest.mark.usefixtures("own_cache")
CONTENT = bytes(range(251)) * ((CHUNK_BYTES + 1000) // 251)


def test_they_are_made_once_and_anew_for_another_file(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(CONTENT)
    read: list[int] = []
    made = sums_of(path, "a.gguf", read.append)
    assert sum(read) == len(CONTENT) == made.nbytes
    assert made.digest == hashlib.sha256(CONTENT).hexdigest()
    assert [made.sum_of(0), made.sum_of(1)] == [
        hashlib.sha256(CONTENT[:CHUNK_BYTES]).digest(),
        hashlib.sha256(CONTENT[CHUNK_BYTES:]).digest(),
    ]
    assert made.chunks == 2
    assert sums_of(path, "a.gguf", pytest.fail) == made, "it was not read again"
    os.utime(path, ns=(1, 1))
    assert stored_sums(path, "a.gguf") is None
    again: list[int] = []
    assert sums_of(path, "a.gguf", again.append) == made and again


def test_a_damaged_cache_is_made_anew(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"12345")
    made = sums_of(path, "a.gguf", lambda _: None)
    (kept,) = (Path(os.environ[PLACE]) / "smoe" / "sums").iterdir()
    kept.write_text(kept.read_text().replace('"chunks": "', '"chunks": "no'), encoding="utf8")
    assert stored_sums(path, "a.gguf") is None
    assert sums_of(path, "a.gguf", lambda _: None) == made


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"12345")
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv(PLACE, str(tmp_path / "file"))
    assert sums_of(path, "a.gguf", lambda _: None).nbytes == 5
