"""Run engines against each other: same model, same forced tokens, same memory limit, alternating fresh processes.

    python -m bench.peers.compare --model DIR --limit 2GiB,none --engines smoe,llama.cpp --pairs 3
    python -m bench.peers.compare --model FILE.gguf --engines smoe-gguf,bigmoe --isa native,avx2 --neighbour no,yes

Prints a table for every case and, as the last line, everything as JSON. The README says what is done to be fair.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import signal
import sys
import tempfile
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, replace
from datetime import datetime, timezone
from pathlib import Path

import numpy as np

from bench.peers.binaries import BinaryError, binary
from bench.peers.cgroup import CgroupError, MemoryParent, find_parent
from bench.peers.conditions import machine
from bench.peers.engines import ENGINES, LLAMA_PYTHON_VARIABLE, Setup, default_llama_python
from bench.peers.isa import ISAS
from bench.peers.kept_rounds import KeptRounds
from bench.peers.neighbour import NEIGHBOURS
from bench.peers.rounds import Arena, Case, Round, run_round
from bench.peers.shape import ModelShape, Shape, read_gguf_shape, read_shape
from bench.peers.streams import STREAM_KINDS
from bench.peers.summary import summarise, table
from bench.peers.worker import Workload, parse_lengths, token_count
from smoe.units import parse_bytes

REFERENCE_ENGINE = "transformers-eager"  # what logits are compared with


def parse() -> argparse.Namespace:
    """Command line of the comparison."""
    parser = argparse.ArgumentParser(description="Compare engines on one model, one token stream, one memory limit.")
    parser.add_argument("--model", type=Path, required=True, help="directory made by bench.peers.model, or a GGUF file")
    parser.add_argument("--gguf", type=Path, help="the same model for llama.cpp; default: MODEL with suffix .gguf")
    parser.add_argument(
        "--engines", type=_some_of(ENGINES), default=("smoe", "llama.cpp"), help=f"of {', '.join(ENGINES)}"
    )
    parser.add_argument("--limit", type=_limits, default=(None,), help="memory limits, like 2GiB,4GiB,none")
    parser.add_argument(
        "--isa", type=_some_of(ISAS), default=("native",), help=f"instruction sets, of {', '.join(ISAS)}"
    )
    parser.add_argument(
        "--neighbour",
        type=_some_of(NEIGHBOURS),
        default=("no",),
        help=f"other work on one core, of {', '.join(NEIGHBOURS)}",
    )
    parser.add_argument("--pairs", type=int, default=3, help="rounds of each engine, alternating")
    parser.add_argument("--prompt", type=parse_lengths, default=Workload.prompts, help="prompt lengths, like 16,128")
    parser.add_argument("--new", type=int, default=Workload.new_tokens, help="forced tokens to decode")
    parser.add_argument(
        "--warm-up",
        type=token_count,
        default=Workload.warm_up,
        help="tokens of the warm-up prompt; 0: none",
    )
    parser.add_argument("--stream", choices=STREAM_KINDS, default=Workload.stream)
    parser.add_argument("--seed", type=int, default=Workload.seed)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--retries", type=int, default=1, help="repeats of a round that others disturbed")
    parser.add_argument("--nice", type=int, default=0, help="priority of the workers; below 0 as root only")
    parser.add_argument("--timeout", type=float, default=900, help="seconds one process may take")
    parser.add_argument("--check", action="store_true", help="compare logits with unmodified eager transformers")
    parser.add_argument(
        "--llama-python",
        default=default_llama_python(),
        help=f"interpreter that has llama-cpp-python (or set {LLAMA_PYTHON_VARIABLE})",
    )
    parser.add_argument("--offload", type=Path, help="folder for accelerate; default: MODEL with suffix .offload")
    parser.add_argument("--rounds", type=Path, help="keep every round here, and go on with those that it lacks")
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    return parser.parse_args()


def _some_of(known: Collection[str]) -> Callable[[str], tuple[str, ...]]:
    """What an option reads whose value is some of the `known` names."""

    def read(text: str) -> tuple[str, ...]:
        names = tuple(text.split(","))
        unknown = [name for name in names if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"unknown {', '.join(unknown)}; choose from {', '.join(known)}")
        return names

    return read


def _limits(text: str) -> tuple[int | None, ...]:
    return tuple(None if part == "none" else parse_bytes(part) for part in text.split(","))


def cases_from(options: argparse.Namespace) -> list[Case]:
    """Every limit with every instruction set, with every neighbour."""
    given = itertools.product(options.limit, options.isa, options.neighbour)
    return [Case(limit_bytes, isa, neighbour) for limit_bytes, isa, neighbour in given]


def check_engines(options: argparse.Namespace) -> None:
    """Every engine can be run, and every program is there: found out now, and not in an hour."""
    for name, isa in itertools.product(options.engines, options.isa):
        engine = ENGINES[name]
        if isa not in engine.isas:
            raise SystemExit(f"{name} cannot be limited to {isa}: take another engine, or --isa {engine.isas[0]}")
        try:
            if engine.variable:
                binary(engine.variable, isa)
        except BinaryError as reason:
            raise SystemExit(str(reason)) from None


def memory_parent(limits: Sequence[int | None]) -> MemoryParent | None:
    """Where memory groups go. None, with a warning if a limit was asked for, where they cannot be made."""
    try:
        return find_parent()
    except CgroupError as reason:
        if any(limit is not None for limit in limits):
            print(f"warning: {reason}\nwarning: limits are NOT enforced in this run", file=sys.stderr)
        return None


def compare(arena: Arena, options: argparse.Namespace, kept: KeptRounds, folder: Path | None) -> list[Round]:
    """All rounds, in the order A B A B ... for each case; tables are printed as cases finish.

    `folder` receives the logits of the first pair in the first case; None = not wanted.
    """
    rounds: list[Round] = []
    for case in cases_from(options):
        found: list[Round] = []
        for pair, name in itertools.product(range(options.pairs), options.engines):
            logits = folder / f"{name}.npy" if folder and not rounds and pair == 0 else None
            round_ = kept.get(name, case, pair)
            if round_ is None:
                round_ = run_round(arena, name, case, pair, logits)
                kept.add(round_)
            _say(round_)
            found.append(round_)
        rounds += found
        print(f"\n{case}")
        print(table(found, options.engines, options.prompt, arena.shape), flush=True)
    return rounds


def _say(round_: Round) -> None:
    """One line about a finished round, to standard error."""
    ceilings = round_.ceilings
    disk = ceilings.disk_bytes_per_second
    result = round_.error or f"{round_.decode_rate:.3g} tok/s"
    conditions = f"memory {ceilings.memory_bytes_per_second / 1e9:.1f} GB/s, disk "
    conditions += "-" if disk is None else f"{disk / 1e9:.2f} GB/s"
    conditions += f", others {round_.cpu.others:.0%}, steal {round_.cpu.steal:.0%}"
    place = f"{round_.case}, pair {round_.pair}, {round_.engine}"
    print(f"[{place}] {result} [{conditions}]", file=sys.stderr, flush=True)


def check_logits(arena: Arena, engines: Sequence[str], folder: Path) -> dict[str, dict[str, float]]:
    """Difference of every engine's first logits to those of unmodified eager transformers, run now without limit."""
    reference_file = folder / f"{REFERENCE_ENGINE}.npy"
    if not reference_file.exists():
        reference = run_round(arena, REFERENCE_ENGINE, Case(), 0, reference_file)
        if reference.error:
            print(f"warning: no reference logits: {reference.error}", file=sys.stderr)
            return {}
    expected = np.load(reference_file)
    found = {name: folder / f"{name}.npy" for name in engines if name != REFERENCE_ENGINE}
    return {name: logits_difference(np.load(file), expected) for name, file in found.items() if file.exists()}


