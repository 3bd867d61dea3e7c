"""How near smoe comes to what memory and disk allow: one model, several budgets, each in a memory cgroup.

    python -m bench.limits MODEL [--budgets all,4GiB,2GiB,1.5GiB] [--repeats 3] [--stream zipf|uniform|text]

For every budget a fresh process, capped from outside at the budget plus what a bare interpreter with the same libraries
holds, measures memory and disk, reads prompts of 16 and 128 tokens, decodes forced tokens, and counts from its own
routing trace what a cache of its size and policy (and LRU's and Belady's) would have missed. From these:

    t_disk     those misses a token x expert bytes / disk rate of this round (better of one and two readers)
    t_memory   (expert bytes used + dense bytes) a token / memory rate of this round
    serial     t_disk + t_memory: a perfect engine that overlaps nothing; floor: the larger of the two
    overlap    (t_disk + t_compute - measured) / min(t_disk, t_compute), with t_compute of our own all-resident run
    blind      the best without foresight, at our own all-resident speed: a layer's reads begin when its router has
               spoken and run at the disk's rate, its resident experts compute meanwhile, the others when they have
               come; "most" is the overlap that this allows
    own        overlap with the time during which the engine's own reads were running in place of t_disk: a disk's rate
               drifts between its measurement and the run
    TTFT bound max(bytes read / disk rate, t_compute of the prompt) + one layer of it

The reference model has random weights and routing that repeats more than it should (bench/peers/README.md); the wide
demo (bench/widen.py) has real routing, for which `--stream text` feeds real text. Prints a table, ends with one JSON
line.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
import transformers

import smoe  # isort: split   first, as it sets how threads wait before torch starts them
from bench.peers.cgroup import CgroupError, MemoryCgroup, find_parent
from bench.peers.conditions import ceilings, drop_from_page_cache, machine, wait_until_quiet
from bench.peers.engines import smoe_baseline_bytes
from bench.peers.streams import forced_tokens
from smoe.policy.eviction.belady import Belady
from smoe.policy.eviction.lru import LRU
from smoe.policy.step import Decision, observation
from smoe.routing import Phase, Routing
from smoe.runtime.observer import StepObserver
from smoe.simulator.replay import replay
from smoe.units import format_bytes, parse_bytes

REPOSITORY = Path(__file__).parent.parent
CONTEXT_TOKENS = 512
READ_BYTES = 9 * 2**20
"""Block size of the disk measurement: an expert of the reference model and of the wide demo."""
TEXT = Path(__file__).with_name("text.txt")
_JOIN = 'echo $$ > "$0" && exec "$@"'


def main() -> None:
    options = _parse()
    if options.worker:
        print(json.dumps(measure(options)))
        return
    rows = [_run(options, budget) for _ in range(options.repeats) for budget in options.budgets.split(",")]
    resident = [row for row in rows if row["budget"] == "all"]
    layers = json.loads((options.model / "config.json").read_text())["num_hidden_layers"]
    for row in rows:
        _judge(row, resident, layers)
    _print(rows)
    versions = {"smoe": smoe.__version__, "torch": torch.__version__, "transformers": transformers.__version__}
    print(json.dumps({"machine": machine(), "versions": versions, "stream": options.stream, "rows": rows}))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--budgets", default="all,4GiB,3GiB,2GiB,1.5GiB")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--stream", choices=("zipf", "uniform", "text"), default="zipf")
    parser.add_argument("--new", type=int, default=32, help="decoded tokens")
    parser.add_argument("--prefetch", choices=("none", "next-gate"), default="none")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args()


# -- one process ----------------------------------------------------------------------------------------------------


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Everything that one run tells about itself, in seconds and bytes."""
    folder, budget, new = options.model, options.worker, options.new
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    memory = None if budget == "all" else parse_bytes(budget)
    started = perf_counter()
    switches: dict[str, Any] = {"context_tokens": CONTEXT_TOKENS, "prefill_tokens": 256, "prefetch": options.prefetch}
    model = smoe.from_pretrained(folder, memory=memory or "64GiB", **switches)
    engine = model.offload
    load_seconds = perf_counter() - started
    engine.wait_ready()
    tokens = _tokens(folder, options.stream, 16 + 2 * 128 + 2 * new)
    missing = _Missing()
    with engine.recording() as trace, engine.observed_by(missing):
        ttft_16 = _prefill(model, tokens[:16])[0]
        if budget == "all":
            _prefill(model, tokens[16 : 16 + 128])  # the second time everything is resident: pure compute
            _decode(model, _prefill(model, tokens[16 : 16 + 128])[1], tokens[144 : 144 + new])
            trace.clear()
        prefill = _prefill(model, tokens[16 : 16 + 128])
        missing.counts.clear()
        decode = _decode(model, prefill[1], tokens[144 : 144 + new])
    demand, slots = engine.ledger.demand, engine.ledger.cache_slots
    own = replay(trace, slots, engine.ledger.staging_slots, engine.fresh_eviction())
    lru = replay(trace, slots, engine.ledger.staging_slots, LRU())
    belady = replay(trace, slots, engine.ledger.staging_slots, Belady([observation(r) for r in trace]))
    engine.close()
    return {
        "budget": budget,
        "slots": slots,
        "load_seconds": load_seconds,
        "expert_bytes": engine.store.expert_bytes,
        "dense_bytes": demand.weights_bytes,
        "experts_per_token": decode["uses"] / new,
        "eviction": engine.config.eviction,
        "own_misses_per_token": own.misses / new,
        "lru_misses_per_token": lru.misses / new,
        "belady_misses_per_token": belady.misses / new,
        "ttft_16_seconds": ttft_16,
        "prefill": prefill[2],
        "decode": decode,
        "missing_by_layer": missing.counts,
        "peak_bytes": engine.peak_memory_bytes(),
    }


