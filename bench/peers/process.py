"""One process of an engine: inside a memory group, with what the kernel counts for it noted as its output comes."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from bench.peers.cgroup import MemoryCgroup
from bench.peers.conditions import set_priority
from bench.peers.worker import disk_bytes_read, memory_bytes

# The shell joins the group before it becomes the program: nothing the program allocates escapes the limit.
JOIN_AND_RUN = 'echo $$ > "$0" && exec "$@"'
TIMED_OUT = 124  # exit status, as of timeout(1)
CHUNK_BYTES = 1 << 16


@dataclass(frozen=True)
class Command:
    """What is started."""

    words: list[str]
    standard_input: str = ""


@dataclass(frozen=True)
class Chunk:
    """A piece of standard output, and what the kernel had counted for the process when it came."""

    text: str
    disk_bytes: int | None
    memory_bytes: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Finished:
    """A process that has ended."""

    status: int
    chunks: tuple[Chunk, ...]
    """The last one is empty: what had been counted when the process ended."""
    errors: str

    @property
    def output(self) -> str:
        """Standard output."""
        return "".join(chunk.text for chunk in self.chunks)


def run_process(
    command: Command,
    group: MemoryCgroup | None,
    folder: Path,
    environment: Mapping[str, str],
    nice: int,
    timeout_seconds: float,
) -> Finished:
    """Run `command` in a session of its own; killed with its children when its time is over."""
    words = command.words if group is None else ["sh", "-c", JOIN_AND_RUN, str(group.procs), *command.words]
    chunks: list[Chunk] = []
    errors: list[bytes] = []
    with _file_with(command.standard_input) as given, _started(words, given, folder, environment) as process:
        assert process.stdout and process.stderr
        readers = [
            threading.Thread(target=_read_chunks, args=(process.stdout, process.pid, chunks)),
            threading.Thread(target=_read_all, args=(process.stderr, errors)),
        ]
        for reader in readers:
            reader.start()
        try:
            if nice:
                set_priority(process.pid, nice)
            has_ended = _wait(process.pid, timeout_seconds)
            end = Chunk("", disk_bytes_read(process.pid))
        finally:
            os.killpg(process.pid, signal.SIGKILL)  # itself, and children that would keep its streams open
            for reader in readers:
                reader.join()
    if not has_ended:
        return Finished(TIMED_OUT, (), f"stopped after {timeout_seconds:.0f} s")
    return Finished(process.returncode, (*chunks, end), b"".join(errors).decode(errors="replace"))


def _wait(process_id: int, seconds: float) -> bool:
    """Whether the process ends in time. It is not taken off the kernel's table, which has its counts until then."""
    end = time.monotonic() + seconds
    while os.waitid(os.P_PID, process_id, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def _started(
    words: Sequence[str], given: IO[bytes], folder: Path, environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    pipe = subprocess.PIPE
    return subprocess.Popen(
        words, stdin=given, stdout=pipe, stderr=pipe, cwd=folder, env=environment, start_new_session=True
    )


@contextmanager
def _file_with(text: str) -> Iterator[IO[bytes]]:
    """A file to be read from its start: unlike a pipe, it need not be read at all."""
    with tempfile.TemporaryFile() as file:
        file.write(text.encode())
        file.seek(0)
        yield file


def _read_all(stream: IO[bytes], into: list[bytes]) -> None:
    into.append(stream.read())


def _read_chunks(stream: IO[bytes], process_id: int, chunks: list[Chunk]) -> None:
    while data := os.read(stream.fileno(), CHUNK_BYTES):
        chunks.append(Chunk(data.decode(errors="replace"), disk_bytes_read(process_id), memory_bytes(process_id)))
