"""What serving costs beside the engine, and what clients notice of each other.

    python -m bench.serve MODEL [--memory 9GiB] [--parts speed,overhead,gaps,follow-up] [--rounds 3] [--out FILE.json]

`smoe serve` runs in a process of its own and is asked over HTTP, by threads that read streams; what it is set beside
runs in processes of their own too (`--here`), in turns, round by round.

    speed      1, 4 and 8 clients: new tokens a second while all of them are answered, beside the engine's own batches:
               the library's loop with as many rows, and our decode loop without HTTP
    overhead   one client: milliseconds a token beside the decode loop without HTTP, and with the page's feed open
    gaps       one client's times between tokens while another one's prompt of 512 tokens is read
    follow-up  time to the first token of 20 more tokens after nearly a context's, beside reading all
"""

from __future__ import annotations

import argparse
import functools
import http.client
import itertools
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

TEXT = Path(__file__).with_name("text.txt").read_text()
NEW_TOKENS = 64
PARTS = ("speed", "overhead", "gaps", "follow-up")
_CLIENTS = (1, 4, 8)
_LOADING_SECONDS = 300.0


def main() -> None:
    options = _parse()
    if options.here:
        print(json.dumps(_here(options)))
        return
    found: dict[str, list[Any]] = {part: [] for part in options.parts.split(",")}
    for number in range(options.rounds):
        for part in found:
            found[part].append(_MEASURES[part](options))
            print(f"round {number + 1}, {part}: {json.dumps(found[part][-1])}", file=sys.stderr, flush=True)
    _finish(options, found)


# -- parts ------------------------------------------------------------------------------------------------------------


def _speed(options: argparse.Namespace) -> dict[str, Any]:
    """New tokens a second, by who makes them and for how many."""
    ours = {}
    with served(options) as server:
        for clients in _CLIENTS:
            streams = _together(server, [_prompt(options, n, 24) for n in range(clients)], NEW_TOKENS)
            ours[clients] = _rate([each.times for each in streams])
    alone = _by_engine(options, ["--clients", ",".join(map(str, _CLIENTS))])
    return {
        str(clients): {"served": ours[clients], **{name: rates[str(clients)] for name, rates in alone.items()}}
        for clients in _CLIENTS
    }


def _overhead(options: argparse.Namespace) -> dict[str, float]:
    """Median milliseconds a token of one client."""
    with served(options, sequences=1) as server:
        ours = [_between(server.ask(_prompt(options, n, 24), 2 * NEW_TOKENS).times) for n in range(3)]
        with server.watched() as is_there:
            watched = (
                [_between(server.ask(_prompt(options, n, 24), 2 * NEW_TOKENS).times) for n in range(3)]
                if is_there
                else []
            )
    alone = _by_engine(options, ["--clients", "1", "--new-tokens", str(2 * NEW_TOKENS)])
    return {
        "served_ms": statistics.median(ours),
        **({"watched_ms": statistics.median(watched)} if watched else {}),
        "loop_ms": 1e3 / alone["loop"]["1"],
    }


def _gaps(options: argparse.Namespace) -> dict[str, float]:
    """Milliseconds between one client's tokens: before, and while another one's prompt is read."""
    with served(options) as server:
        server.ask(_prompt(options, 0, 24), 8)
        first = Stream()
        thread = threading.Thread(target=server.ask, args=(_prompt(options, 1, 24), 400, first))
        thread.start()
        while len(first.times) < 100:
            time.sleep(0.005)
        second = server.ask(_prompt(options, 2, 512), 1)
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
    with served(options, sequences=1) as server:
        server.ask(_prompt(options, 9, 24), 4)
        prompt = _prompt(options, 3, length)
        first = server.ask(prompt, 16)
        more = server.ask(prompt + first.text + _prompt(options, 4, 20), 4)
        whole = server.ask(_prompt(options, 5, length + 36), 4)
    waits = [each.times[0] - each.asked for each in (first, more, whole)]
    return dict(zip(("first_seconds", "follow_up_seconds", "whole_seconds"), waits, strict=True))


_MEASURES: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "speed": _speed,
    "overhead": _overhead,
    "gaps": _gaps,
    "follow-up": _follow_up,
}


def _rate(times: Sequence[Sequence[float]]) -> float:
    """Tokens a second of all of them, from when the last one has begun until the first one ends."""
    begin, end = max(each[0] for each in times), min(each[-1] for each in times)
    return sum(begin < at <= end for each in times for at in each) / (end - begin)


def _between(times: Sequence[float]) -> float:
    return 1e3 * statistics.median(after - before for before, after in itertools.pairwise(times))


def _p95(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]


