"""Ten thousand requests that nobody would send on purpose, to a server of the embedded model.

    python -m bench.serve.fuzz [MODEL] [--requests 10000] [--seed 0] [--clients 3] [--out FILE.json]

Half of them are made of the server's own `/openapi.json`, by schemathesis (`odd_requests.py` says what kinds there
are). Every answer must be one that the description allows, come within a bound, and be no error of ours; what does not
fit the description on purpose must be refused. Afterwards the server must be healthy, with no text left, and within 2 %
of the memory that it held after a fifth of the requests (a thousand at least); what it keeps on purpose is filled
before (`filling.py`). Ends with one JSON line, and with 1 where something was found.
"""

from __future__ import annotations

import argparse
import http.client
import json
import math
import queue
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from schemathesis import checks
from schemathesis.core.failures import FailureGroup
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi import checks as of_openapi

from bench.serve.filling import fill
from bench.serve.held import MOST_GROWTH, Held, grown, held, memory_of, quiet, read, tell_criterion
from bench.serve.odd_requests import PATHS, Raw, heavy, odd_fields, raw, short, usual
from bench.serve.promises import Promises
from bench.serve.results import write
from bench.serve.server import running

BOUND_SECONDS = 60.0
"""A request that has no answer by then is stuck."""
_WARM = 0.2
"""Of the requests, those after which memory is to stay what it is: once every kind has come."""
_LOOKS = 20
_NOT_SENT = [
    "/watch",
    "/v1/embeddings",
    *(f"/api/{what}" for what in ("embed", "embeddings", "pull", "push", "create", "copy", "delete")),
]
"""Paths whose response never ends, or is always 501."""
_MOST_EVENTS = 100_000
_ALL = list(HealthCheck)
_PART = 1000
"""Requests that are made together: all kinds come in each."""
_CHECKS = [
    checks.not_a_server_error,
    of_openapi.status_code_conformance,
    of_openapi.content_type_conformance,
    of_openapi.response_headers_conformance,
    of_openapi.response_schema_conformance,
    of_openapi.negative_data_rejection,
]


class Found(NamedTuple):
    """Something that should not be."""

    kind: str
    what: str
    request: str


