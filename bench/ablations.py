"""SMoE's mechanisms step by step: every cell of `docs/papers/smoe.md`, one file each.

    python -m bench.ablations OUT --prompts FILE [--model demo] [--rounds 3]
    python -m bench.ablations OUT --prompts FILE --disk DIR [--memory 2GiB]

Beside an emulated device a cell is a profile, a number of sequences and a text. The embedded model stands for one with
experts of 9 MiB (`emulated_expert_bytes`), so that a turn takes a quarter of a minute and the real machine keeps up
easily. With `--disk` a cell is a text read by a model larger than its memory, on this machine as it is (the wide
demo of `bench.widen`); keep it quiet meanwhile.

The texts are the demo's stories, and the prompts of a file (`.jsonl` with `prompt` or `text`, or plain text). The steps
of a cell take turns. Cells that OUT has already are left alone: an interrupted run goes on. `--table` only prints what
is there.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.mechanisms.ablation import (
    ABLATIONS,
    DEVICE_ABLATIONS,
    PROMPT_TOKENS,
    TIMED_TOKENS,
    WARM_TOKENS,
    Step,
    ablate,
    as_json,
)
from smoe.bounds import EMULATED
from smoe.config import EngineConfig
from smoe.eval.texts import read_documents
from smoe.load.pretrained import load
from smoe.load.tokenizer import load_tokenizer
from smoe.presets import configure
from smoe.units import parse_bytes
from smoe.whole_file import whole_file

PROFILES, BATCHES = ("rtx-a6000", "rtx-4060-ti"), (1, 3)
RESIDENT, EXPERT_BYTES, DILATION = 0.4, 9 * 2**20, 5.0
MAIN = (
    "static, rest on CPU",
    "Fiddler: most used stay, rest on CPU",
    "LRU + next gate",
    "HybriMoE's parts",
    "LFU + BA",
    "CE + BA",
    "the preset smoe-exact",
    "the preset smoe",
    "  at alpha 0.3 in any case",
    "  without Pre",
)
"""Baselines and presets, for the cells that do not show every mechanism."""
DISK_MAIN = (
    "LRU on demand",
    "LRU + next gate",
    "LFU",
    "the preset exact",
    "the preset smoe-exact",
    "CE + CR + Pre by next gate",
)
"""The last is what the preset `smoe` does on the disk tier."""
Cell = tuple[str, str, EngineConfig, list[Step]]
"""Name, text, what every step has in common, steps."""


def main() -> None:
    """Measure what is missing, then print the tables."""
    given = parse()
    given.out.mkdir(parents=True, exist_ok=True)
    texts: dict[str, Path | None] = {"stories": None}
    if given.prompts is not None:
        texts["prompts"] = given.prompts
    for name, text, config, steps in disk_cells(given, texts) if given.disk else device_cells(texts):
        target = given.out / f"ablation-{name}-{text}.json"
        model = given.disk or given.model
        if not target.exists() and not given.table:
            rows = rows_of(model, texts[text], config.max_sequences)
            measured = measure(name, model, replace(config, context_tokens=len(rows[0])), rows, steps, given.rounds)
            with whole_file(target) as file:
                file.write(json.dumps({"text": text, "model": Path(model).name} | measured).encode())
        if target.exists():
            print_table(target.stem, json.loads(target.read_text("utf8")))


def parse() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description="SMoE's mechanisms beside an emulated device, cell by cell.")
    parser.add_argument("out", type=Path, help="folder for one JSON file a cell")
    parser.add_argument("--prompts", type=Path, help="file with prompts; without it only stories are read")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--disk", help="a model's folder: measure the disk tier instead")
    parser.add_argument("--memory", default="2GiB", help="for --disk")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--table", action="store_true", help="measure nothing, print what is there")
    return parser.parse_args()


def device_cells(texts: Iterable[str]) -> Iterator[Cell]:
    """Every step for one sequence of stories, the main ones for the others."""
    every = DEVICE_ABLATIONS["smoe"]
    for batch in BATCHES:
        for text in texts:
            for profile in PROFILES:
                config = configure(
                    resident_share=RESIDENT,
                    device=EMULATED,
                    profile=profile,
                    dilation=DILATION,
                    emulated_expert_bytes=EXPERT_BYTES,
                    max_sequences=batch,
                )
                is_whole = batch == 1 and text == "stories"
                steps = every if is_whole else [step for step in every if step.name in MAIN]
                yield f"{profile}-batch{batch}", text, config, steps


def disk_cells(given: argparse.Namespace, texts: Iterable[str]) -> Iterator[Cell]:
    """One sequence of each text."""
    steps = [step for step in ABLATIONS["smoe"] if step.name in DISK_MAIN]
    for text in texts:
        config = configure(memory_bytes=parse_bytes(given.memory), direct_io="on")
        yield f"disk-{given.memory.lower()}", text, config, steps


def rows_of(model: str, text: Path | None, batch: int) -> list[list[int]]:
    """Stretches of the text, one for each sequence, in tokens."""
    needed = PROMPT_TOKENS + WARM_TOKENS + TIMED_TOKENS
    tokenizer = load_tokenizer(model)
    ids = [token for document in read_documents(text) for token in tokenizer(document)["input_ids"]]
    if len(ids) < needed * batch:
        sys.exit(f"{text} has {len(ids)} tokens; {needed * batch} are needed")
    return [ids[n * needed : (n + 1) * needed] for n in range(batch)]


def measure(
    name: str, model: str, config: EngineConfig, rows: list[list[int]], steps: list[Step], rounds: int
) -> dict[str, Any]:
    """One cell, all rounds."""
    began, turns = time.monotonic(), rounds * len(steps)
    done = 0

    def note(step: Step) -> None:
        nonlocal done
        done += 1
        print(f"{name}: turn {done} of {turns}, {time.monotonic() - began:.0f} s", end="\r", file=sys.stderr)

    lines = ablate(steps, rounds, config, rows, lambda wanted: load(model, wanted), note)
    if sum(len(line.turns) for line in lines) < turns:
        raise KeyboardInterrupt
    return {"rounds": rounds} | as_json(lines, config, len(rows))


def print_table(title: str, cell: dict[str, Any]) -> None:
    """Median and range of the rounds' means, and what they hold."""
    print(f"\n{title}, {cell['resident_share']:.0%} resident, {cell['rounds']} rounds, ms a token")
    print(
        f"{'':38}{'median':>8}{'range':>14}{'hits':>6}{'on CPU':>8}{'swapped':>9}"
        f"{'deciding':>10}{'waited':>8}{'late':>6}"
    )
    for step in cell["steps"]:
        turns = [1e3 * seconds for seconds in step["seconds_per_token_by_round"]]
        waited = step["wait_seconds_per_token"] + step["host_wait_seconds_per_token"]
        print(
            f"{step['name']:38}{1e3 * step['seconds_per_token']:8.2f}{min(turns):7.2f}-{max(turns):<6.2f}"
            f"{step['hit_ratio']:6.2f}{step['host_computed_share'] or 0.0:8.2f}{step['substituted_share'] or 0.0:9.2f}"
            f"{1e3 * step['python_seconds_per_token']:10.2f}{1e3 * waited:8.2f}{step['late_share']:6.1%}"
        )


if __name__ == "__main__":
    main()
