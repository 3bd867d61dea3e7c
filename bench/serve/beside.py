"""What serving is set beside: the engine without HTTP, in processes of its own."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from bench.serve.prompts import prompt_of


def rate(times: Sequence[Sequence[float]]) -> float:
    """Tokens a second of all of them, from when the last one has begun until the first one ends."""
    begin, end = max(each[0] for each in times), min(each[-1] for each in times)
    return sum(begin < at <= end for each in times for at in each) / (end - begin)


def by_engine(options: argparse.Namespace, more: Sequence[str]) -> dict[str, dict[str, float]]:
    """{way: {clients: tokens a second}} in a process of its own."""
    words = [options.model, "--memory", options.memory, "--context", str(options.context), "--here", *more]
    words += settings_of(options)
    done = subprocess.run([sys.executable, "-m", "bench.serve", *words], stdout=subprocess.PIPE, text=True, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def here(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """The library's loop on a batch, and ours on as many requests."""
    from smoe.generation.generate import encode
    from smoe.generation.library_batch import pad
    from smoe.generation.library_settings import pad_token
    from smoe.generation.loop import DecodeLoop
    from smoe.generation.request import End, Piece, Request
    from smoe.generation.sampling_settings import Sampling
    from smoe.load.pretrained import load
    from smoe.models.checkpoint import whole_checkpoint
    from smoe.presets import configure
    from smoe.units import parse_bytes

    counts = [int(each) for each in options.clients.split(",")]
    settings = dict(each.split("=", 1) for each in options.set)
    given: dict[str, Any] = {name: int(value) if value.isdigit() else value for name, value in settings.items()}
    memory = parse_bytes(options.memory, "memory")
    config = configure(memory_bytes=memory, context_tokens=options.context, max_sequences=max(counts), **given)
    model, tokenizer = load(options.model, config), whole_checkpoint(options.model, None).tokenizer()
    sampling = Sampling(max_new_tokens=options.new_tokens, ignores_end=True)
    found: dict[str, dict[str, float]] = {"library": {}, "loop": {}}
    for count in counts:
        prompts = encode(tokenizer, [prompt_of(options.model, n, 24) for n in range(count)])
        times: list[list[float]] = [[] for _ in prompts]

        def on_event(what: Piece | End, into: list[float]) -> None:
            if isinstance(what, Piece):
                into.append(time.perf_counter())

        loop = DecodeLoop(model, tokenizer)
        for prompt, into in zip(prompts, times, strict=True):
            loop.hand_in(Request(prompt, sampling, lambda what, into=into: on_event(what, into)))  # type: ignore[misc]
        loop.run(until_idle=True)
        found["loop"][str(count)] = rate(times)
        if count > 1:
            batch = pad(prompts, pad_token(tokenizer))
            found["library"][str(count)] = _library_rate(model, tokenizer, batch, sampling)
        else:
            found["library"][str(count)] = found["loop"][str(count)]
    model.offload.close()
    return found


def _library_rate(model: Any, tokenizer: Any, batch: Any, sampling: Any) -> float:
    """Of the library's loop: what 48 tokens take more than 16."""
    from dataclasses import replace

    from smoe.generation.library_batch import continue_batch

    def seconds(tokens: int) -> float:
        began = time.perf_counter()
        continue_batch(model, tokenizer, batch, replace(sampling, max_new_tokens=tokens))
        return time.perf_counter() - began

    short, long = seconds(16), seconds(sampling.max_new_tokens)
    return float(len(batch.input_ids) * (sampling.max_new_tokens - 16) / (long - short))


def settings_of(options: argparse.Namespace) -> list[str]:
    return [word for each in options.set for word in ("--set", each)]
