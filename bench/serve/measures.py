"""What is measured: speed, overhead, gaps, a follow-up."""

from __future__ import annotations

import argparse
import itertools
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from bench.serve.beside import by_engine, rate, settings_of
from bench.serve.clients import clients
from bench.serve.prompts import end_of, prompt_of
from bench.serve.server import Server, Stream, asked_together, served

NEW_TOKENS = 64
_CLIENTS = (1, 4, 8)


def _speed(options: argparse.Namespace) -> dict[str, Any]:
    """New tokens a second, by who makes them and for how many."""
    ours = {}
    with _served(options) as server:
        for clients in _CLIENTS:
            streams = asked_together(server, [prompt_of(options.model, n, 24) for n in range(clients)], NEW_TOKENS + 24)
            ours[clients] = rate([each.times for each in streams])
    alone = by_engine(options, ["--clients", ",".join(map(str, _CLIENTS))])
    return {
        str(clients): {"served": ours[clients], **{name: rates[str(clients)] for name, rates in alone.items()}}
        for clients in _CLIENTS
    }


def _overhead(options: argparse.Namespace) -> dict[str, float]:
    """Median milliseconds a token of one client."""
    with _served(options, sequences=1) as server:
        ours = [_between(server.ask(prompt_of(options.model, n, 24), 2 * NEW_TOKENS).times) for n in range(3)]
        with server.watched() as is_there:
            watched = (
                [_between(server.ask(prompt_of(options.model, n, 24), 2 * NEW_TOKENS).times) for n in range(3)]
                if is_there
                else []
            )
    alone = by_engine(options, ["--clients", "1", "--new-tokens", str(2 * NEW_TOKENS)])
    return {
        "served_ms": statistics.median(ours),
        **({"watched_ms": statistics.median(watched)} if watched else {}),
        "loop_ms": 1e3 / alone["loop"]["1"],
    }


def _gaps(options: argparse.Namespace) -> dict[str, float]:
    """Milliseconds between one client's tokens: before, and while another one's prompt is read."""
    with _served(options) as server:
        server.ask(prompt_of(options.model, 0, 24), 8)
        first = Stream()
        thread = threading.Thread(target=server.ask, args=(prompt_of(options.model, 1, 24), 400, first))
        thread.start()
        while len(first.times) < 100:
            time.sleep(0.005)
        second = server.ask(prompt_of(options.model, 2, 512), 1)
        while thread.is_alive() and len(first.times) < 240:
            time.sleep(0.005)
        first.is_given_up = True
        thread.join()
    gaps = [(at, 1e3 * (at - before)) for before, at in itertools.pairwise(first.times)]
    before = [gap for at, gap in gaps if at < second.asked][-90:]
    while_read = [gap for at, gap in gaps if at >= second.asked and at - gap / 1e3 <= second.times[0]]
    all_of_it = [gap for at, gap in gaps if at >= second.asked - 1.0][:140]
    return {
        "before_median_ms": statistics.median(before),
        "before_p95_ms": _p95(before),
        "while_read_median_ms": statistics.median(while_read),
        "while_read_p95_ms": _p95(while_read),
        "while_read_worst_ms": max(while_read),
        "while_read_gaps": float(len(while_read)),
        "of_140_p95_ms": _p95(all_of_it),
        "prompt_seconds": second.times[0] - second.asked,
    }


def _follow_up(options: argparse.Namespace) -> dict[str, float]:
    """Seconds to the first token: of a prompt that leaves 120 tokens of the context, of its conversation gone on with,
    of as long a text."""
    length = options.context - 120
    with _served(options, sequences=1) as server:
        server.ask(prompt_of(options.model, 9, 24), 4)
        prompt = prompt_of(options.model, 3, length)
        first = server.ask(prompt, 16)
        more = server.ask(prompt + first.text + prompt_of(options.model, 4, 20), 4)
        whole = server.ask(prompt_of(options.model, 5, length + 36), 4)
    waits = [each.times[0] - each.asked for each in (first, more, whole)]
    return dict(zip(("first_seconds", "follow_up_seconds", "whole_seconds"), waits, strict=True))


MEASURES: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "speed": _speed,
    "overhead": _overhead,
    "gaps": _gaps,
    "follow-up": _follow_up,
    "clients": clients,
}


def _between(times: Sequence[float]) -> float:
    return 1e3 * statistics.median(after - before for before, after in itertools.pairwise(times))


def _p95(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]


def _served(options: argparse.Namespace, sequences: int = 8) -> AbstractContextManager[Server]:
    words = ["--memory", options.memory, "--context", str(options.context), *settings_of(options)]
    return served(options.model, sequences, words, end_of(options.model))
