"""The commands that write texts as whole processes under a memory limit: their times, their peak of memory, and the
forecast of `smoe plan` before each of them.

    python -m bench.whole_size.commands FILE.gguf --limit 8GiB 12GiB --rounds 2 [--isa avx2]

For each limit and round, `plan`, `generate` with a prompt of some 120 tokens, `chat` with the same message, and `serve`
with the same prompt run one after the other. `plan` forecasts a prompt of 128 tokens. The file is dropped from the page
cache before each of them. Rounds after the first one show second starts, and forecasts that earlier runs have
calibrated.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.peers.cgroup import MemoryCgroup, find_parent
from bench.peers.process import JOIN_AND_RUN
from bench.whole_size.starts import CONTEXT, conditions, environment, one_start, plan, prepare
from smoe.units import parse_bytes

TEXT = (
    "A lighthouse keeper wrote down the weather every evening for thirty years. On clear days he counted the "
    "ships that passed, and on foggy ones he rang the bell by hand until his arms hurt. When the station was "
    "closed, a student of the climate bought his notebooks for the price of the paper. She found in them a winter "
    "that no other record had, and two summers in which the sea had been warmer than anybody had believed. "
    "Explain to a reader who has never seen the coast why such a diary can be worth more to science than a year "
    "of measurements from an expensive instrument."
)
"""The prompt: some 120 tokens of a text without repetitions, so that it uses as many experts as usual texts."""
_CHAT = re.compile(r"first token after ([\d.]+) (m?s).*?([\d.]+) tokens/s", re.DOTALL)
_UNITS = {"s": 1.0, "ms": 1e-3}


def main() -> None:
    """Run the rounds, print a line for each command, and all of them as JSON in the last line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--limit", nargs="+", default=["8GiB"], help="memory of the whole process, page cache included")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--new", type=int, default=32, help="tokens to write")
    parser.add_argument("--isa", choices=("native", "avx2"), default="native")
    parser.add_argument("--commands", nargs="+", choices=tuple(RUNS), default=list(RUNS))
    parser.add_argument("--timeout", type=float, default=600.0)
    parser.set_defaults(set=[])
    given = parser.parse_args()
    limits, found = given.limit, list[dict[str, Any]]()
    for limit in limits:
        given.limit = limit
        for number in range(given.rounds):
            for command in given.commands:
                forecast = plan(given)
                prepare(given.model, "cold")
                ran = RUNS[command](given) | {"command": command, "limit": limit, "round": number}
                found.append(ran | {"forecast": forecast})
                print(line(found[-1]), flush=True)
    given.limit = limits
    print(json.dumps({"conditions": conditions(given) | {"prompt": TEXT}, "runs": found}))


def generate(given: argparse.Namespace) -> dict[str, Any]:
    """Return the times of `smoe generate`, as it reports them."""
    words = ["generate", str(given.model), "--process-memory", given.limit, "--context", CONTEXT, "-p", TEXT]
    ended = _ended([*words, "--max-new-tokens", str(given.new), "--json"], None, given)
    said = json.loads(ended["output"])
    names = ("tokens_per_second", "prompt_tokens", "new_tokens", "hit_ratio", "bytes_read_per_token")
    shown = {name: said[name] for name in names}
    return shown | {
        "answer_seconds": said["ttft_seconds"],
        "peak_bytes": ended["peak_bytes"],
        "seconds": ended["seconds"],
    }


def chat(given: argparse.Namespace) -> dict[str, Any]:
    """Return the times of the first answer of `smoe chat`, as it prints them."""
    words = ["chat", str(given.model), "--process-memory", given.limit, "--context", CONTEXT]
    ended = _ended([*words, "--max-new-tokens", str(given.new)], f"{TEXT}\n", given)
    said = _CHAT.search(ended["errors"])
    if said is None:
        raise SystemExit(f"smoe chat stated no times: {ended['errors'][-2000:]}")
    seconds = float(said[1]) * _UNITS[said[2]]
    shown = {"tokens_per_second": float(said[3]), "answer_seconds": seconds}
    return shown | {"peak_bytes": ended["peak_bytes"], "seconds": ended["seconds"]}


def serve(given: argparse.Namespace) -> dict[str, Any]:
    """Return the times of a start of `smoe serve`, whose client asks at once."""
    ran = one_start(given, TEXT)
    return ran | {"answer_seconds": ran["first_token_seconds"] - ran["open_seconds"], "seconds": None}


RUNS = {"generate": generate, "chat": chat, "serve": serve}


def _ended(words: Sequence[str], message: str | None, given: argparse.Namespace) -> dict[str, Any]:
    """Return the output of a command that ran in a memory group, with its seconds and its peak of memory."""
    with MemoryCgroup(find_parent(), parse_bytes(given.limit, "--limit")) as group:
        shell = ["sh", "-c", JOIN_AND_RUN, str(group.procs), sys.executable, "-m", "smoe", *words]
        started = time.perf_counter()
        ended = subprocess.run(
            shell, env=environment(given), input=message, capture_output=True, text=True, timeout=given.timeout
        )
        seconds, peak = time.perf_counter() - started, group.peak_bytes()
    if ended.returncode:
        raise SystemExit(f"{words[0]} ended with {ended.returncode}: {ended.stderr[-2000:]}")
    return {"output": ended.stdout, "errors": ended.stderr, "seconds": seconds, "peak_bytes": peak}


def line(ran: dict[str, Any]) -> str:
    """Return one command as a line of text."""
    forecast = ran["forecast"]
    error = forecast["first_tokens_per_second"] / ran["tokens_per_second"] - 1
    return (
        f"{ran['limit']} round {ran['round']} {ran['command']:8}: first token {ran['answer_seconds']:5.1f} s, "
        f"{ran['tokens_per_second']:5.2f} tokens/s, peak {ran['peak_bytes'] / 2**30:.2f} GiB; forecast "
        f"{forecast['first_tokens_per_second']:5.2f} tokens/s ({error:+.0%}), calibrated: {forecast['is_calibrated']}"
    )


if __name__ == "__main__":
    main()
