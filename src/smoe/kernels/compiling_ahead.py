"""Compiles kernels in another process while this one does other work. `jit.py` calls `begin`.

    calling process                                  compiling process, whose entry point is `main`
    the features, and all sources (pickled)   --->   generates and compiles one text after the other
    object files, each after its length       <---

At the first start on a machine, the products of two quantized formats take some four seconds to generate and compile,
on one core. Loading a model does other work on one core in that time.
"""

from __future__ import annotations

import contextlib
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from typing import IO, TYPE_CHECKING

from smoe.kernels import compiler, object_cache
from smoe.safe_path import WORKING_FOLDER, child_environment, module_line

if TYPE_CHECKING:
    from smoe.kernels.jit import Source

_LENGTH_BYTES = 8
_SECONDS = 60.0
"""The time after which results are no longer waited for, all together, from the beginning on."""
_ELF = b"\x7fELF"
"""The first bytes of an object file on Linux."""


class Compiling:
    """The compilation of some sources by another process."""

    def __init__(self, process: subprocess.Popen[bytes], keys: Iterable[bytes]) -> None:
        self._process = process
        self._results: dict[bytes, Future[bytes | None]] = {key: Future() for key in keys}
        self._end = time.monotonic() + _SECONDS

    def __contains__(self, key: bytes) -> bool:
        """Return whether a source with this key in the cache was among the sources."""
        return key in self._results

    def result(self, key: bytes) -> bytes | None:
        """Wait for an object file, which is then in the cache too. Return None if it was not compiled in time."""
        with contextlib.suppress(TimeoutError):
            return self._results[key].result(max(0.0, self._end - time.monotonic()))
        self._process.kill()
        return None

    def receive(self, request: bytes) -> None:
        """Send the request, and store every object file in the cache as it arrives."""
        process, waiting = self._process, iter(self._results.items())
        assert process.stdin is not None and process.stdout is not None, "both are pipes"
        try:
            with contextlib.suppress(OSError), process.stdin:
                process.stdin.write(request)
            for key, result in waiting:
                code = _received(process.stdout)
                if code is None:
                    result.set_result(None)
                    break
                object_cache.CODE.write(key, code)
                result.set_result(code)
        finally:
            for _, result in waiting:
                result.set_result(None)
            process.kill()
            process.stdout.close()
            process.wait()


def begin(sources: Mapping[bytes, Source], features: str) -> Compiling | None:
    """Begin to compile sources, given by their keys in the cache. Return None if there can be no other process."""
    request = pickle.dumps((features, list(sources.values())))
    try:
        process = subprocess.Popen(
            module_line("smoe.kernels.compiling_ahead"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # a source that fails is compiled again, with its error, when it is needed
            cwd=WORKING_FOLDER,
            env=child_environment(),
        )
    except OSError:
        return None
    compiling = Compiling(process, sources)
    threading.Thread(target=compiling.receive, args=(request,), name="smoe-compiling", daemon=True).start()
    return compiling


def _received(stream: IO[bytes]) -> bytes | None:
    """Return the next object file. None if the other process has ended, or has written something else."""
    count = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
    if not len(_ELF) < count <= object_cache.CODE.most_bytes:
        return None
    code = stream.read(count)
    return code if len(code) == count and code.startswith(_ELF) else None


def main() -> None:
    """Compile the sources that stdin contains, and write the object files to stdout."""
    import llvmlite.binding as llvm

    features, sources = pickle.load(sys.stdin.buffer)
    for source in sources:
        code = compiler.object_file(llvm, source.text(), features)
        sys.stdout.buffer.write(len(code).to_bytes(_LENGTH_BYTES, "little") + code)
        sys.stdout.buffer.flush()
