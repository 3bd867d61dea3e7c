"""Substitution in a running engine: what it must not change, and that what it does change can be replayed.

Would catch: text that differs at alpha 0, a plan that depends on the clock, weights that stay with the expert that was
replaced, a counter that counts the wrong thing.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from smoe.errors import ConfigError
from smoe.memory.movers import SlotMover
from smoe.policy.registry import make_eviction
from smoe.policy.step import Switches
from smoe.presets import configure
from smoe.routing import Phase
from smoe.simulator.replay import replay
from tests import oracle, zoo

Open = Callable[..., PreTrainedModel]
LOSSY = {"alpha": 0.9, "eviction": "score", "prefetch": "none"}


@pytest.mark.parametrize(
    ("family", "prefetch"),
    [
        *((family, "none") for family in zoo.FAMILIES if family != "phimoe"),
        # beside what is read ahead: softmax, sigmoid and groups, top-k before softmax
        *((family, "next-gate") for family in ("mixtral", "deepseek_v3", "gpt_oss")),
    ],
)
def test_alpha_zero_is_exact(family: str, prefetch: str, toy: Callable[..., Path], open_model: Open) -> None:
    folder = toy(family)
    model = open_model(folder, "fifth", eviction="score", prefetch=prefetch)
    oracle.assert_same_steps(oracle.greedy(model), oracle.reference_steps(folder))
    assert model.offload.stats().substituted == 0


def test_with_everything_resident_nothing_is_replaced(toy: Callable[..., Path], open_model: Open) -> None:
    folder = toy("qwen3_moe")
    model = open_model(folder, "full", **LOSSY)
    oracle.greedy(model)  # brings in whatever it needs
    before = model.offload.stats()
    steps = oracle.greedy(model)
    interval = model.offload.stats() - before
    assert interval.low_score > 0
    assert interval.low_score_missing == interval.substituted == interval.top_score_missing == 0
    oracle.assert_same_steps(steps, oracle.reference_steps(folder))


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss", "minimax_m2"])
def test_substitution_spares_loads_and_is_deterministic(
    family: str, toy: Callable[..., Path], open_model: Open
) -> None:
    folder, runs = toy(family), []
    for switches in (LOSSY, LOSSY, {**LOSSY, "alpha": 0.0}):
        model = open_model(folder, "fifth", **switches)
        runs.append((oracle.greedy(model, new_tokens=2 * oracle.NEW_TOKENS), model.offload.stats()))
    (steps, counters), (again, _), (_, exact) = runs
    oracle.assert_same_steps(steps, again)
    assert 0 < counters.substituted <= counters.low_score_missing <= counters.low_score <= counters.routes
    assert counters.loads < exact.loads


@pytest.mark.parametrize(("prefetch", "eviction"), [("none", "score"), ("next-gate", "score"), ("next-gate", "auto")])
def test_reproducible_text_does_not_depend_on_timing(
    prefetch: str, eviction: str, toy: Callable[..., Path], open_model: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reads that take a random while, one or two reading threads: the same logits to the last bit."""
    original, chance, runs = SlotMover.move, random.Random(0), []

    def slow(self: SlotMover, *args: Any) -> int:
        time.sleep(chance.choice([0, 0, 1e-3, 3e-3]))
        return original(self, *args)

    monkeypatch.setattr(SlotMover, "move", slow)
    for threads in (1, 2, 2):
        switches = {**LOSSY, "prefetch": prefetch, "eviction": eviction, "reproducible": True, "io_threads": threads}
        model = open_model(toy("deepseek_v2"), "fifth", **switches)
        runs.append(oracle.greedy(model))
        assert model.offload.stats().substituted > 0
    oracle.assert_same_steps(runs[0], runs[1])
    oracle.assert_same_steps(runs[0], runs[2])