class _Missing(StepObserver):
    """Of every decoded layer, how many of its experts had to be waited for."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def planned(self, routing: Routing, decision: Decision) -> None:
        if routing.phase is Phase.DECODE:
            self.counts.append(sum(serve.waits for serve in decision.plan.serves))


def _tokens(folder: Path, stream: str, count: int) -> list[int]:
    if stream != "text":
        vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
        return forced_tokens(stream, count, 1, vocabulary)
    ids: list[int] = transformers.AutoTokenizer.from_pretrained(folder)(TEXT.read_text())["input_ids"]
    assert len(ids) >= count, f"{TEXT} has {len(ids)} tokens, {count} are needed"
    return ids[:count]


def _prefill(model: Any, tokens: list[int]) -> tuple[float, Any, dict[str, float]]:
    """(seconds to the first token, cache, interval counters)"""
    cache, before, started = model.offload.new_cache(), model.offload.stats(), perf_counter()
    model(input_ids=torch.tensor([tokens]), past_key_values=cache, use_cache=True, logits_to_keep=1)
    seconds = perf_counter() - started
    interval = model.offload.stats() - before
    return seconds, cache, {"seconds": seconds, "bytes_read": interval.bytes_read, "hits": interval.prefill_hits}


def _decode(model: Any, cache: Any, tokens: list[int]) -> dict[str, Any]:
    """Forced tokens one by one."""
    before, seconds = model.offload.stats(), []
    for token in tokens:
        started = perf_counter()
        model(input_ids=torch.tensor([[token]]), past_key_values=cache, use_cache=True, logits_to_keep=1)
        seconds.append(perf_counter() - started)
    interval = model.offload.stats() - before
    parts = ("wait_seconds", "compute_seconds", "plan_seconds", "dense_seconds", "read_busy_seconds")
    return {
        "seconds_per_token": sum(seconds) / len(seconds),
        "median_seconds": median(seconds),
        "uses": interval.decode_uses,
        "hit_ratio": interval.hit_ratio,
        "bytes_per_token": interval.bytes_read / len(seconds),
        **{part: getattr(interval, part) / len(seconds) for part in parts},
    }


def _disk_rate(before: Any, after: Any) -> float | None:
    """Mean over the two measurements of the better of one and two readers; None without O_DIRECT."""
    rates = [
        max(c.disk_bytes_per_second, c.disk_two_readers_bytes_per_second)
        for c in (before, after)
        if c.disk_bytes_per_second
    ]
    return sum(rates) / len(rates) if rates else None


# -- all processes --------------------------------------------------------------------------------------------------


def _run(options: argparse.Namespace, budget: str) -> dict[str, Any]:
    """One budget in a fresh process, between two measurements of memory and disk."""
    files = sorted(options.model.glob("*.safetensors"))
    quiet = wait_until_quiet()
    before = ceilings(files, READ_BYTES, torch.get_num_threads(), 0.7)
    drop_from_page_cache([*files, *options.model.glob("*.smoe")])
    answer = _capped(options, budget)
    after = ceilings(files, READ_BYTES, torch.get_num_threads(), 0.7)
    memory_rate = (before.memory_bytes_per_second + after.memory_bytes_per_second) / 2
    return answer | {"quiet": quiet, "memory_rate": memory_rate, "disk_rate": _disk_rate(before, after)}


def _capped(options: argparse.Namespace, budget: str) -> dict[str, Any]:
    """The worker's answer, under a cgroup of the budget and a bare interpreter where one can be made."""
    command = [sys.executable, "-m", "bench.limits", str(options.model), "--worker", budget]
    command += ["--stream", options.stream, "--new", str(options.new), "--prefetch", options.prefetch]
    uncapped: dict[str, Any] = {"cgroup_limit": None, "cgroup_peak": None}
    if budget == "all":
        return _answer(command) | uncapped
    limit = parse_bytes(budget) + smoe_baseline_bytes(torch.get_num_threads())
    try:
        with MemoryCgroup(find_parent(), limit) as group:
            answer = _answer(["sh", "-c", _JOIN, str(group.procs), *command])
            return answer | {"cgroup_limit": limit, "cgroup_peak": group.peak_bytes()}
    except CgroupError as error:
        print(f"not capped from outside: {error}", file=sys.stderr)
        return _answer(command) | uncapped