class Fuzz:
    """Of one server that runs."""

    def __init__(self, port: int, requests: int, number: int, clients: int = 1) -> None:
        """`number`: the seed."""
        self.found: list[Found] = []
        self.statuses: Counter[str] = Counter()
        self.slowest: tuple[float, str] = 0.0, ""
        """Seconds, and the request."""
        self.sent = 0
        self.stuck = 0
        """Requests without an answer within the bound."""
        self._port, self._requests, self._seed, self._clients = port, requests, number, clients
        document = json.loads(read(port, "/openapi.json"))
        self._promises = Promises(document)
        self._schema = schemathesis.openapi.from_dict(document)
        self._schema.config.max_stream_events = _MOST_EVENTS  # a stream is read to its end
        self._schema.hook(map_body)
        self._model = document["components"]["schemas"]["ChatAsked"]["properties"]["model"]["enum"][0]
        self._lock = threading.Lock()

    def run(self, look: Callable[[int], None] = lambda sent: None) -> None:
        """Send them all. `look` is called with the number of requests, now and then."""
        handed: queue.Queue[Any] = queue.Queue(2 * self._clients)
        every = max(1, self._requests // _LOOKS)

        def work() -> None:
            while (asked := handed.get()) is not None:
                self._send(asked)
                handed.task_done()
            handed.task_done()

        threads = [threading.Thread(target=work, daemon=True) for _ in range(self._clients)]
        for thread in threads:
            thread.start()

        def give(asked: Any) -> None:
            handed.put(asked)
            self.sent += 1
            if self.sent % every == 0:
                handed.join()
                look(self.sent)

        part, ways = 0, self._strategies()
        while self.sent < self._requests:
            for share, strategy in ways:
                part += 1
                most = min(self._requests - self.sent, math.ceil(share * min(self._requests, _PART)))
                _make(strategy, most, 1_000 * self._seed + part, give)
        for _ in threads:
            handed.put(None)
        for thread in threads:
            thread.join()

    @property
    def server_errors(self) -> int:
        """Answers of status 5xx; `found` says which."""
        return sum(count for each, count in self.statuses.items() if each.rpartition(": ")[2].startswith("5"))

    def _strategies(self) -> list[tuple[float, st.SearchStrategy[Any]]]:
        """Every kind, and its share; of the description mostly what can be asked of a model."""
        rest, asking = list[Any](), list[Any]()
        for result in self._schema.exclude(path=_NOT_SENT).get_all_operations():
            operation: Any = result.ok()  # type: ignore[union-attr]
            modes = [GenerationMode.POSITIVE]
            if operation.path in PATHS:
                modes.append(GenerationMode.NEGATIVE)
            ways = [operation.as_strategy(generation_mode=mode) for mode in modes]
            (asking if operation.path in PATHS else rest).extend(ways)
        ours = [odd_fields(self._model), usual(self._model), raw(self._model)]
        described = [(0.5 / len(asking), way) for way in asking]
        return [*described, (0.04, st.one_of(rest)), *((0.15, way) for way in ours), (0.01, heavy(self._model))]

    def _send(self, asked: Any) -> None:
        began = time.perf_counter()
        kind = asked.kind if isinstance(asked, Raw) else f"described, {asked.meta.generation.mode.value}"
        try:
            problem, status = self._raw(asked) if isinstance(asked, Raw) else self._case(asked)
        except TimeoutError as error:
            self.stuck += 1
            problem, status = f"no answer within {BOUND_SECONDS:g} s: {error}", 0
        except Exception as error:  # a line that breaks, or an answer that does not come, is a find
            problem, status = f"{type(error).__name__}: {error}", 0
        with self._lock:
            self.slowest = max(self.slowest, (time.perf_counter() - began, _told(asked)))
            self.statuses[f"{kind}: {status}"] += 1
            if problem is not None:
                self.found.append(Found(kind, problem[:2000], _told(asked)))

    def _raw(self, asked: Raw) -> tuple[str | None, int]:
        line = http.client.HTTPConnection("127.0.0.1", self._port, timeout=BOUND_SECONDS)
        try:
            line.request(asked.method, asked.path, asked.body, asked.headers)
            answer = line.getresponse()
            text = answer.read().decode()
        finally:
            line.close()
        path = asked.path.partition("?")[0]
        kind = answer.headers.get("content-type", "")
        return self._promises.broken_by(asked.method, path, answer.status, kind, text), answer.status

    def _case(self, case: Any) -> tuple[str | None, int]:
        answer = case.call(base_url=f"http://127.0.0.1:{self._port}", timeout=BOUND_SECONDS)
        kind = answer.headers.get("content-type", [""])[0]
        text = answer.content.decode() if answer.content else ""
        problem = self._promises.broken_by(case.method, case.path, answer.status_code, kind, text)
        try:
            case.validate_response(answer, checks=_CHECKS)
        except FailureGroup as group:
            problem = problem or "; ".join(f"{type(each).__name__}: {each}" for each in group.exceptions)
        return problem, answer.status_code


def _make(strategy: st.SearchStrategy[Any], most: int, number: int, give: Callable[[Any], None]) -> None:
    """Have so many requests made, by a seed, and given away."""
    if most < 1:
        return

    @seed(number)
    @settings(
        max_examples=most,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(asked=strategy)
    def hand(asked: Any) -> None:
        give(asked)

    hand()


def map_body(context: Any, body: Any) -> Any:
    """schemathesis's hook: few new tokens."""
    return short(context.operation.path, body)


def _told(asked: Any) -> str:
    """A request, so that it can be sent again."""
    if isinstance(asked, Raw):
        return repr(asked)[:1500]
    return f"{asked.method} {asked.path} {asked.path_parameters} {asked.body!r}"[:1500]


def main() -> None:
    options = _parse()
    looks: list[tuple[int, Held]] = []
    words = ["--memory", options.memory, "--context", str(options.context)]
    began = time.monotonic()
    with running(options.model, options.sequences, words) as server:
        fuzz = Fuzz(server.port, options.requests, options.seed, options.clients)
        fill(server.port, "served")

        def look(sent: int) -> None:
            quiet(server.port)
            looks.append((sent, held(server.pid)))
            print(f"{sent} sent, {len(fuzz.found)} found, {looks[-1][1]}", file=sys.stderr, flush=True)

        fuzz.run(look)
        left = quiet(server.port)
        health = read(server.port, "/health")
        code = server.end()
    first = max(_WARM * options.requests, min(_PART, options.requests))
    warm = next(each for sent, each in looks if sent >= first)
    growth = grown(warm, looks[-1][1])
    outcome = {
        "sent": fuzz.sent,
        "stuck": fuzz.stuck,
        "server_errors": fuzz.server_errors,
        "memory": memory_of(warm, looks[-1][1]),
        "seconds": round(time.monotonic() - began, 1),
        "statuses": dict(sorted(fuzz.statuses.items())),
        "slowest": {"seconds": round(fuzz.slowest[0], 3), "request": fuzz.slowest[1]},
        "found": [each._asdict() for each in fuzz.found],
        "left": {"running": left[0], "waiting": left[1]},
        "health": json.loads(health),
        "exit_code": code,
        "growth": {name: round(value, 5) for name, value in growth.items()},
        "looks": [{"sent": sent, **each._asdict()} for sent, each in looks],
    }
    write("serve.fuzz", options, ("requests", "seed", "clients", "memory", "context", "sequences"), outcome)
    tell_criterion(fuzz.sent, "requests", warm, looks[-1][1], fuzz.stuck + sum(left), fuzz.server_errors)
    if fuzz.found or left != (0, 0) or max(growth.values()) > MOST_GROWTH:
        raise SystemExit(1)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--clients", type=int, default=3)
    parser.add_argument("--memory", default="40MiB")
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