def test_reproducible_refuses_what_would_not_be() -> None:
    with pytest.raises(ConfigError, match="values of `eviction`: auto or score"):
        configure(alpha=0.3, eviction="lru", reproducible=True)
    configure(alpha=0.3, eviction="auto", reproducible=True)
    configure(alpha=0.0, eviction="lru", reproducible=True)


@pytest.mark.parametrize("rows", [1, 3])
def test_a_recorded_run_replays_to_the_same_counts(rows: int, toy: Callable[..., Path], open_model: Open) -> None:
    """The planner sees nothing but what is in the trace: no clock, no tensor, no order of arrival."""
    model = open_model(toy("qwen3_moe"), "fifth", max_sequences=rows, **LOSSY)
    engine = model.offload
    with engine.recording() as trace:
        oracle.greedy(model, oracle.PROMPT.expand(rows, -1).contiguous())
    ledger = engine.ledger
    counts = replay(trace, ledger.cache_slots, ledger.staging_slots, make_eviction("score"), Switches(alpha=0.9))
    counters = engine.stats()
    assert (counts.uses, counts.uses - counts.misses) == (counters.decode_uses, counters.decode_hits)


@pytest.mark.parametrize(
    "switches", [{}, {"substitute_weights": "inherited"}, {"substitutes": "drop"}, {"share_substitutes": False}]
)
def test_the_weights_are_the_rules_own(switches: dict[str, Any], toy: Callable[..., Path], open_model: Open) -> None:
    """What the experts are given, against the rule applied by hand to what the planner decided."""
    model = open_model(toy("qwen3_moe"), "fifth", **LOSSY, **switches)
    engine = model.offload
    given, seen = [], 0
    original = engine.executor.compute.decode

    def watched(plan: Any, hidden: torch.Tensor, weights: torch.Tensor, *asked: Any) -> torch.Tensor:
        given.append(({s.key[1]: s.routes for s in plan.serves}, weights))
        return original(plan, hidden, weights, *asked)

    engine.executor.compute.decode = watched
    with engine.recording() as trace:
        oracle.greedy(model)
    decoded = [routing for routing in trace if routing.phase is Phase.DECODE]
    assert len(decoded) == len(given)
    for routing, (served, weights) in zip(decoded, given, strict=True):
        (chosen,), (scores,) = routing.top_k_index, routing.scores  # type: ignore[misc]
        used = [0.0] * len(chosen)
        for expert, routes in served.items():
            used[routes[0]] = scores[expert]
        if set(served) == set(chosen):
            continue
        seen += 1
        if switches.get("substitute_weights") == "inherited":
            used = [scores[expert] for expert in chosen]
        expected = torch.tensor([used]) / sum(used)
        torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-7)
    assert seen > 0, "nothing was substituted: this test tested nothing"


def test_a_batch_pads_and_substitutes_at_once(toy: Callable[..., Path], open_model: Open) -> None:
    """Left-padded rows of different length, generated together: no padding route is ever served."""
    model = open_model(toy("qwen3_moe"), "fifth", max_sequences=2, **LOSSY)
    ids = torch.cat([oracle.PROMPT, oracle.PROMPT])
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    out = model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False)
    assert out.shape == (2, ids.shape[1] + 6)
    assert model.offload.stats().substituted > 0
    model.offload.executor.table.check()


def test_another_threshold_starts_a_new_trial(toy: Callable[..., Path], open_model: Open) -> None:
    """Would catch: a sweep in which one threshold's verdict on prefetch is the next one's."""
    model = open_model(toy("qwen3_moe"), "fifth", eviction="score", prefetch="auto")
    trial = model.offload.executor.prefetching.trial
    assert trial is not None
    trial.is_on = False
    model.offload.use_alpha(0.5)
    assert model.offload.executor.prefetching.trial is not None
    assert model.offload.executor.prefetching.trial.is_on


@pytest.mark.parametrize("alpha", [-0.1, 1.5, "much", True])
def test_a_bad_alpha_is_refused(alpha: Any) -> None:
    with pytest.raises(ConfigError, match="alpha"):
        configure(alpha=alpha)
