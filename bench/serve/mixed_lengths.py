"""Whether a server's memory stays what it is while prompts of mixed length come.

    python -m bench.serve.mixed_lengths [MODEL] [--requests 200] [--context 2048] [--clients 4] [--out FILE.json]

`smoe serve` runs in a process of its own; clients send prompts of 1 token up to as many as the context holds, each with
an answer of up to 32 tokens. Resident memory after the last request must be within 100 MiB of what it was after the
tenth. Ends with one JSON line, and with 1 where memory has grown by more.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench.serve.held import Held, held, quiet
from bench.serve.results import write
from bench.serve.server import running

MOST_GROWN_BYTES = 100 << 20
_FIRST = 10
"""Requests after which memory is to stay what it is."""
_MOST_NEW = 32
_ARENA_BYTES = 64 << 20
"""Where glibc's arenas begin: at multiples of so much."""


def main() -> None:
    options = _parse()
    dice = random.Random(options.seed)
    bodies = [_body(options, dice) for _ in range(options.requests)]
    words = ["--memory", options.memory, "--context", str(options.context), "--max-waiting", "64"]
    with running(options.model, options.sequences, words) as server:
        looks = []
        for begin in range(0, options.requests, _FIRST):
            with ThreadPoolExecutor(options.clients) as clients:
                list(clients.map(lambda body: _ask(server.port, body), bodies[begin : begin + _FIRST]))
            quiet(server.port)
            looks.append(_look(begin + _FIRST, server.pid))
    grown = looks[-1]["rss_bytes"] - looks[0]["rss_bytes"]
    outcome = {"grown_mib": round(grown / 2**20, 1), "bound_mib": MOST_GROWN_BYTES >> 20, "looks": looks}
    names = ("requests", "context", "clients", "sequences", "memory", "seed")
    write("serve.mixed_lengths", options, names, outcome)
    if grown > MOST_GROWN_BYTES:
        raise SystemExit(f"memory has grown by {grown / 2**20:.1f} MiB since the first {_FIRST} requests")


def _body(options: argparse.Namespace, dice: random.Random) -> dict[str, Any]:
    new = dice.randint(1, _MOST_NEW)
    length = min(options.context - new, int(2 ** dice.uniform(0.0, options.context.bit_length())))
    prompt = [dice.randrange(10, 1000) for _ in range(max(1, length))]
    return {"model": "served", "prompt": prompt, "max_tokens": new, "temperature": 0}


def _ask(port: int, body: dict[str, Any]) -> None:
    line = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    line.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = line.getresponse()
    text = answer.read().decode()
    line.close()
    if answer.status != 200:
        raise SystemExit(f"the server answers {answer.status}: {text[:300]}")


def _look(requests: int, pid: int) -> dict[str, Any]:
    now: Held = held(pid)
    arenas = _arenas(pid)
    return {"requests": requests, **now._asdict(), "arenas": len(arenas), "arena_bytes": sum(arenas)}


def _arenas(pid: int) -> list[int]:
    """Bytes in memory of each of glibc's arenas but the first; empty where the system does not say."""
    path = Path(f"/proc/{pid}/smaps")
    if not path.exists():
        return []
    found: list[int] = []
    is_arena = False
    for line in path.read_text().splitlines():
        if begins := re.match(r"([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ 0 *$", line):
            begin, end = (int(each, 16) for each in begins.groups())
            is_arena = begin % _ARENA_BYTES == 0 and end - begin <= _ARENA_BYTES
        elif re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            is_arena = False
        elif is_arena and line.startswith("Rss:"):
            found.append(int(line.split()[1]) << 10)
    return found


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--memory", default="200MiB")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
