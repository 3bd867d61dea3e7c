"""Two versions of the source, or two settings, on the same model, tokens and budget, in fresh processes that alternate.

    git worktree add ../before v0.1.0
    python -m bench.versions ../before/src src MODEL --memory 2GiB,all --rounds 3 [--text FILE] [--set eviction=lru]
    python -m bench.versions src src MODEL --memory 2GiB --set-b precision=int4
    python -m bench.versions src src MODEL --memory all --env SMOE_MAX_CPU_ISA=avx2 --set-b kernels=own-order

Every process loads the model, reads a prompt of 64 tokens, decodes some forced tokens untimed and the rest timed, and
prints one line. With `--prompts`, prompts of those lengths are read then, each once untimed and once timed. Order is
A B B A A B, so that a drift of the machine falls on both. Of each round the ratio of the mean times (second version
over first) is taken; the last line is JSON with every round, machine and versions.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path
from statistics import mean, median
from typing import Any

PROMPT_TOKENS, WARM_TOKENS = 64, 24
_LEAST_WORDS = 32000
"""So many tokens of a GGUF file are used: every known vocabulary has them."""
CONTEXT_TOKENS = 512
TEXT = Path(__file__).with_name("text.txt")
ROOT = Path(__file__).parent.parent

_WORKER = """
import json, sys, time
import smoe
import torch
from smoe import from_pretrained
asked = json.loads(sys.argv[1])
model = from_pretrained(asked["model"], memory=asked["memory"], context_tokens=asked["context"], **asked["switches"])
engine, ids = model.offload, asked["ids"]
engine.wait_ready()
cache = engine.new_cache()
with torch.no_grad():
    started = time.perf_counter()
    model(input_ids=torch.tensor([ids[: asked["prompt"]]]), past_key_values=cache, use_cache=True, logits_to_keep=1)
    first = time.perf_counter() - started
    seconds, check = [], 0.0
    for n, token in enumerate(ids[asked["prompt"] :]):
        if n == asked["warm"]:
            before = engine.stats()
        started = time.perf_counter()
        out = model(input_ids=torch.tensor([[token]]), past_key_values=cache, use_cache=True)
        seconds.append(time.perf_counter() - started)
        check += float(out.logits[0, -1].float().abs().max())
