"""An hour of clients who come and go: does a text go on for nobody, does anybody wait for ever, does memory grow?

    python -m bench.serve.soak MODEL [--minutes 60] [--clients 8] [--seed 0] [--memory 40MiB] [--out FILE.json]

`smoe serve` runs in a process of its own; threads of this one visit it (`visitors.py`), each again and again, in ways
that dice choose. Every minute its memory, files, sockets and threads are noted, its texts, and whether the likeliest
text after a prompt that is always the same is what it was before anybody else came. Afterwards there must be no text
left, no visit that got no answer, no error of the server's own, the same text, as many files, sockets and threads as
before, and memory within 2 % of what it was after the first minutes. Ends with one JSON line, and with 1 where
something was found.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from bench.serve.filling import fill
from bench.serve.held import MOST_GROWTH, Held, grown, held, memory_of, quiet, read, tell_criterion, texts_of
from bench.serve.prompts import TEXT
from bench.serve.results import write
from bench.serve.server import running
from bench.serve.visitors import BOUND_SECONDS, ServerError, StuckError, VisitError, Visitor

_CLOSED_SECONDS = 40.0
"""For lines that nobody uses to be closed: the server keeps them for 30."""
_LIMITS = ("--head-timeout", "2", "--body-timeout", "3", "--unread-timeout", "3")
"""So that the server ends connections that stall, and not only their clients do."""
_COUNTED = ("files", "sockets", "threads")
"""What there must not be more of."""


class Soak:
    """Of one server that runs."""

    def __init__(self, port: int, pid: int, model: str, clients: int, number: int) -> None:
        """`number`: the seed."""
        self.found: list[dict[str, str]] = []
        self.visits: Counter[str] = Counter()
        self.looks: list[dict[str, Any]] = []
        self.stuck = self.server_errors = 0
        self.health_seconds = 0.0
        """The longest that an answer to /health has taken."""
        self._port, self._pid, self._model, self._seed = port, pid, model, number
        self._context = json.loads(read(port, "/v1/models"))["data"][0]["max_model_len"]
        self._is_over, self._lock = threading.Event(), threading.Lock()
        self._threads = [threading.Thread(target=self._come_again, args=(n,), daemon=True) for n in range(clients)]
        self.first = self.visitor(-1).greedy()
        self.before = held(pid)

    def run(self, seconds: float, every: float, tell: Callable[[dict[str, Any]], None] = lambda look: None) -> None:
        """Have them come for so long; look at the server every so many seconds, and tell of it."""
        began = time.monotonic()
        for thread in self._threads:
            thread.start()
        while (now := time.monotonic() - began) < seconds:
            time.sleep(min(every, seconds - now))
            tell(self._look(time.monotonic() - began))
        self._is_over.set()
        for thread in self._threads:
            thread.join(2 * BOUND_SECONDS)
            if thread.is_alive():
                self._find("a client", "is stuck")
                self.stuck += 1

    def end(self) -> dict[str, Any]:
        """Once all have gone: how things stand."""
        left = quiet(self._port)
        until = time.monotonic() + _CLOSED_SECONDS
        while self._has_more(after := held(self._pid)) and time.monotonic() < until:  # a file may be read just now
            time.sleep(0.5)
        last = self.visitor(-1).greedy()
        return {
            "left": {"running": left[0], "waiting": left[1]},
            "before": self.before._asdict(),
            "after": after._asdict(),
            "is_text_equal": last == self.first and all(look["is_text_equal"] for look in self.looks),
        }

    def _has_more(self, now: Held) -> bool:
        """More lines, files or threads than at first."""
        return any(getattr(now, name) > getattr(self.before, name) for name in _COUNTED)

    def problems(self, ended: dict[str, Any], growth: dict[str, float]) -> list[str]:
        """What of it should not be, in words; none where all is well."""
        after, before = ended["after"], ended["before"]
        told = [f"{each['visit']}: {each['what']}" for each in self.found]
        told += [f"{name} has grown by {share:.1%}" for name, share in growth.items() if abs(share) > MOST_GROWTH]
        told += [f"{each} {name} are left" for name, each in ended["left"].items() if each]
        told += [] if ended["is_text_equal"] else ["the same prompt had another text"]
        return told + [
            f"{after[name]} {name} afterwards, {before[name]} before" for name in _COUNTED if after[name] > before[name]
        ]

    def visitor(self, number: int) -> Visitor:
        """One of those who come."""
        dice = random.Random(f"{self._seed}, {number}")
        return Visitor(self._port, self._model, TEXT, self._context, dice)

    def come(self, visitor: Visitor, visit: str) -> str:
        """One visit, and what came of it."""
        try:
            came = visitor.visit(visit)
        except VisitError as error:
            came = "wrong"
            self._find(visit, str(error))
            self.stuck += isinstance(error, StuckError)
            self.server_errors += isinstance(error, ServerError)
        with self._lock:
            self.visits[f"{visit}: {came}"] += 1
            self.health_seconds = max(self.health_seconds, visitor.health_seconds)
        return came

    def _come_again(self, number: int) -> None:
        visitor, dice = self.visitor(number), random.Random(f"{self._seed}, which, {number}")
        while not self._is_over.is_set():
            self.come(visitor, dice.choice(Visitor.VISITS))

    def _find(self, visit: str, what: str) -> None:
        with self._lock:
            self.found.append({"visit": visit, "what": what})
        print(f"{visit}: {what}", file=sys.stderr, flush=True)

    def _look(self, seconds: float) -> dict[str, Any]:
        texts = texts_of(self._port)
        now: Held = held(self._pid)
        text = None
        while text is None:  # there may be no room for one more
            text = self.visitor(-1).greedy()
        look = {"seconds": round(seconds, 1), **now._asdict(), "running": texts[0], "waiting": texts[1]}
        with self._lock:
            look |= {"visits": sum(self.visits.values()), "is_text_equal": text == self.first}
        self.looks.append(look)
        return look


def main() -> None:
    options = _parse()
    words = ["--memory", options.memory, "--context", str(options.context), "--max-waiting", str(options.waiting)]
    words += [*_LIMITS, "--max-connections", str(options.connections)]
    with running(options.model, options.sequences, words) as server:
        fill(server.port, "served")
        soak = Soak(server.port, server.pid, "served", options.clients, options.seed)
        try:
            with suppress(KeyboardInterrupt):
                soak.run(60 * options.minutes, options.every, lambda look: print(json.dumps(look), file=sys.stderr))
            ended = soak.end()
        except OSError as error:
            raise SystemExit(f"the server is gone ({error}); its last words:\n{''.join(server.said)}") from error
        code = server.end()
    warm = next((look for look in soak.looks if look["seconds"] >= 60 * options.warm_minutes), soak.looks[-1])
    before, after = Held(*(warm[name] for name in Held._fields)), Held(**ended["after"])
    growth = grown(before, after)
    problems = soak.problems(ended, growth)
    outcome = {
        **ended,
        "memory": memory_of(before, after),
        "stuck": soak.stuck,
        "server_errors": soak.server_errors,
        "slowest_health_seconds": round(soak.health_seconds, 3),
        "growth": {name: round(value, 5) for name, value in growth.items()},
        "exit_code": code,
        "problems": problems,
        "visits": dict(sorted(soak.visits.items())),
        "looks": soak.looks,
    }
    names = ("minutes", "warm_minutes", "clients", "seed", "memory", "context", "sequences", "waiting", "connections")
    write("serve.soak", options, names, outcome)
    stuck = soak.stuck + sum(ended["left"].values())
    tell_criterion(sum(soak.visits.values()), "visits", before, after, stuck, soak.server_errors)
    if problems:
        raise SystemExit("\n".join(problems))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a folder, or demo")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--warm-minutes", type=float, default=5.0, help="after which memory is to stay what it is")
    parser.add_argument("--every", type=float, default=60.0, metavar="SECONDS", help="look at the server")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--memory", default="40MiB")
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--waiting", type=int, default=16)
    parser.add_argument("--connections", type=int, default=64)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
