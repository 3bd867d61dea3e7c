"""Engine and simulator carry out the same plans: a recorded run, replayed, gives the engine's own hits and loads,
exactly.

Would catch: a policy that hears things in another order in the engine than in the simulator, a hit counted twice, a
cache that is warm from the engine's own trials.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from smoe.expert import LOW
from smoe.load.priced_answers import PricedAnswers
from smoe.metrics import Counters
from smoe.policy.answers import AnswerCosts
from smoe.policy.plan import LayerPlan
from smoe.policy.plan_progress import carry_out
from smoe.policy.prices import LayerPrices, PriceTable
from smoe.policy.registry import make_eviction
from smoe.policy.residency import PoolSize, SlotTable
from smoe.policy.step import Decision, Switches, decide, layer_shares, observation
from smoe.routing import LAST_TOKENS, Phase, Routing
from smoe.runtime.observer import StepObserver
from smoe.simulator.replay import replay
from tests import gguf_toy, oracle, zoo
from tests.packs import pack_folder

Open = Callable[..., PreTrainedModel]


def simulated(
    trace: Sequence[Routing], cache_slots: int, staging_slots: int, eviction_name: str, keep: str = "last-uses"
) -> Counters:
    """The engine's counters, from plans that are carried out on nothing."""
    table = SlotTable(PoolSize(cache_slots, staging_slots))
    eviction, counters = make_eviction(eviction_name), Counters()
    layers = len({routing.layer for routing in trace})
    for routing in trace:
        plan = decide(routing, table, eviction, max(1, cache_slots // layers), Switches(prefill_keep=keep)).plan
        counters.loads += len(plan.loads)
        if routing.phase is Phase.DECODE:
            counters.decode_uses += len(plan.serves)
            counters.decode_hits += plan.hits
        else:
            counters.prefill_uses += len(plan.serves)
            counters.prefill_hits += plan.hits
        carry_out(plan, table, eviction)
        table.check()
    return counters


def events(counters: Counters) -> tuple[int, ...]:
    """What must agree. A prefill starts the next layer's reads early; the simulator has no need to, so an expert that
    was prefetched and wanted is a load in the one and a hit in the other.
    """
    early = counters.prefetches_used
    return (
        counters.decode_uses,
        counters.decode_hits,
        counters.prefill_uses,
        counters.prefill_hits - early,
        counters.loads + early,
    )


@pytest.mark.parametrize(
    ("family", "budget", "eviction"),
    [
        *(
            ("qwen2_moe", budget, eviction)
            for budget in ("full", "half", "fifth", "minimum")
            for eviction in ("lru", "lfu", "auto", "multidimensional")
        ),
        *(("deepseek_v3", budget, "lru") for budget in ("full", "half", "minimum")),  # experts only from layer 1 on
        ("deepseek_v3", "half", "multidimensional"),  # which counts layers to the running one
    ],
)
def test_replay_counts_what_the_engine_counted(
    family: str, budget: str, eviction: str, toy: Callable[..., Path], open_model: Open
) -> None:
    """Two prompts of different lengths after each other: the second prefill finds a cache that decoding has filled."""
    model = open_model(toy(family), budget, eviction=eviction)
    engine = model.offload
    with engine.recording() as trace:
        oracle.greedy(model, torch.cat([oracle.PROMPT, oracle.PROMPT.flip(1)], dim=1), 24)  # longer than LAST_TOKENS
        oracle.greedy(model, oracle.PROMPT[:, :9].flip(1), 24)
    ledger = engine.ledger
    counted = engine.stats()
    assert events(simulated(trace, ledger.cache_slots, ledger.staging_slots, eviction)) == events(counted)

    counts = replay(trace, ledger.cache_slots, ledger.staging_slots, make_eviction(eviction))
    assert (counts.uses, counts.uses - counts.misses) == (counted.decode_uses, counted.decode_hits)
    assert counts.hit_ratio == pytest.approx(counted.hit_ratio)
    assert counted.decode_uses > 0 and counted.prefill_uses > 0


class Plans(StepObserver):
    """What an engine decided in its decode steps."""

    def __init__(self) -> None:
        self.kept: list[Any] = []

    def planned(self, routing: Routing, decision: Decision) -> None:
        if routing.phase is Phase.DECODE:
            self.kept.append(without_slots(decision.plan))


def without_slots(plan: LayerPlan) -> Any:
    """A plan but for the numbers of its slots: a prefill's early reads leave them in another order."""
    loads = [load._replace(slot=0) for load in plan.loads]
    return plan._replace(loads=loads, spare={})


@pytest.mark.parametrize("eviction", ["lru", "lfu", "score", "auto"])
@pytest.mark.parametrize("sizes", [1, 2])
def test_a_recorded_run_gives_the_same_plans(
    sizes: int, eviction: str, toy: Callable[..., Path], open_model: Open, tmp_path: Path
) -> None:
    """Not only as many hits and loads: who serves in which order, what is loaded for whom, and who has to go."""
    file = toy("qwen2_moe") if sizes == 1 else gguf_toy.quantised(tmp_path / "toy.gguf", "Q4_K_M")[0]
    model = open_model(file, "half", eviction=eviction)
    engine, plans = model.offload, Plans()
    assert len(engine.ledger.pools) == sizes
    with engine.recording() as trace, engine.observed_by(plans):
        oracle.greedy(model, oracle.PROMPT, 24)
        oracle.greedy(model, oracle.PROMPT[:, :9].flip(1), 24)
    table, policy, replayed = SlotTable(*engine.ledger.pools), engine.fresh_eviction(), []
    shares = layer_shares(table, list(engine.store.layers))
    for routing in trace:
        plan = decide(routing, table, policy, shares[routing.layer], Switches()).plan
        if routing.phase is Phase.DECODE:
            replayed.append(without_slots(plan))
        carry_out(plan, table, policy)
    assert plans.kept == replayed
    assert sum(len(plan.loads) for plan in replayed) > 20


@pytest.mark.parametrize("eviction", ["lru", "multidimensional"])
@pytest.mark.parametrize("low_use", ["asked", "meanwhile"])
@pytest.mark.parametrize("sequences", [1, 3])
def test_a_recorded_run_with_low_copies_gives_the_same_plans(
    sequences: int, low_use: str, eviction: str, toy: Callable[..., Path], open_model: Open, tmp_path: Path
) -> None:
    """And a replay's penalty is what counting the loads of these plans gives. Nothing is read early: the engine then
    has experts at hand that the simulator does not."""
    folder = Path(shutil.copytree(toy("qwen2_moe"), tmp_path / "model"))
    pack_folder(folder, precision="int4")
    model = open_model(
        folder,
        "half",
        eviction=eviction,
        low_precision="int4",
        low_threshold=0.55,
        skip_threshold=0.8,
        low_meanwhile=low_use == "meanwhile",
        max_sequences=sequences,
    )
    engine, plans = model.offload, Plans()
    engine.executor.predict_by({})
    engine.executor._upgrade = lambda _: None  # what comes in idle time hangs on the clock
    with engine.recording() as trace, engine.observed_by(plans):
        oracle.greedy(model, oracle.PROMPT.reshape(sequences, -1), 24)
        oracle.greedy(model, oracle.PROMPT[:, :9].flip(1), 24)
    switches = engine.executor.substitution.switches
    assert switches.low_use == low_use
    table, policy, replayed = SlotTable(*engine.ledger.pools), engine.fresh_eviction(), []
    shares, skipped = layer_shares(table, list(engine.store.layers)), 0
    for routing in trace:
        decision = decide(routing, table, policy, shares[routing.layer], switches)
        if routing.phase is Phase.DECODE:
            replayed.append(without_slots(decision.plan))
            skipped += decision.skipped
        carry_out(decision.plan, table, policy)
        table.check()
    assert plans.kept == replayed
    counted = engine.stats()
    loads = [load.key for plan in replayed for load in plan.loads]
    low = sum(key[2] == LOW for key in loads)
    assert (counted.low_loads, counted.skipped) == (low, skipped) and low > 0 and skipped > 0
    assert counted.low_served == sum(serve.key[2] == LOW for plan in replayed for serve in plan.serves)
    ledger = engine.ledger
    counts = replay(
        trace, ledger.cache_slots, ledger.pools[0].staging, engine.fresh_eviction(), switches, ledger.low_slots
    )
    assert (counts.misses, counts.low_misses) == (len(loads), low)
    assert counts.penalty(0.25) == pytest.approx(sum(0.25 if key[2] == LOW else 1 for key in loads))


@pytest.mark.parametrize("sequences", [1, 3])
@pytest.mark.parametrize("low_precision", ["int4", "none"])
def test_a_recorded_run_within_a_budget_gives_the_same_plans(
    low_precision: str, sequences: int, toy: Callable[..., Path], open_model: Open, tmp_path: Path
) -> None:
    """At the same costs: who is replaced, left out and comes low hangs on what was spent before."""
    folder = Path(shutil.copytree(toy("qwen3_moe"), tmp_path / "model"))
    pack_folder(folder, precision="int4")
    table = PriceTable({layer: LayerPrices(2e-4, 3e-2, 2e-2) for layer in range(8)})
    PricedAnswers(table, table, "int4", 1000, "made up").store(folder)
    switches = {"preset": "balanced", "prefetch": "none", "low_precision": low_precision, "eviction": "lru"}
    model = open_model(folder, "half", max_sequences=sequences, **switches)
    engine, plans = model.offload, Plans()
    answerer, costs = engine.executor.answerer, AnswerCosts(1e-3, 3e-4 if low_precision == "int4" else None)
    answerer._costs = lambda layer, running: costs
    engine.executor.predict_by({})
    with engine.recording() as trace, engine.observed_by(plans):
        oracle.greedy(model, oracle.PROMPT.reshape(sequences, -1), 24)
        oracle.greedy(model, oracle.PROMPT[:, :9].flip(1), 24)
    slots, policy, again, replayed = SlotTable(*engine.ledger.pools), engine.fresh_eviction(), answerer._make(), []
    shares = layer_shares(slots, list(engine.store.layers))
    for routing in trace:
        decision = decide(
            routing,
            slots,
            policy,
            shares[routing.layer],
            engine.executor.substitution.switches,
            answer=lambda routing, table: again.answer(routing, table, costs),
        )
        if routing.phase is Phase.DECODE:
            replayed.append(without_slots(decision.plan))
        carry_out(decision.plan, slots, policy)
        slots.check()
    assert plans.kept == replayed
    assert again.nats == answerer.answering.nats > 0
    counted = engine.stats()
    assert counted.skipped > 0 and (counted.low_loads > 0) == (low_precision == "int4")
    ledger = engine.ledger
    fresh = answerer._make()
    counts = replay(
        trace,
        ledger.cache_slots,
        ledger.pools[0].staging,
        engine.fresh_eviction(),
        engine.executor.substitution.switches,
        ledger.low_slots,
        lambda routing, table: fresh.answer(routing, table, costs),
    )
    assert (counts.misses, counts.low_misses) == (sum(len(plan.loads) for plan in replayed), counted.low_loads)


@pytest.mark.parametrize("eviction", ["lfu", "score"])
@pytest.mark.parametrize("keep", ["last-uses", "eviction"])
def test_who_stays_after_a_second_prompt(keep: str, eviction: str, toy: Callable[..., Path], open_model: Open) -> None:
    """Prompts in chunks and one after the other change who is resident: the same ones in engine and simulator."""
    model = open_model(toy("qwen2_moe"), "half", eviction=eviction, prefill_keep=keep, prefill_tokens=20)
    engine = model.offload
    with engine.recording() as trace:
        oracle.greedy(model, torch.cat([oracle.PROMPT, oracle.PROMPT.flip(1)], dim=1), 12)
        oracle.greedy(model, oracle.PROMPT[:, :9].flip(1), 12)
    ledger = engine.ledger
    expected = simulated(trace, ledger.cache_slots, ledger.staging_slots, eviction, keep)
    assert events(expected) == events(engine.stats())
    assert events(expected)[0] > 0
    roomy = open_model(toy("qwen2_moe"), "full", prefill_tokens=20)
    oracle.assert_same_steps(oracle.greedy(model), oracle.greedy(roomy))  # chunks are grade E1


@pytest.mark.parametrize("budget", ["half", "minimum"])
def test_replay_of_a_batch(budget: str, toy: Callable[..., Path], open_model: Open) -> None:
    """Several rows a decode step: more experts than top-k, and at the minimum more than there are slots (waves)."""
    model = open_model(toy("qwen2_moe"), budget, max_sequences=3)
    engine, prompts = model.offload, oracle.PROMPT.reshape(3, -1)
    with engine.recording() as trace:
        oracle.greedy(model, prompts, 10)
    widest = max(
        len({e for row in r.top_k_index for e in row}) for r in trace if r.phase is Phase.DECODE and len(r.top_k_index)
    )
    assert widest > 4
    ledger = engine.ledger
    assert events(simulated(trace, ledger.cache_slots, ledger.staging_slots, "auto")) == events(engine.stats())


def test_replay_of_a_batch_of_long_prompts(toy: Callable[..., Path], open_model: Open) -> None:
    """What stays of each prompt, by what each one ends with, in engine and simulator alike."""
    model = open_model(toy("qwen2_moe"), "fifth", max_sequences=3, eviction="score")
    engine, prompts = model.offload, torch.cat([oracle.PROMPT, oracle.PROMPT.flip(1)], dim=1)
    with engine.recording() as trace:
        oracle.greedy(model, torch.cat([prompts, prompts.flip(1), prompts.roll(5, 1)]), 10)
    ledger = engine.ledger
    assert events(simulated(trace, ledger.cache_slots, ledger.staging_slots, "score")) == events(engine.stats())


def test_policies_hear_the_end_of_every_prompt(toy: Callable[..., Path], open_model: Open) -> None:
    """Three prompts read together and one by one: the last tokens of each, with the scores that belong to them."""
    model = open_model(toy("mixtral"), "half", max_sequences=3, eviction="score")
    engine, prompts = model.offload, torch.cat([oracle.PROMPT, oracle.PROMPT.flip(1)], dim=1)
    prompts = torch.cat([prompts, prompts.flip(1), prompts.roll(5, 1)])  # longer than LAST_TOKENS
    alone: list[list[Routing]] = []
    with engine.recording() as trace:
        model(prompts)
    for prompt in prompts:
        with engine.recording() as single:
            model(prompt.unsqueeze(0))
        alone.append(single[:])
    for layer, routing in enumerate(trace):
        assert routing.sequences == 3 and routing.scores is not None
        share = LAST_TOKENS // 3
        assert len(routing.scores) == 3 * share
        heard = observation(routing)
        for number in range(3):
            expected = observation(alone[number][layer])
            same = [a == b for a, b in zip(heard.top_k_index[number::3], expected.top_k_index[-share:], strict=True)]
            assert sum(same) > 0.8 * share, "but for a choice that rounding decides"
            ours, theirs = torch.tensor(heard.scores[number::3]), torch.tensor(expected.scores[-share:])
            assert ((ours - theirs).abs() < 1e-3).float().mean() > 0.9


def test_recording_is_what_the_router_said(toy: Callable[..., Path], open_model: Open) -> None:
    """Against the unmodified model's own top-k; would catch a trace that is shifted by a layer or a step."""
    folder = toy("mixtral")
    chosen: list[list[list[int]]] = []
    theirs = oracle.reference(folder)
    for name, module in theirs.named_modules():
        if name.endswith(".experts"):
            module.register_forward_pre_hook(lambda _, args: chosen.append(args[1].tolist()))
    model = open_model(folder, "fifth")
    with model.offload.recording() as trace, torch.no_grad():
        ours = model.generate(oracle.PROMPT, max_new_tokens=6, min_new_tokens=6, do_sample=False)
        assert torch.equal(ours, theirs.generate(oracle.PROMPT, max_new_tokens=6, min_new_tokens=6, do_sample=False))
    layers = zoo.sparse_layers(theirs)
    assert [routing.layer for routing in trace] == list(layers) * 6
    assert [routing.top_k_index for routing in trace] == chosen
    assert [routing.phase for routing in trace] == [Phase.PREFILL] * len(layers) + [Phase.DECODE] * 5 * len(layers)


def test_recording_ends_with_its_block(toy: Callable[..., Path], open_model: Open) -> None:
    model = open_model(toy("mixtral"))
    with pytest.raises(ZeroDivisionError), model.offload.recording() as trace:
        raise ZeroDivisionError
    model(oracle.PROMPT)
    assert trace == []


def test_a_fresh_engine_has_done_nothing(toy: Callable[..., Path], open_model: Open) -> None:
    """The trials at load are not the user's: no counts, no residents, no statistics."""
    engine = open_model(toy("mixtral")).offload
    assert engine.stats() == Counters()
    assert not engine.executor.table.ready and not engine.executor.table.inflight
