"""What our Python costs: `plan_layer` alone, and one MoE layer against a bare loop of the same linears.

    python -m bench.overhead [--repeats 300]

The layer has 64 experts, top-8, of the embedded model's size, so that arithmetic takes next to nothing and what is left
is Python and dispatch; once with our kernel, where this machine has it, and once with the library's arithmetic. "Bare
loop" is the least any eager implementation must do for one token: for every expert the two matrix products (with their
transposed views), the gate's activation and product, the routing weight, and the sum. "With misses" gives every layer
about four misses whose bytes are there at once: it counts planning, tables, queues and waking threads, not the disk.
"Answers" is finding what is missing, with its substitutes, and choosing among own copy, low copy, substitute, nobody
and, where there is one, the CPU; half of the missing experts have their low copy at hand. On two busy cores of an EPYC
(Zen 4) it takes 27 us for 2 missing, 32 for 3, 37 for 4 and 79 for all 8; beside a CPU 27, 36, 48 and 130.
Prints medians in microseconds and ends with one JSON line.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import transformers

from smoe import from_pretrained
from smoe.expert import LOW
from smoe.policy.answering import Answering
from smoe.policy.answers import AnswerCosts, choose
from smoe.policy.eviction.base import EvictionSettings
from smoe.policy.eviction.lru import LRU
from smoe.policy.eviction.score import ScoreWindow
from smoe.policy.load_or_compute import Balance, Costs
from smoe.policy.missing_experts import missing_experts
from smoe.policy.plan_prefetch import plan_prefetch
from smoe.policy.plan_progress import carry_out
from smoe.policy.prediction import Prediction
from smoe.policy.prices import LayerPrices, PriceTable
from smoe.policy.quality_budget import QualityBudget
from smoe.policy.registry import make_eviction_for
from smoe.policy.residency import ExpertsAtHand, PoolSize, SlotTable
from smoe.policy.step import EXACT_SWITCHES, decide, observation, plan_layer
from smoe.policy.substitution import applied, substitute
from smoe.routing import Phase, Routing
from smoe.runtime.step import Step

EXPERTS, TOP_K, LAYERS, HIDDEN, INNER = 64, 8, 12, 192, 32
ALPHA = 0.3
MISSING_BUDGET = "20MiB"
"""About 60 % of the experts resident: with random routing some four of eight miss."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=300)
    repeats = parser.parse_args().repeats
    results: dict[str, Any] = {f"plan_layer_us_{name}": us for name, us in plan_costs(repeats).items()}
    results |= prefetch_costs(repeats)
    results |= answer_costs(repeats)
    results["decision_with_answers_us"] = decision_cost(None, repeats)
    results["decision_with_answers_us_beside_cpu"] = decision_cost(1.2e-3, repeats)
    results |= layer_costs(repeats)
    for name, value in results.items():
        print(f"{name:<44}{value:>10.1f}")
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    print(json.dumps({k: round(v, 1) for k, v in results.items()} | versions))


