"""Several clients at once, their prompts' time included: what all of them get, and what the unluckiest waits for."""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
from collections.abc import Sequence
from typing import Any

from bench.peers.binaries import binary
from bench.serve.beside import settings_of
from bench.serve.llama_server import VARIABLE, served_by_llama
from bench.serve.prompts import end_of, prompt_of
from bench.serve.server import Server, Stream, asked_together, served

CLIENTS = (1, 4, 8)
PROMPT_TOKENS = 140
NEW_TOKENS = 48


def clients(options: argparse.Namespace) -> dict[str, Any]:
    """By server and number of clients; llama.cpp's where the environment names it."""
    end = end_of(options.model)
    words = ["--memory", options.memory, "--context", str(options.context), *settings_of(options)]
    with served(options.model, max(CLIENTS), words, end) as server:
        found = {"smoe": _by_number(server, options.model)}
    if VARIABLE in os.environ:
        program = binary(VARIABLE, options.isa)
        with served_by_llama(program, options.model, max(CLIENTS), options.context, end) as server:
            found["llama.cpp"] = _by_number(server, options.model)
    return found


def _by_number(server: Server, model: str) -> dict[str, dict[str, float]]:
    """After a warm-up. Every prompt is another one: nothing is read that an earlier one left."""
    server.ask(prompt_of(model, 99, 24), 4)
    numbers = itertools.count()
    return {
        str(count): summary(
            asked_together(server, [prompt_of(model, next(numbers), PROMPT_TOKENS) for _ in range(count)], NEW_TOKENS)
        )
        for count in CLIENTS
    }


def summary(streams: Sequence[Stream]) -> dict[str, float]:
    """Of all answers, `NEW_TOKENS` each: what comes at once may be several tokens, where one alone is no text."""
    seconds = max(each.times[-1] for each in streams) - min(each.asked for each in streams)
    gaps = [after - before for each in streams for before, after in itertools.pairwise(each.times)]
    return {
        "tokens_per_second": len(streams) * NEW_TOKENS / seconds,
        "worst_first_token_seconds": max(each.times[0] - each.asked for each in streams),
        "median_gap_ms": 1e3 * statistics.median(gaps),
    }