def _answer(command: list[str]) -> dict[str, Any]:
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"the run ended with status {done.returncode}:\n{done.stderr[-2000:]}")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def _judge(row: dict[str, Any], resident: list[dict[str, Any]], layers: int) -> None:
    """Add the limits, and how near the run came, to a row."""
    measured, disk = row["decode"]["seconds_per_token"], row["disk_rate"] or float("inf")
    t_memory = (row["experts_per_token"] * row["expert_bytes"] + row["dense_bytes"]) / row["memory_rate"]
    t_disk = row["own_misses_per_token"] * row["expert_bytes"] / disk
    row["floor_share"] = max(t_disk, t_memory) / measured
    row["serial_share"] = (t_disk + t_memory) / measured
    if not resident or row["budget"] == "all":
        return
    t_compute = median(r["decode"]["seconds_per_token"] for r in resident)
    own_disk = row["decode"]["bytes_per_token"] / disk
    row["resident_share"] = t_compute / measured
    reading = row["decode"]["read_busy_seconds"]
    row["own_overlap"] = (reading + t_compute - measured) / max(1e-9, min(reading, t_compute))
    expert = median(r["decode"]["compute_seconds"] / r["experts_per_token"] for r in resident)
    blind = _blind_seconds(row, t_compute, expert, row["expert_bytes"] / disk)
    row["blind_share"] = blind / measured
    row["most_overlap"] = (own_disk + t_compute - blind) / max(1e-9, min(own_disk, t_compute))
    row["overlap"] = (own_disk + t_compute - measured) / max(1e-9, min(own_disk, t_compute))
    prompt = median(r["prefill"]["seconds"] for r in resident)
    bound = max(row["prefill"]["bytes_read"] / disk, prompt)
    row["ttft_of_bound"] = row["prefill"]["seconds"] / (bound + bound / layers)


def _blind_seconds(row: dict[str, Any], compute: float, expert: float, read: float) -> float:
    """A token's time by the best schedule without foresight.

    `compute`: a token's, all resident; `expert`, `read`: of one expert.
    """
    missing, used = row["missing_by_layer"], row["experts_per_token"]
    tokens = row["decode"]["uses"] / used
    total = tokens * (compute - used * expert)
    for count in missing:
        ended = (tokens * used / len(missing) - count) * expert
        for n in range(1, count + 1):
            ended = max(ended, n * read) + expert
        total += ended
    return float(total / tokens)


def _print(rows: list[dict[str, Any]]) -> None:
    names = (
        "budget slots tok/s hit own-hit of-serial of-floor of-blind overlap most own TTFT-128 of-bound disk memory peak"
    )
    print("".join(f"{name:>11}" for name in names.split()))
    shares = ("blind_share", "overlap", "most_overlap", "own_overlap")
    for row in rows:
        used = row["experts_per_token"]
        cells = [
            row["budget"],
            str(row["slots"]),
            f"{1 / row['decode']['seconds_per_token']:.2f}",
            f"{row['decode']['hit_ratio']:.3f}",
            f"{1 - row['own_misses_per_token'] / used:.3f}",
            f"{row['serial_share']:.2f}",
            f"{row['floor_share']:.2f}",
            *(f"{row[name]:.2f}" if name in row else "-" for name in shares),
            f"{row['prefill']['seconds']:.2f} s",
            f"{row['ttft_of_bound']:.2f}" if "ttft_of_bound" in row else "-",
            f"{(row['disk_rate'] or 0) / 1e9:.2f} GB/s",
            f"{row['memory_rate'] / 1e9:.0f} GB/s",
            f"{format_bytes(row['cgroup_peak'] or 0)}" + ("" if row["quiet"] else " !"),
        ]
        print("".join(f"{cell:>11}" for cell in cells))


if __name__ == "__main__":
    main()
