"""What every engine's process does: the same prompts, the same forced tokens, the same clock, one line of JSON.

An engine is anything with `prefill` and `decode`; the order of work is written once, here:

    load | warm-up prompt (usually 16, another part of the stream) | prompt 16 | prompt 128 | N forced tokens
           timed apart; none with --warm-up 0                       TTFT        TTFT         seconds each

Prompts start from an empty KV cache. A forward counts as finished when the logits of its last position are in host
memory. Bytes read from disk come from the kernel's account of this process and cover its threads and page faults.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np

from bench.peers.streams import STREAM_KINDS, forced_tokens

LOGITS_POSITIONS = 16  # positions compared between engines


class Session(Protocol):
    """A loaded model with one sequence."""

    def prefill(self, tokens: Sequence[int], every_position: bool = False) -> np.ndarray:
        """Forget the sequence, process `tokens`; logits of the last position [V], or of all [T, V]."""

    def decode(self, token: int) -> np.ndarray:
        """Append one token; its logits [V]."""

    def resident_expert_bytes(self) -> int | None:
        """Room for experts that stay in memory between tokens; None = not known."""

    def notes(self) -> dict[str, object]:
        """Versions and counters worth keeping, JSON-able."""


@dataclass(frozen=True)
class Workload:
    """What to run; the same for all engines of a comparison."""

    model: Path
    vocabulary: int
    prompts: tuple[int, ...] = (16, 128)
    new_tokens: int = 32
    warm_up: int = 16
    """Tokens of the warm-up prompt; 0 = no such prompt."""
    stream: str = "zipf"
    seed: int = 1
    threads: int = 2
    logits: Path | None = None
    """File for the fp32 logits of the first positions of the longest prompt; None = not wanted."""


@dataclass
class Measurement:
    """What one process found out. Times in seconds."""

    load_seconds: float = 0.0
    warmup_seconds: float = 0.0
    ttft_seconds: dict[str, float] = field(default_factory=dict)
    decode_seconds: list[float] = field(default_factory=list)
    disk_bytes: dict[str, int | None] = field(default_factory=dict)
    """Bytes read from disk per phase: load, warmup, one per prompt, decode."""
    memory_bytes: dict[str, int] = field(default_factory=dict)
    """VmHWM (peak resident), and what is resident after decoding: RssAnon, RssFile, RssShmem."""
    resident_expert_bytes: int | None = None
    """Room for experts that stay in memory between tokens; None where the engine does not say."""
    notes: dict[str, object] = field(default_factory=dict)


def workload_parser(description: str) -> argparse.ArgumentParser:
    """The options every worker understands; `workload_from` reads them back."""
    parser = argparse.ArgumentParser(description=description, allow_abbrev=False)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--vocabulary", type=int, required=True)
    parser.add_argument("--prompts", type=parse_lengths, default=Workload.prompts, help="lengths, like 16,128")
    parser.add_argument("--new-tokens", type=int, default=Workload.new_tokens)
    parser.add_argument("--warm-up", type=token_count, default=Workload.warm_up)
    parser.add_argument("--stream", choices=STREAM_KINDS, default=Workload.stream)
    parser.add_argument("--seed", type=int, default=Workload.seed)
    parser.add_argument("--threads", type=int, default=Workload.threads)
    parser.add_argument("--logits", type=Path)
    return parser


def workload_from(options: argparse.Namespace) -> Workload:
    """The workload among parsed options."""
    return Workload(**{name: getattr(options, name) for name in Workload.__dataclass_fields__})


def workload_arguments(workload: Workload) -> list[str]:
    """Command line that `workload_parser` reads back as `workload`."""
    arguments: list[str] = []
    for name, value in vars(workload).items():
        if value is not None:
            text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
            arguments += ["--" + name.replace("_", "-"), text]
    return arguments


def token_count(text: str) -> int:
    """A whole number of at least 0."""
    count = int(text)
    if count < 0:
        raise argparse.ArgumentTypeError(f"{text}: a number of tokens is at least 0")
    return count


def parse_lengths(text: str) -> tuple[int, ...]:
    """`"16,128"` -> (16, 128)."""
    return tuple(int(part) for part in text.split(","))


class Stopwatch:
    """Cuts a run into phases: seconds and disk bytes since the last cut."""

    def __init__(self) -> None:
        self._seconds, self._disk = time.perf_counter(), disk_bytes_read()

    def cut(self) -> tuple[float, int | None]:
        """(seconds, bytes read from disk) since the last cut; bytes None where the kernel does not tell."""
        seconds, disk = time.perf_counter(), disk_bytes_read()
        phase = seconds - self._seconds, None if disk is None or self._disk is None else disk - self._disk
        self._seconds, self._disk = seconds, disk
        return phase


def measure(workload: Workload, session: Session, watch: Stopwatch) -> Measurement:
    """Run `workload` on a session just loaded; `watch` was started before loading."""
    found = Measurement()
    found.load_seconds, found.disk_bytes["load"] = watch.cut()
    longest = max(workload.prompts)
    count = longest + workload.new_tokens + workload.warm_up
    tokens = forced_tokens(workload.stream, count, workload.seed, workload.vocabulary)
    if workload.warm_up:
        session.prefill(tokens[-workload.warm_up :])
    found.warmup_seconds, found.disk_bytes["warmup"] = watch.cut()
    for length in sorted(workload.prompts):
        session.prefill(tokens[:length])
        found.ttft_seconds[str(length)], found.disk_bytes[f"prompt {length}"] = watch.cut()
    for token in tokens[longest : longest + workload.new_tokens]:
        start = time.perf_counter()
        session.decode(token)
        found.decode_seconds.append(time.perf_counter() - start)
    _, found.disk_bytes["decode"] = watch.cut()
    found.memory_bytes = memory_bytes()
    found.resident_expert_bytes = session.resident_expert_bytes()
    found.notes = session.notes()
    if workload.logits is not None:
        np.save(workload.logits, session.prefill(tokens[:LOGITS_POSITIONS], every_position=True).astype(np.float32))
    return found


def report(found: Measurement) -> None:
    """Print the line of JSON the harness reads."""
    print(json.dumps(asdict(found)), flush=True)


def disk_bytes_read(process: int | str = "self") -> int | None:
    """Bytes a process caused to be fetched from block devices, all threads; None where the kernel does not tell."""
    try:
        lines = Path(f"/proc/{process}/io").read_text().splitlines()
    except OSError:
        return None
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


def memory_bytes(process: int | str = "self") -> dict[str, int]:
    """Peak and present resident memory of a process; empty where /proc does not exist, and of one that has ended."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.split(":") for line in lines if line.startswith(("VmHWM", "RssAnon", "RssFile", "RssShmem")))
    return {name: int(value.split()[0]) * 1024 for name, value in pairs}
