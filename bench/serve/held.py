"""What a server's process holds: memory, files, sockets, threads; and what it says of its texts."""

from __future__ import annotations

import http.client
import re
import sys
import time
from typing import Any, NamedTuple

import psutil

MOST_GROWTH = 0.02
"""Of memory, once it is warm."""
_QUIET_SECONDS = 60.0


class Held(NamedTuple):
    """At one moment."""

    rss_bytes: int
    own_bytes: int
    """Of that what no file is behind. Pages of libraries that others use as well are shared until those end: they would
    seem to have come then."""
    files: int
    sockets: int
    """Connections, the one that listens among them."""
    threads: int


def held(pid: int) -> Held:
    """Of a process and of those that it has started."""
    processes: list[Any] = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    memory = [each.memory_info() for each in processes]
    return Held(
        sum(each.rss for each in memory),
        sum(each.rss - getattr(each, "shared", 0) for each in memory),
        sum(each.num_fds() if psutil.POSIX else each.num_handles() for each in processes),
        sum(len(each.net_connections()) for each in processes),
        sum(each.num_threads() for each in processes),
    )


def grown(before: Held, after: Held) -> dict[str, float]:
    """By how much of what it was memory has grown: 0.01 is 1 %."""
    return {
        "rss": after.rss_bytes / before.rss_bytes - 1.0,
        "own": after.own_bytes / before.own_bytes - 1.0,
    }


def memory_of(before: Held, after: Held) -> dict[str, float]:
    """Of a result: memory at the start, once it is warm, and at the end."""
    start, end = before.rss_bytes / 2**20, after.rss_bytes / 2**20
    return {"start_mib": round(start, 1), "end_mib": round(end, 1), "growth": round(end / start - 1.0, 5)}


def tell_criterion(count: int, what: str, before: Held, after: Held, stuck: int, server_errors: int) -> None:
    """The figures that decide, in one line to stderr."""
    memory = memory_of(before, after)
    print(
        f"{count} {what}: memory {memory['start_mib']} MiB -> {memory['end_mib']} MiB ({memory['growth']:+.2%}, "
        f"bound {MOST_GROWTH:.0%}), {stuck} stuck, {server_errors} answers of status 5xx",
        file=sys.stderr,
        flush=True,
    )


def texts_of(port: int) -> tuple[int, int]:
    """Texts running and waiting, as the server itself says."""
    said = read(port, "/metrics")
    found = [re.search(rf"^smoe_texts_{name} (\S+)$", said, re.MULTILINE) for name in ("running", "waiting")]
    if None in found:
        raise ValueError("the server's /metrics do not say how many texts there are")
    running, waiting = (int(float(each[1])) for each in found if each is not None)
    return running, waiting


def quiet(port: int) -> tuple[int, int]:
    """Texts running and waiting, once there are none or a minute is over."""
    until = time.monotonic() + _QUIET_SECONDS
    while (left := texts_of(port)) != (0, 0) and time.monotonic() < until:
        time.sleep(0.05)
    return left


def read(port: int, path: str, seconds: float = 30.0) -> str:
    """What a path of a server on this machine says; raises `OSError` where it is not 200."""
    line = http.client.HTTPConnection("127.0.0.1", port, timeout=seconds)
    try:
        line.request("GET", path)
        answer = line.getresponse()
        text = answer.read().decode()
        if answer.status != 200:
            raise OSError(f"{path} says {answer.status}: {text[:200]}")
        return text
    finally:
        line.close()
