"""llama.cpp's server, which answers the same requests."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

from bench.serve.server import Server

VARIABLE = "SMOE_BENCH_LLAMA_SERVER"
"""Names `llama-server`; with _AVX2 at its end one that was built for AVX2 alone."""


def server_words(program: str, model: str, sequences: int, context: int, port: int) -> list[str]:
    """Its command line: as many sequences as ours at once, each with as much room."""
    words = [program, "-m", model, "-t", str(os.cpu_count()), "-np", str(sequences), "-c", str(sequences * context)]
    return [*words, "--host", "127.0.0.1", "--port", str(port)]


@contextmanager
def served_by_llama(program: str, model: str, sequences: int, context: int, end: int | None) -> Iterator[Server]:
    """Inside, it runs and is healthy; no answer has the token `end`."""
    port = _free_port()
    quiet = subprocess.DEVNULL
    with subprocess.Popen(
        server_words(program, model, sequences, context, port), stdout=quiet, stderr=quiet
    ) as process:
        try:
            server = Server(port, end)
            while not server.is_healthy():
                if process.poll() is not None:
                    raise SystemExit(f"{program} ended with status {process.returncode} before it was ready")
                time.sleep(0.05)
            yield server
        finally:
            process.kill()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
