"""Entries that processes write at the same time. `tests/kernels/test_object_cache.py` has damaged entries, and entries
of other users.

Would catch an entry that is a mixture of two, and a reader that takes half of one.
"""

from __future__ import annotations

import os
import sys
import time

import pytest

from smoe.private_cache import PrivateCache

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="processes are forked"),
    pytest.mark.usefixtures("own_cache"),
]
CACHE = PrivateCache("written", "entries", "entry", b"entry 1\n", 1 << 22)
KEY = b"key"
_SECONDS = 0.3


def content_of(process: int, n: int) -> bytes:
    return bytes([process]) * (1000 + 7 * n)


def write_for_a_while(process: int) -> int:
    child = os.fork()
    if child:
        return child
    end, n = time.monotonic() + _SECONDS, 0
    while time.monotonic() < end:
        CACHE.write(KEY, content_of(process, n % 50))
        n += 1
    os._exit(0)


def test_processes_that_write_at_once_leave_whole_entries() -> None:
    CACHE.write(KEY, content_of(0, 0))
    children = [write_for_a_while(process) for process in (1, 2)]
    seen = set()
    end = time.monotonic() + _SECONDS
    while time.monotonic() < end:
        found = CACHE.read(KEY)
        assert found is not None and len(set(found)) == 1 and len(found) >= 1000
        seen.add(found[0])
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
    assert seen & {1, 2}, "nothing was written meanwhile"
    assert CACHE.read(KEY) is not None
    assert [path.suffix for path in CACHE.folder.iterdir()] == [".entry"], "no partial file is left"


def test_what_is_forgotten_is_gone() -> None:
    CACHE.forget(KEY)
    CACHE.write(KEY, b"content")
    CACHE.forget(KEY)
    assert CACHE.read(KEY) is None
