"""How long `/health` takes while one costly body after the other is read.

    python -m bench.serve.health [MODEL] [--rounds 5] [--out FILE.json]

`smoe serve` runs in a process of its own, another process asks for `/health` every 2 ms, and this one sends every kind
of `heavy_bodies.py`, and a body in chunks of one byte. Of each, the longest answer to `/health` in each round: the
median is the server's, the largest often a pause of the machine. Ends with one JSON line, and with 1 where a median is
above 100 ms.
"""

from __future__ import annotations

import argparse
import http.client
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from bench.serve.heavy_bodies import HEAVY, heavy_body
from bench.serve.results import write
from bench.serve.server import running

MOST_SECONDS = 0.1
_SIZES = (4_193_280, 1_400_000)
"""Bytes: as many as are read, and about as many as are not refused for their number of values."""
_ASKS = """
import http.client, sys, time
line = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]), timeout=60)
while True:
    began = time.perf_counter()
    line.request("GET", "/health")
    line.getresponse().read()
    print(time.perf_counter() - began, flush=True)
    time.sleep(0.002)
"""


def main() -> None:
    options = _parse()
    with running(options.model, 4, ["--memory", options.memory, "--context", "512"]) as server:
        asker = subprocess.Popen([sys.executable, "-c", _ASKS, str(server.port)], stdout=subprocess.PIPE, text=True)
        seconds = list[float]()
        threading.Thread(target=_collect, args=(asker, seconds), daemon=True).start()
        try:
            _wait_for(seconds)
            found = {
                name: _slowest(server.port, options.rounds, seconds, path, body, is_chunked)
                for name, path, body, is_chunked in _bodies()
            }
        finally:
            asker.kill()
    slow = [name for name, each in found.items() if each["median_seconds"] > MOST_SECONDS]
    write("serve.health", options, ("rounds", "memory"), {"bodies": found, "above_the_bound": slow})
    if slow:
        raise SystemExit(f"/health takes more than {MOST_SECONDS:g} s while it reads: {', '.join(slow)}")


def _bodies() -> Iterator[tuple[str, str, bytes, bool]]:
    """A name, a path, a body, and whether it is sent in chunks of one byte."""
    for kind in HEAVY:
        for nbytes in _SIZES:
            yield f"{kind}, {nbytes} bytes", *heavy_body(kind, "served", nbytes), False
    yield "chunks of one byte", "/v1/completions", b'{"prompt": "' + b"w" * 300_000 + b'"}', True


def _slowest(
    port: int, rounds: int, seconds: list[float], path: str, body: bytes, is_chunked: bool
) -> dict[str, float]:
    """The longest answer in each round."""
    found = []
    for _ in range(rounds):
        seconds.clear()
        _send(port, path, body, is_chunked)
        _wait_for(seconds)
        found.append(max(seconds))
    return {"median_seconds": round(statistics.median(found), 4), "most_seconds": round(max(found), 4)}


def _send(port: int, path: str, body: bytes, is_chunked: bool) -> None:
    line = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    if is_chunked:
        line.putrequest("POST", path)
        line.putheader("Content-Type", "application/json")
        line.putheader("Transfer-Encoding", "chunked")
        line.endheaders(b"".join(b"1\r\n%c\r\n" % each for each in body) + b"0\r\n\r\n")
    else:
        line.request("POST", path, body, {"Content-Type": "application/json"})
    line.getresponse().read()
    line.close()


def _collect(asker: subprocess.Popen[str], seconds: list[float]) -> None:
    assert asker.stdout is not None
    for line in asker.stdout:
        seconds.append(float(line))


def _wait_for(seconds: list[float]) -> None:
    """For an answer that came after the last body was read."""
    count = len(seconds)
    while len(seconds) < count + 3:
        time.sleep(0.01)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--memory", default="40MiB")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
