"""Starts of a server as a whole process under a memory limit: the time until the first token, and the forecast.

    python -m bench.whole_size.starts FILE.gguf --limit 8GiB --rounds 3 [--isa avx2]

Each round starts `smoe serve` twice: with the file dropped from the page cache (cold), and with as much of it in the
page cache as fits (cached). A client asks for a text as soon as the server's port is open. All times are seconds from
the start of the process. `smoe plan` makes its forecast before each round, so those of later rounds are calibrated by
the runs before them. Before each start, scattered ranges of the file are read for a second past the page cache, which
gives the disk's rate at that time.
"""

from __future__ import annotations

import argparse
import http.client
import json
import mmap
import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench.peers.cgroup import MemoryCgroup, find_parent
from bench.peers.isa import VARIABLES
from bench.peers.process import JOIN_AND_RUN
from smoe.memory.expert_files import DiskReader
from smoe.memory.store import Read
from smoe.units import parse_bytes

PROMPT = "The people of the town walked to the river in the early morning and looked for the old boat there"
CONTEXT = "1024"
_BLOCK = 64 * 2**20
_REQUEST_BYTES = 2 * 2**20
"""The size of a read that measures the disk: about that of an expert."""
_READERS = 2
_DISK_SECONDS = 1.0
_LEAST_SECONDS = 0.02


def main() -> None:
    """Run the rounds, print a line for each start, and all of them as JSON in the last line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--limit", default="8GiB", help="memory of the whole process, page cache included")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--new", type=int, default=32, help="tokens to write")
    parser.add_argument("--isa", choices=("native", "avx2"), default="native")
    parser.add_argument("--timeout", type=float, default=600.0)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of the server")
    given = parser.parse_args()
    found: list[dict[str, Any]] = []
    for number in range(given.rounds):
        forecast = plan(given)
        for state in ("cold", "cached"):
            rate = disk_rate(given.model)
            prepare(given.model, state)
            start = one_start(given) | {"round": number, "state": state, "forecast": forecast, "disk_rate": rate}
            found.append(start)
            print(line(start), flush=True)
    print(json.dumps({"conditions": conditions(given), "starts": found}))


def plan(given: argparse.Namespace) -> dict[str, Any]:
    """Return the forecast of `smoe plan` for the limit, and the CPU seconds that it took. The command runs under the
    limit, too: on a machine with more memory, a run could copy experts from the page cache."""
    before = os.times()
    words = [sys.executable, "-m", "smoe", "plan", str(given.model), "--process-memory", given.limit, "--json"]
    words += ["--context", CONTEXT]
    with MemoryCgroup(find_parent(), parse_bytes(given.limit, "--limit")) as group:
        shell = ["sh", "-c", JOIN_AND_RUN, str(group.procs), *words]
        ended = subprocess.run(shell, env=environment(given), capture_output=True, text=True, check=True)
    after, said = os.times(), json.loads(ended.stdout)["forecast"]
    names = ["tokens_per_second", "first_tokens_per_second", "tokens_per_second_range", "ttft_seconds"]
    names += ["first_pass_seconds", "is_calibrated"]
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return {name: said.get(name) for name in names} | {"plan_cpu_seconds": cpu}


def disk_rate(path: Path) -> float:
    """Return the rate of direct reads of scattered ranges of a file, in bytes per second."""
    reader, ranges = DiskReader(direct=True), path.stat().st_size // _REQUEST_BYTES
    started = time.perf_counter()

    def read_some(thread: int) -> int:
        buffer, came = memoryview(mmap.mmap(-1, _REQUEST_BYTES)), 0
        for n in range(thread, ranges, _READERS):
            came += reader.read(
                Read(path, n * 7919 % ranges * _REQUEST_BYTES, _REQUEST_BYTES, 0, _REQUEST_BYTES), buffer
            )
            if time.perf_counter() > started + _DISK_SECONDS:
                break
        return came

    try:
        with ThreadPoolExecutor(_READERS) as pool:
            came = sum(pool.map(read_some, range(_READERS)))
        return came / (time.perf_counter() - started)
    finally:
        reader.close()


def bytes_read_by(process: int) -> int:
    """Return the bytes that a process has read from storage until now."""
    rows = dict(row.split(": ") for row in Path(f"/proc/{process}/io").read_text().splitlines())
    return int(rows["read_bytes"])


def prepare(path: Path, state: str) -> None:
    """Drop the file from the page cache; for `cached`, read it once then."""
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    if state == "cached":
        while os.read(descriptor, _BLOCK):
            pass
    os.close(descriptor)


def one_start(given: argparse.Namespace, prompt: str = PROMPT) -> dict[str, Any]:
    """Start a server in a memory group, ask it for a text after `prompt`, and end it."""
    port, limit = free_port(), parse_bytes(given.limit, "--limit")
    words = [sys.executable, "-m", "smoe", "serve", str(given.model), "--process-memory", given.limit]
    words += ["--name", "any", "--port", str(port), "--max-sequences", "1", "--context", CONTEXT]
    words += [word for setting in given.set for word in ("--set", setting)]
    with MemoryCgroup(find_parent(), limit) as group:
        started = time.perf_counter()
        shell = ["sh", "-c", JOIN_AND_RUN, str(group.procs), *words]
        server = subprocess.Popen(shell, env=environment(given), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        try:
            opened = wait_for_port(server, port, started + given.timeout)
            times, read = ask(port, given, prompt, server.pid)
        finally:
            server.terminate()
            errors = server.communicate()[1].decode()[-2000:]
        peak = group.peak_bytes()
    if not times:
        raise SystemExit(f"the server wrote no token: {errors}")
    decoding = times[-1] - times[0]
    return {
        "open_seconds": opened - started,
        "first_token_seconds": times[0] - started,
        "first_token_bytes": read,
        "tokens": len(times),
        "tokens_per_second": (len(times) - 1) / decoding if decoding else None,
        "peak_bytes": peak,
    }


def ask(port: int, given: argparse.Namespace, prompt: str, server: int) -> tuple[list[float], int]:
    """Return the times at which the tokens of a streamed text came, and the bytes that the process `server` had read
    from storage when the first one came."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=given.timeout)
    body = {"model": "any", "prompt": prompt, "max_tokens": given.new, "temperature": 0, "stream": True}
    body |= {"ignore_eos": True}
    read: int | None = None
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer, times = connection.getresponse(), list[float]()
    if answer.status != 200:
        raise SystemExit(f"status {answer.status}: {answer.read().decode()}")
    for row in iter(answer.readline, b""):
        if row.startswith(b"data: {") and json.loads(row[6:]).get("choices"):
            times.append(time.perf_counter())
            read = bytes_read_by(server) if read is None else read
    connection.close()
    return times, read or 0


