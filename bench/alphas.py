"""What a threshold brings: hit ratios and simulated times of alpha 0 to 0.6, beside policies and static placements.

    python -m bench.alphas [--model demo] [--texts FILE ...] [--resident 40%] [--out FILE.json]

The routers are heard once, with all experts in memory: a prompt of 64 tokens, then 536 one by one. The planner replays
that through a cache of the size asked for; what substitution would change in later routing is not seen. Times are those
of the virtual clock (`smoe.simulator.virtual_clock`) at the shipped profiles, experts of 9 MiB, the best split between
link and CPU, no prefetch, and nothing for our own Python. Prints tables and ends with one JSON line.

Static placements never change: *first* the first experts of every layer (the papers' kind), *prompt* what reading the
prompt leaves, *most used* the most used of the first half of the text, judged on the second.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from smoe import __version__, from_pretrained
from smoe.eval.texts import read_documents
from smoe.generation.teacher_forcing import forced
from smoe.load.tokenizer import load_tokenizer
from smoe.memory.emulation import read_profile
from smoe.policy.budget import MIN_STAGING_SLOTS
from smoe.policy.eviction.belady import Belady
from smoe.policy.eviction.lru import LRU
from smoe.policy.plan_progress import carry_out
from smoe.policy.registry import make_eviction
from smoe.policy.residency import PoolSize, SlotTable
from smoe.policy.step import EXACT_SWITCHES, Switches, decide, layer_share, observation
from smoe.report.replayed import replayed_on
from smoe.routing import Phase, Routing
from smoe.simulator.replay import replay
from smoe.units import parse_share

PROMPT_TOKENS, TOKENS, EXPERT_BYTES = 64, 600, 9 * 2**20
ALPHAS = [round(0.05 * n, 2) for n in range(13)]
EVICTIONS, PROFILES = ("lru", "lfu", "score"), ("rtx-a6000", "rtx-4060-ti")


def main() -> None:
    """Every text, one table each."""
    given = parse()
    found: dict[str, Any] = {"smoe": __version__, "model": given.model, "resident": given.resident, "texts": {}}
    for path in [None, *given.texts]:
        trace = heard(given.model, path)
        slots = int(parse_share(given.resident) * sum(layers_of(trace).values()))
        name = "stories" if path is None else path.stem
        found["texts"][name] = {"slots": slots, "static": static(trace, slots), "alphas": swept(trace, slots)}
        print_table(name, found["texts"][name])
    if given.out is not None:
        given.out.write_text(json.dumps(found) + "\n", encoding="utf8")
    print(json.dumps(found))


def parse() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description="Hit ratios and simulated times by alpha.")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--texts", type=Path, nargs="*", default=[], help="beside the demo's stories")
    parser.add_argument("--resident", default="40%")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def heard(model: str, path: Path | None) -> list[Routing]:
    """What the routers say of a text, scores included."""
    tokenizer = load_tokenizer(model)
    ids = [token for document in read_documents(path) for token in tokenizer(document)["input_ids"]][:TOKENS]
    if len(ids) < TOKENS:
        sys.exit(f"{path} has {len(ids)} tokens; {TOKENS} are needed")
    loaded = from_pretrained(model, resident=1.0, eviction="score", context_tokens=TOKENS)
    engine: Any = loaded.offload
    with engine, engine.recording() as trace:
        cache = engine.new_cache()
        loaded(input_ids=torch.tensor([ids[:PROMPT_TOKENS]]), past_key_values=cache, use_cache=True)
        for _ in forced(loaded, ids[PROMPT_TOKENS:], cache):
            pass
        return list(trace)


def layers_of(trace: Sequence[Routing]) -> dict[int, int]:
    """Experts of every layer."""
    return {routing.layer: routing.experts for routing in trace}


def swept(trace: Sequence[Routing], slots: int) -> list[dict[str, Any]]:
    """Every eviction at every alpha, and Belady where nothing is replaced."""
    rows = []
    for alpha in ALPHAS:
        hits = {
            name: replay(trace, slots, MIN_STAGING_SLOTS, make_eviction(name), Switches(alpha)).hit_ratio
            for name in EVICTIONS
        }
        if alpha == 0:
            belady = Belady(map(observation, trace))
            hits["belady"] = replay(trace, slots, MIN_STAGING_SLOTS, belady).hit_ratio
        seconds = {
            profile: {name: timed(trace, slots, name, alpha, profile) for name in EVICTIONS} for profile in PROFILES
        }
        rows.append({"alpha": alpha, "hit_ratio": hits, "seconds_per_token": seconds})
    return rows


def timed(trace: Sequence[Routing], slots: int, eviction: str, alpha: float, profile: str) -> float:
    """Simulated seconds a token."""
    policy, device = make_eviction(eviction), read_profile(profile)
    run = replayed_on(device, EXPERT_BYTES, trace, slots, policy, Switches(alpha), balance="optimal")
    return float(run["seconds_per_step"])


def static(trace: Sequence[Routing], slots: int) -> dict[str, float]:
    """Share of the uses that a set of experts which never changes would have had in memory."""
    decode = [routing for routing in trace if routing.phase is Phase.DECODE]
    half = len(decode) // 2
    uses = Counter(key for routing in decode[:half] for key in keys_of(routing))
    layers = layers_of(trace)
    first = {
        (layer, expert) for layer, count in layers.items() for expert in range(slots * count // sum(layers.values()))
    }
    return {
        "first": share_in(first, decode),
        "prompt": share_in(left_by_prompt(trace, slots), decode),
        "most used": share_in({key for key, _ in uses.most_common(slots)}, decode[half:]),
    }


def left_by_prompt(trace: Sequence[Routing], slots: int) -> set[tuple[int, int]]:
    """Who is resident when the prompt has been read."""
    table, eviction = SlotTable(PoolSize(slots, MIN_STAGING_SLOTS)), LRU()
    for routing in trace:
        if routing.phase is Phase.PREFILL:
            plan = decide(routing, table, eviction, layer_share(slots, len(layers_of(trace))), EXACT_SWITCHES).plan
            carry_out(plan, table, eviction)
    return {(layer, expert) for layer, expert, _ in table.ready}


def keys_of(routing: Routing) -> list[tuple[int, int]]:
    """(layer, expert) of every choice."""
    return [(routing.layer, expert) for row in routing.top_k_index for expert in row]


def share_in(resident: set[tuple[int, int]], decode: Sequence[Routing]) -> float:
    """Of the uses of these steps."""
    uses = [key for routing in decode for key in keys_of(routing)]
    return sum(key in resident for key in uses) / len(uses)


def print_table(name: str, text: dict[str, Any]) -> None:
    """Hit ratios, then milliseconds."""
    print(f"\n{name}, {text['slots']} slots; static: {', '.join(f'{k} {v:.3f}' for k, v in text['static'].items())}")
    print("alpha" + "".join(f"{each:>8}" for each in EVICTIONS) + "".join(f"{each:>26}" for each in PROFILES))
    for row in text["alphas"]:
        times = (
            f"{1e3 * row['seconds_per_token'][p][e]:26.2f}"[18 * (n > 0) :]
            for p in PROFILES
            for n, e in enumerate(EVICTIONS)
        )
        print(f"{row['alpha']:5.2f}" + "".join(f"{row['hit_ratio'][each]:8.3f}" for each in EVICTIONS) + "".join(times))


if __name__ == "__main__":
    main()