def plan_costs(repeats: int) -> dict[str, float]:
    """Median microseconds of `plan_layer`, by batch and residency."""
    costs: dict[str, float] = {}
    for batch in (1, 3, 8):
        for name, slots in (("resident", EXPERTS * LAYERS), ("half", EXPERTS * LAYERS // 2)):
            costs[f"batch_{batch}_{name}"] = _plan_cost(batch, slots, repeats)
        costs[f"batch_{batch}_half_alpha_{ALPHA}"] = _plan_cost(batch, EXPERTS * LAYERS // 2, repeats, ALPHA)
    return costs


def _plan_cost(batch: int, slots: int, repeats: int, alpha: float = 0.0) -> float:
    """With `alpha`, substitution and the score window's victims are part of the plan."""
    table, chance = SlotTable(PoolSize(slots, 8)), random.Random(0)
    eviction = LRU() if alpha == 0 else ScoreWindow()
    seconds: list[float] = []
    for step in range(repeats * 4):
        routing = _routing(step % LAYERS, batch, chance)
        eviction.observe(observation(routing))
        started = perf_counter()
        if alpha > 0:
            chosen = substitute(routing, ExpertsAtHand(routing.layer, table), alpha, share=True, drop=False)
            routing = applied(chosen, routing)
        plan = plan_layer(routing, table, eviction, slots // LAYERS)
        seconds.append(perf_counter() - started)
        carry_out(plan, table, eviction)
    return statistics.median(seconds[repeats:]) * 1e6


def prefetch_costs(repeats: int) -> dict[str, float]:
    """Median microseconds of `plan_prefetch`, and of sharing three misses out, at half the experts resident."""
    slots, chance = EXPERTS * LAYERS // 2, random.Random(0)
    table, eviction = SlotTable(PoolSize(slots, 8)), LRU()
    balance = Balance("optimal", "score", Costs(1.0, 0.7))
    prefetch: list[float] = []
    split: list[float] = []
    for step in range(repeats * 4):
        layer = step % LAYERS
        plan = plan_layer(_routing(layer, 1, chance), table, eviction, slots // LAYERS)
        following = _routing((layer + 1) % LAYERS, 1, chance)
        started = perf_counter()
        plan_prefetch([Prediction(following.layer, following.top_k_index[0])], table, plan)
        prefetch.append(perf_counter() - started)
        started = perf_counter()
        balance.split([serve for serve in plan.serves if serve.waits][:3], following)
        split.append(perf_counter() - started)
        carry_out(plan, table, eviction)
    return {
        "plan_prefetch_us": statistics.median(prefetch[repeats:]) * 1e6,
        "balance_us": statistics.median(split[repeats:]) * 1e6,
    }


def answer_costs(repeats: int) -> dict[str, float]:
    """Median microseconds of choosing answers at batch 1, by the number of missing experts, without and with a CPU."""
    prices, costs = LayerPrices(1e-4, 2e-3, 3e-3), AnswerCosts(1e-3, 2.8e-4, None, 2e-4)
    cases = [(count, host) for count in (2, 3, 4, TOP_K) for host in (None, 1.2e-3)]
    return {
        f"answers_us_{count}_missing{'_beside_cpu' if host else ''}": _answer_cost(
            count, costs._replace(host=host), prices, repeats
        )
        for count, host in cases
    }


def decision_cost(host: float | None, repeats: int) -> float:
    """Median microseconds of a whole decision at batch 1, a third of the experts resident and a sixth of the low
    copies: answers within 0.01 nats a token, statistics and plan.

    Between two of them an exact step brings own copies in: else nobody would, and all eight choices be missing."""
    sizes = PoolSize(EXPERTS * LAYERS // 3, 8), PoolSize(EXPERTS * LAYERS // 6, 8, form=LOW)
    table, chance = SlotTable(*sizes), random.Random(0)
    eviction = make_eviction_for(EvictionSettings("lru"), sizes, dict.fromkeys(range(LAYERS), EXPERTS))
    prices = PriceTable(dict.fromkeys(range(LAYERS), LayerPrices(1e-4, 2e-3, 3e-3)))
    answering, costs = Answering(prices, QualityBudget(0.01, 10.0)), AnswerCosts(1e-3, 2.8e-4, host, 2e-4)
    seconds: list[float] = []
    for step in range(repeats * 4):
        routing = _routing(step % LAYERS, 1, chance)
        started = perf_counter()
        plan = decide(
            routing, table, eviction, 1, EXACT_SWITCHES, answer=lambda given, of: answering.answer(given, of, costs)
        ).plan
        seconds.append(perf_counter() - started)
        carry_out(plan, table, eviction)
        exact = decide(_routing(step % LAYERS, 1, chance), table, eviction, 1, EXACT_SWITCHES).plan
        carry_out(exact, table, eviction)
    return statistics.median(seconds[repeats:]) * 1e6


def _answer_cost(count: int, costs: AnswerCosts, prices: LayerPrices, repeats: int) -> float:
    """At a rate at which every answer is worth it for some expert."""
    chance = random.Random(0)
    seconds: list[float] = []
    for _ in range(repeats * 2):
        routing = _routing(0, 1, chance)
        chosen = routing.top_k_index[0]
        others = [expert for expert in range(EXPERTS) if expert not in chosen]
        at_hand = {*chance.sample(chosen, TOP_K - count), *chance.sample(others, len(others) // 2)}
        low_here = {expert for expert in range(EXPERTS) if chance.random() < 0.5}
        started = perf_counter()
        choose(missing_experts(routing, at_hand, low_here), costs, prices, 10.0, TOP_K)
        seconds.append(perf_counter() - started)
    return statistics.median(seconds[repeats:]) * 1e6


def _routing(layer: int, batch: int, chance: random.Random) -> Routing:
    """Scores fall with the rank as a trained router's do (the demo model's mean), experts are drawn anew each time."""
    rows, scores, weights = [], [], []
    for _ in range(batch):
        order = chance.sample(range(EXPERTS), EXPERTS)
        falling = [0.0] * EXPERTS
        for rank, expert in enumerate(order):
            falling[expert] = 0.2 / (rank + 1) ** 0.9 * chance.uniform(0.95, 1.05)
        rows.append(sorted(order, key=lambda expert: -falling[expert])[:TOP_K])
        scores.append(falling)
        chosen = [falling[expert] for expert in rows[-1]]
        weights.append([score / sum(chosen) for score in chosen])
    return Routing(layer, Phase.DECODE, EXPERTS, rows, scores, weights=weights)


def layer_costs(repeats: int) -> dict[str, float]:
    """Median microseconds of one layer, and what it costs above the bare loop."""
    with tempfile.TemporaryDirectory() as folder:
        _save_toy(Path(folder))
        bare = _bare_loop(repeats)
        costs = {"bare_loop_us": bare}
        for kernels in ("auto", "torch"):
            resident, _ = _layer(folder, "64MiB", kernels, repeats, reads=True)
            missing, misses = _layer(folder, MISSING_BUDGET, kernels, repeats, reads=False)
            costs |= {
                f"{kernels}_resident_us": resident,
                f"{kernels}_with_misses_us": missing,
                f"{kernels}_misses_a_layer": misses,
                f"{kernels}_overhead_resident_us": resident - bare,
                f"{kernels}_overhead_with_misses_us": missing - bare,
            }
    return costs


def _save_toy(folder: Path) -> None:
    config = transformers.Qwen3MoeConfig(
        vocab_size=64, hidden_size=HIDDEN, intermediate_size=64, num_hidden_layers=LAYERS, num_attention_heads=2,
        num_key_value_heads=2, head_dim=16, moe_intermediate_size=INNER, num_experts=EXPERTS, num_experts_per_tok=TOP_K,
        dtype="bfloat16",
    )  # fmt: skip
    transformers.Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def _bare_loop(repeats: int) -> float:
    up = [torch.randn(2 * INNER, HIDDEN).bfloat16() for _ in range(TOP_K)]
    down = [torch.randn(HIDDEN, INNER).bfloat16() for _ in range(TOP_K)]
    weights = torch.rand(TOP_K).bfloat16()
    x = torch.randn(1, HIDDEN).bfloat16()

    def loop() -> torch.Tensor:
        total = torch.zeros_like(x)
        for e in range(TOP_K):
            gate, rest = torch.nn.functional.linear(x, up[e]).chunk(2, dim=-1)
            y = torch.nn.functional.linear(torch.nn.functional.silu(gate) * rest, down[e])
            total += y * weights[e]
        return total

    with torch.no_grad():
        return _median(loop, repeats)


def _layer(folder: str, memory: str, kernels: str, repeats: int, reads: bool) -> tuple[float, float]:
    """(microseconds a layer, misses a layer) of decode steps with random routing."""
    model = from_pretrained(folder, memory=memory, kernels=kernels, context_tokens=64, prefill_tokens=64)
    executor = model.offload.executor
    if not reads:
        # the bytes are there at once
        executor.arrivals.transfers._mover.move = lambda ticket, between: 0  # type: ignore[method-assign]
    chance = random.Random(0)
    x = torch.randn(1, HIDDEN).bfloat16()
    weights = torch.rand(1, TOP_K).bfloat16()
    indices = [torch.tensor([chance.sample(range(EXPERTS), TOP_K)]) for _ in range(257)]
    step = iter(range(10**9))

    def run() -> object:
        n = next(step)
        return executor.run(Step(n % LAYERS, Phase.DECODE, x, indices[n % 257], weights))

    with torch.no_grad():
        for _ in range(1500):
            run()
        before = executor.counters.loads
        cost = _median(run, repeats)
        misses = (executor.counters.loads - before) / repeats
    model.offload.close()
    return cost, misses


def _median(function: Callable[[], object], repeats: int) -> float:
    seconds: Sequence[float] = [_timed(function) for _ in range(repeats)]
    return statistics.median(seconds) * 1e6


def _timed(function: Callable[[], object]) -> float:
    started = perf_counter()
    function()
    return perf_counter() - started


if __name__ == "__main__":
    main()