def logits_difference(logits: np.ndarray, expected: np.ndarray) -> dict[str, float]:
    """Of logits [T, V]: largest absolute difference, and share of positions with the same most likely token."""
    return {
        "max_abs_difference": float(np.abs(logits - expected).max()),
        "largest_logit": float(np.abs(expected).max()),
        "top1_agreement": float((logits.argmax(-1) == expected.argmax(-1)).mean()),
    }


def versions(rounds: Sequence[Round]) -> dict[str, str]:
    """Versions of everything that ran: the harness's own, and what the workers noted."""
    found = {"python": platform.python_version(), "numpy": np.__version__}
    for round_ in rounds:
        notes = round_.measurement.notes if round_.measurement else {}
        found |= {name: value for name, value in notes.items() if isinstance(value, str)}
    return found


def as_json(
    arena: Arena, options: argparse.Namespace, rounds: Sequence[Round], checks: dict[str, dict[str, float]]
) -> dict[str, object]:
    """Everything about the run, without paths or host names."""
    summaries = []
    for case, name in itertools.product(cases_from(options), options.engines):
        mine = [round_ for round_ in rounds if (round_.engine, round_.case) == (name, case)]
        spreads = summarise(mine, options.prompt, arena.shape)
        values = {column: asdict(value) for column, value in spreads.items() if value}
        summaries.append({"engine": name, "case": asdict(case), **values})
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": machine(),
        "versions": versions(rounds),
        **what_is_measured(arena),
        "limits_enforced": arena.parent is not None,
        "logits_against_eager": checks,
        "summaries": summaries,
        "rounds": [asdict(round_) for round_ in rounds],
    }