def wait_for_port(server: subprocess.Popen[bytes], port: int, deadline: float) -> float:
    """Return the time at which the server answers that it is healthy."""
    while time.perf_counter() < deadline:
        if server.poll() is not None:
            raise SystemExit(f"the server ended: {server.communicate()[1].decode()[-2000:]}")
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return time.perf_counter()
        except OSError:
            pass
        time.sleep(_LEAST_SECONDS)
    raise SystemExit("the server did not open its port in time")


def free_port() -> int:
    """Return a port that no program uses now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def environment(given: argparse.Namespace) -> dict[str, str]:
    return os.environ | VARIABLES[given.isa]


def line(start: dict[str, Any]) -> str:
    """Return one start as a line of text."""
    rate, forecast = start["tokens_per_second"], start["forecast"]
    return (
        f"round {start['round']} {start['state']:6}: open {start['open_seconds']:5.1f} s, first token "
        f"{start['first_token_seconds']:5.1f} s after {start['first_token_bytes'] / 1e9:.1f} GB from a disk of "
        f"{start['disk_rate'] / 1e9:.2f} GB/s, {rate:.2f} tokens/s, peak {start['peak_bytes'] / 2**30:.2f} GiB; "
        f"forecast {forecast['first_tokens_per_second']:.2f} tokens/s, calibrated: {forecast['is_calibrated']}"
    )


def conditions(given: argparse.Namespace) -> dict[str, Any]:
    """Return the machine and the settings."""
    text = Path("/proc/cpuinfo").read_text()
    names = [row.partition(":")[2].strip() for row in text.splitlines() if row.startswith("model name")]
    flags = next((row.partition(":")[2].split() for row in text.splitlines() if row.startswith("flags")), [])
    asked = {name: getattr(given, name) for name in ("limit", "isa", "new", "set")}
    machine = {"cpu": names[:1], "cores": len(names), "flags": [f for f in flags if f.startswith(("avx", "amx"))]}
    return {"model": given.model.name, "prompt": PROMPT} | asked | machine


if __name__ == "__main__":
    main()