stats = engine.stats() - before
prompts = {}
for length in asked["prompts"]:
    for _ in range(2):
        cache, tokens = engine.new_cache(), torch.tensor([[ids[n % len(ids)] for n in range(length)]])
        started = time.perf_counter()
        with torch.no_grad():
            model(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
        prompts[length] = time.perf_counter() - started
print(json.dumps({"ttft_seconds": first, "seconds": seconds[asked["warm"] :], "check": check, "prompt_seconds": prompts,
    "hit_ratio": stats.hit_ratio, "bytes_per_token": stats.bytes_read / len(seconds[asked["warm"] :]),
    "resident_share": engine.ledger.resident_share}))
engine.close()
"""


def main() -> None:
    options = _parse()
    ids = _tokens(options)
    rounds: list[dict[str, Any]] = []
    for memory in options.memory.split(","):
        for number in range(options.rounds):
            pair = {}
            for side in ("a", "b") if number % 2 == 0 else ("b", "a"):
                is_b = side == "b"
                switches = options.set + (options.set_b if is_b else [])
                variables = options.env + (options.env_b if is_b else [])
                pair[side] = _run(getattr(options, side), options, switches, variables, memory, ids)
            ratio = mean(pair["b"]["seconds"]) / mean(pair["a"]["seconds"])
            rounds.append({"memory": memory, "round": number, "ratio": ratio} | pair)
            print(_line(memory, pair, ratio), file=sys.stderr, flush=True)
    _finish(options, rounds)


def _line(memory: str, pair: dict[str, Any], ratio: float) -> str:
    shown = []
    for run in (pair["a"], pair["b"]):
        decode = f"{1e3 * mean(run['seconds']):7.2f} ms a token (hits {run['hit_ratio']:.3f})"
        shown.append(
            f"{decode}, first {run['ttft_seconds']:.2f} s"
            + "".join(f", {n} in {seconds:.2f} s" for n, seconds in run["prompt_seconds"].items())
        )
    same = "same logits" if pair["a"]["check"] == pair["b"]["check"] else "OTHER LOGITS"
    return f"{memory:>6}  {' | '.join(shown)}  ratio {ratio:.3f}  {same}"


def _run(
    source: Path,
    options: argparse.Namespace,
    switches: list[str],
    variables: list[str],
    memory: str,
    ids: list[int],
) -> dict[str, Any]:
    asked = {
        "model": str(options.model.resolve()),
        "memory": None if memory == "all" else memory,
        "context": max(CONTEXT_TOKENS, *options.prompts, 0),
        "prompts": options.prompts,
        "switches": _pairs(switches),
        "ids": ids,
        "prompt": PROMPT_TOKENS,
        "warm": WARM_TOKENS,
    }
    environment = os.environ | _pairs(variables) | {"PYTHONPATH": str(source.resolve())}
    command = [sys.executable, "-c", _WORKER, json.dumps(asked)]
    ended = subprocess.run(command, env=environment, cwd=source, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise SystemExit(f"{source} failed:\n{ended.stderr}")
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return found


def _pairs(entries: list[str]) -> dict[str, str]:
    """From NAME=VALUE."""
    return dict(entry.split("=", 1) for entry in entries)


def _tokens(options: argparse.Namespace) -> list[int]:
    """Text where the model has a tokenizer, else a seeded stream."""
    count = PROMPT_TOKENS + WARM_TOKENS + options.tokens
    if (options.model / "tokenizer.json").exists():
        from transformers import AutoTokenizer

        text = (options.text or TEXT).read_text(encoding="utf8")
        found = AutoTokenizer.from_pretrained(options.model)(text)["input_ids"][:count]
    else:
        from bench.peers.streams import forced_tokens

        config = options.model / "config.json"
        vocabulary = json.loads(config.read_text(encoding="utf8"))["vocab_size"] if config.exists() else _LEAST_WORDS
        found = forced_tokens("zipf", count, seed=1, vocabulary=vocabulary)
    if len(found) < count:
        raise SystemExit(f"the text has {len(found)} tokens, {count} are needed: fewer --tokens, or another --text")
    return [int(token) for token in found]


def _finish(options: argparse.Namespace, rounds: list[dict[str, Any]]) -> None:
    from smoe.machine.measure import describe_machine, describe_versions

    summary = {}
    for memory in options.memory.split(","):
        ratios = [entry["ratio"] for entry in rounds if entry["memory"] == memory]
        summary[memory] = {"median": median(ratios), "least": min(ratios), "most": max(ratios)}
        print(f"{memory:>6}  ratio {median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})", file=sys.stderr)
    circumstances = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": describe_machine(),
        "versions": describe_versions(),
        "model": options.model.name,
        "switches": options.set,
        "switches_b": options.set_b,
        "environment": options.env,
        "environment_b": options.env_b,
        "tokens": options.tokens,
        "ratio": summary,
    }
    text = json.dumps(circumstances | {"rounds": rounds})
    if options.out is not None:
        options.out.write_text(text + "\n", encoding="utf8")
    print(text)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("a", type=Path, help="folder with the package smoe: the version to compare with")
    parser.add_argument("b", type=Path, help="the same of the other version")
    parser.add_argument("model", type=Path)
    parser.add_argument("--memory", default="2GiB,all", help="budgets; all: what is free [default: 2GiB,all]")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64, help="timed ones")
    parser.add_argument("--prompts", type=lambda text: [int(n) for n in text.split(",")], default=[], metavar="N,N")
    parser.add_argument("--text", type=Path)
    parser.add_argument("--set", action="append", default=[], help="a setting for both, such as eviction=lru")
    parser.add_argument("--set-b", action="append", default=[], help="a setting for the second alone")
    parser.add_argument("--env", action="append", default=[], help="a variable of the environment for both")
    parser.add_argument("--env-b", action="append", default=[], help="one for the second alone")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