def _prompt(options: argparse.Namespace, number: int, tokens: int) -> str:
    """A piece of a text, of so many tokens or hardly fewer, that no other one begins like."""
    tokenizer, ids = _tokenizer(options.model)
    begin = (number * 211) % (len(ids) // 2)
    text: str = tokenizer.decode((ids[begin:] * 8)[:tokens])
    return text


@functools.cache
def _tokenizer(model: str) -> tuple[Any, list[int]]:
    from smoe.models.checkpoint import whole_checkpoint

    tokenizer = whole_checkpoint(model, None).tokenizer()
    return tokenizer, list(tokenizer(TEXT, add_special_tokens=False)["input_ids"])


# -- the server, over HTTP --------------------------------------------------------------------------------------------


class Stream:
    """An answer as it came."""

    def __init__(self) -> None:
        self.asked = 0.0
        self.times: list[float] = []
        """When each token was there."""
        self.text = ""
        self.is_given_up = False


class Server:
    """A server that runs, and what it is asked."""

    def __init__(self, port: int, end: int | None) -> None:
        self._port = port
        self._never = {} if end is None else {"logit_bias": {str(end): -100}}

    def ask(self, prompt: str, tokens: int, into: Stream | None = None) -> Stream:
        """Stream an answer of so many tokens; until it is given up."""
        stream = into or Stream()
        body = {"model": "served", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True}
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=600)
        headers = {"Content-Type": "application/json"}
        stream.asked = time.perf_counter()
        connection.request("POST", "/v1/completions", json.dumps(body | self._never), headers)
        answer = connection.getresponse()
        if answer.status != 200:
            raise SystemExit(f"the server says {answer.status}: {answer.read().decode()}")
        for line in iter(answer.readline, b""):
            if stream.is_given_up:
                break
            if line.startswith(b"data: {"):
                stream.times.append(time.perf_counter())
                said = json.loads(line[6:])
                if "error" in said:
                    raise SystemExit(f"the server says: {said['error']}")
                stream.text += "".join(choice["text"] for choice in said["choices"])
        connection.close()
        return stream

    def wait(self) -> None:
        """Until it is healthy."""
        while True:
            with suppress(ConnectionRefusedError):
                connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=10)
                connection.request("GET", "/health")
                if connection.getresponse().status == 200:
                    return
            time.sleep(0.05)

    @contextmanager
    def watched(self) -> Iterator[bool]:
        """Inside, somebody looks at the page; False where there is none."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        connection.request("GET", "/watch")
        answer = connection.getresponse()
        reader = threading.Thread(target=lambda: [None for _ in iter(answer.readline, b"")], daemon=True)
        if answer.status == 200:
            reader.start()
        try:
            yield answer.status == 200
        finally:
            if connection.sock is not None:
                connection.sock.close()


@contextmanager
def served(options: argparse.Namespace, sequences: int = 8) -> Iterator[Server]:
    """A server of the model, from its first word until Ctrl-C."""
    words = ["serve", options.model, "--memory", options.memory, "--context", str(options.context), "--name", "served"]
    words += ["--max-sequences", str(sequences), "--port", "0", *_settings(options)]
    process = subprocess.Popen([sys.executable, "-m", "smoe", *words], stderr=subprocess.PIPE, text=True)
    try:
        server = Server(_port_of(process), _end_of(options.model))
        server.wait()
        yield server
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


def _port_of(process: subprocess.Popen[str]) -> int:
    """What it says once it listens; what it says later is read and forgotten."""
    said, until = "", time.monotonic() + _LOADING_SECONDS
    assert process.stderr is not None
    while time.monotonic() < until and (line := process.stderr.readline()):
        said += line
        found = re.search(r"http://127\.0\.0\.1:(\d+)/v1", line)
        if found:
            threading.Thread(target=process.stderr.read, daemon=True).start()
            return int(found[1])
    raise SystemExit(f"smoe serve did not begin:\n{said}")


def _together(server: Server, prompts: Sequence[str], tokens: int) -> list[Stream]:
    streams = [Stream() for _ in prompts]
    threads = [
        threading.Thread(target=server.ask, args=(prompt, tokens + 24, stream))
        for prompt, stream in zip(prompts, streams, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return streams


# -- beside it --------------------------------------------------------------------------------------------------------


def _by_engine(options: argparse.Namespace, more: Sequence[str]) -> dict[str, dict[str, float]]:
    """{way: {clients: tokens a second}} in a process of its own."""
    words = [options.model, "--memory", options.memory, "--context", str(options.context), "--here", *more]
    words += _settings(options)
    done = subprocess.run([sys.executable, "-m", "bench.serve", *words], stdout=subprocess.PIPE, text=True, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def _here(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """The library's loop on a batch, and ours on as many requests."""
    from smoe.generation.choices import pad_token
    from smoe.generation.generate import encode
    from smoe.generation.library_batch import pad
    from smoe.generation.loop import DecodeLoop
    from smoe.generation.request import End, Piece, Request
    from smoe.generation.sampling import Sampling
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
        prompts = encode(tokenizer, [_prompt(options, n, 24) for n in range(count)])
        times: list[list[float]] = [[] for _ in prompts]

        def heard(what: Piece | End, into: list[float]) -> None:
            if isinstance(what, Piece):
                into.append(time.perf_counter())

        loop = DecodeLoop(model, tokenizer)
        for prompt, into in zip(prompts, times, strict=True):
            loop.hand_in(Request(prompt, sampling, lambda what, into=into: heard(what, into)))  # type: ignore[misc]
        loop.run(until_idle=True)
        found["loop"][str(count)] = _rate(times)
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


# -- circumstances ----------------------------------------------------------------------------------------------------


def _end_of(model: str) -> int | None:
    """The model's end token, which no answer is to have."""
    end = _tokenizer(model)[0].eos_token_id
    return None if end is None else int(end)


def _settings(options: argparse.Namespace) -> list[str]:
    return [word for each in options.set for word in ("--set", each)]


def _finish(options: argparse.Namespace, found: dict[str, list[Any]]) -> None:
    from smoe.machine.measure import describe_machine, describe_versions

    outcome = {
        "bench": "serve",
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": describe_machine(),
        "versions": describe_versions(),
        "asked": {
            "model": Path(options.model).name,
            **{name: getattr(options, name) for name in ("memory", "context", "parts", "rounds", "set")},
        },
        "rounds": found,
    }
    print(json.dumps(outcome))
    if options.out is not None:
        options.out.write_text(json.dumps(outcome) + "\n")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a folder, or demo")
    parser.add_argument("--memory", default="9GiB")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--clients", default="1", help=argparse.SUPPRESS)
    parser.add_argument("--new-tokens", type=int, default=NEW_TOKENS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    return options


if __name__ == "__main__":
    main()
