"""What serving costs beside the engine, and what clients notice of each other.

    python -m bench.serve MODEL [--memory 9GiB] [--parts speed,overhead,gaps,follow-up] [--rounds 3] [--out FILE.json]

`smoe serve` runs in a process of its own and is asked over HTTP, by threads that read streams; what it is set beside
runs in processes of their own too (`--here`), in turns, round by round.

    speed      1, 4 and 8 clients: new tokens a second while all of them are answered, beside the engine's own batches:
               the library's loop with as many rows, and our decode loop without HTTP
    overhead   one client: milliseconds a token beside the decode loop without HTTP, and with the page's feed open
    gaps       one client's times between tokens while another one's prompt of 512 tokens is read
    follow-up  time to the first token of 20 more tokens after nearly a context's, beside reading all
    clients    1, 4 and 8 clients, prompts of 140 tokens and 48 new: tokens a second of all, prompts' time included,
               the longest wait for a first token, the median gap; beside llama.cpp's server, for a GGUF file, where
               SMOE_BENCH_LLAMA_SERVER (with --isa avx2: SMOE_BENCH_LLAMA_SERVER_AVX2) names its program
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from bench.peers.isa import ISAS, VARIABLES
from bench.serve.beside import here
from bench.serve.measures import MEASURES, NEW_TOKENS
from bench.serve.results import write


def main() -> None:
    options = _parse()
    if options.here:
        print(json.dumps(here(options)))
        return
    found: dict[str, list[Any]] = {part: [] for part in options.parts.split(",")}
    for number in range(options.rounds):
        for part in found:
            found[part].append(MEASURES[part](options))
            print(f"round {number + 1}, {part}: {json.dumps(found[part][-1])}", file=sys.stderr, flush=True)
    write("serve", options, ("memory", "context", "parts", "rounds", "isa", "set"), {"rounds": found})


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a folder, or demo")
    parser.add_argument("--memory", default="9GiB")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--parts", default=",".join(MEASURES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--isa", choices=ISAS, default="native", help="instructions that may be used")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--clients", default="1", help=argparse.SUPPRESS)
    parser.add_argument("--new-tokens", type=int, default=NEW_TOKENS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.update(VARIABLES[options.isa])  # for the processes that it starts
    return options


if __name__ == "__main__":
    main()
