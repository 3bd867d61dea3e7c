"""Compiles kernels in another process while this one does other work. `jit.py` calls `begin`.

    calling process                                  compiling process, whose entry point is `main`
    the features, and all sources (pickled)   --->   generates and compiles one text after the other
    object files, each after its length       <---

At the first start on a machine, the kernels of a quantized model take some four seconds to generate and compile, on one
core. Loading a model does other work on one core in that time.
"""

from __future__ import annotations

import contextlib
import pickle
import subprocess
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from typing import IO, TYPE_CHECKING

from smoe.kernels import compiler, object_cache
from smoe.safe_path import WORKING_FOLDER, child_environment, module_line

if TYPE_CHECKING:
    from smoe.kernels.jit import Source

_LENGTH_BYTES = 8
_SECONDS = 60.0


def begin(sources: Mapping[bytes, Source], features: str) -> dict[bytes, Future[bytes | None]]:
    """Begin to compile sources, given by their keys in the cache. Return a future for each of them: the object file,
    which is then in the cache too, or None if it was not compiled."""
    results: dict[bytes, Future[bytes | None]] = {key: Future() for key in sources}
    request = pickle.dumps((features, list(sources.values())))
    try:
        process = subprocess.Popen(
            module_line("smoe.kernels.ahead"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # a source that fails is compiled again, with its error, when it is needed
            cwd=WORKING_FOLDER,
            env=child_environment(),
        )
    except OSError:
        return {}
    threading.Thread(target=_receive, args=(process, request, results), name="smoe-compiling", daemon=True).start()
    return results


def result_of(future: Future[bytes | None]) -> bytes | None:
    """Wait for an object file. Return None if it was not compiled within a minute."""
    with contextlib.suppress(TimeoutError):
        return future.result(_SECONDS)
    return None


def _receive(process: subprocess.Popen[bytes], request: bytes, results: Mapping[bytes, Future[bytes | None]]) -> None:
    """Send the request, and store every object file in the cache as it arrives."""
    assert process.stdin is not None and process.stdout is not None, "both are pipes"
    with contextlib.suppress(OSError), process.stdin as requests:
        requests.write(request)
    for key, result in results.items():
        code = _received(process.stdout)
        if code is not None:
            object_cache.CODE.write(key, code)
        result.set_result(code)
    process.stdout.close()
    process.wait()


def _received(stream: IO[bytes]) -> bytes | None:
    """Return the next object file, or None if the other process has ended."""
    length = stream.read(_LENGTH_BYTES)
    if len(length) < _LENGTH_BYTES:
        return None
    count = int.from_bytes(length, "little")
    code = stream.read(count)
    return code if len(code) == count else None


def main() -> None:
    """Compile the sources that stdin contains, and write the object files to stdout."""
    import llvmlite.binding as llvm

    features, sources = pickle.load(sys.stdin.buffer)
    for source in sources:
        code = compiler.object_file(llvm, source.text(), features)
        sys.stdout.buffer.write(len(code).to_bytes(_LENGTH_BYTES, "little") + code)
        sys.stdout.buffer.flush()