def what_is_measured(arena: Arena) -> dict[str, object]:
    """The model and the work, the same in all rounds."""
    workload = arena.workload
    return {
        "model": {"name": workload.model.name, **vars(arena.shape), "expert_bytes": arena.shape.expert_bytes},
        "workload": {
            "stream": workload.stream,
            "seed": workload.seed,
            "prompts": workload.prompts,
            "new_tokens": workload.new_tokens,
            "warm_up": workload.warm_up,
            "threads": workload.threads,
            "nice": arena.nice,
        },
    }


def shape_from(options: argparse.Namespace) -> Shape:
    """The model's sizes: of the GGUF file where that is what is run."""
    if options.model.suffix == ".gguf":
        return read_gguf_shape(options.model)
    shape: ModelShape = read_shape(options.model)
    if "smoe-gguf" in options.engines:  # both read that file
        file = options.gguf or options.model.with_suffix(".gguf")
        shape = replace(shape, bytes_per_weight=file.stat().st_size / shape.weights)
    return shape


def arena_from(options: argparse.Namespace) -> Arena:
    """What stays the same in all rounds, from the command line."""
    shape = shape_from(options)
    setup = Setup(
        model=options.model.resolve(),
        gguf=(options.gguf or options.model.with_suffix(".gguf")).resolve(),
        llama_python=options.llama_python,
        offload=(options.offload or options.model.with_suffix(".offload")).resolve(),
    )
    workload = Workload(
        model=setup.model,
        vocabulary=shape.vocabulary,
        prompts=options.prompt,
        new_tokens=options.new,
        warm_up=options.warm_up,
        stream=options.stream,
        seed=options.seed,
        threads=options.threads,
    )
    parent = memory_parent(options.limit)
    return Arena(setup, workload, shape, parent, options.timeout, options.retries, options.nice)


def main() -> None:
    """Compare what the command line names."""
    options = parse()
    check_engines(options)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that worker and memory group go too
    arena = arena_from(options)
    kept = KeptRounds(options.rounds, what_is_measured(arena))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) if options.check else None
        rounds = compare(arena, options, kept, folder)
        checks = check_logits(arena, options.engines, folder) if folder else {}
    for engine, difference in checks.items():
        print(f"logits of {engine} against eager transformers: {difference}")
    line = json.dumps(as_json(arena, options, rounds, checks))
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(line + "\n", encoding="utf-8")
    print(line)


if __name__ == "__main__":
    main()
