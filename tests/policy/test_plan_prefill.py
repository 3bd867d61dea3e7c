"""`plan_layer` of prompts by hand: what stays of them, what the CPU takes, what eviction policies hear.

Would catch: a prompt that throws away what decoding keeps, padding that counts as a token, a batch of which only the
last sequence decides.
"""

from __future__ import annotations

import pytest

from smoe.errors import BudgetError
from smoe.expert import EXACT
from smoe.policy.load_or_compute import Balance, Costs
from smoe.policy.plan import HOST, Load
from smoe.policy.plan_prefetch import plan_prefetch
from smoe.policy.plan_progress import Progress
from smoe.policy.prediction import Prediction
from smoe.policy.registry import make_eviction
from smoe.policy.residency import PoolSize, SlotTable
from smoe.policy.step import observation, plan_layer
from smoe.routing import LAST_TOKENS, Phase, Routing
from tests.policy.tables import (
    EXPERTS,
    Executor,
    decode,
    served,
)


def test_prefill_keeps_what_the_last_tokens_use() -> None:
    """A layer's share of two: of six experts those stay that the end of the prompt uses most."""
    rows = [[0, 1]] * LAST_TOKENS + [[2, 3]] * (LAST_TOKENS - 2) + [[4, 2]] * 2
    executor = Executor(SlotTable(PoolSize(6, 2)), make_eviction("lru"))
    served(executor, Routing(0, Phase.PREFILL, EXPERTS, rows), share=2)
    assert sorted(executor.table.cached()) == [(0, 2, EXACT), (0, 3, EXACT)]


def test_a_second_prompt_takes_the_places_of_the_first() -> None:
    """The layer is full: what the new prompt ends with stays instead of what it does not use, or no longer."""
    executor = Executor(SlotTable(PoolSize(6, 2)), make_eviction("lru"))
    served(executor, Routing(0, Phase.PREFILL, EXPERTS, [[0, 1]] * 4), share=2)
    served(executor, Routing(1, Phase.PREFILL, EXPERTS, [[0, 1]] * 4), share=2)
    served(executor, Routing(0, Phase.PREFILL, EXPERTS, [[0, 1]] * 9 + [[4, 5]] * LAST_TOKENS), share=2)
    assert sorted(executor.table.cached()) == [(0, 4, EXACT), (0, 5, EXACT), (1, 0, EXACT), (1, 1, EXACT)]


def test_who_has_not_served_yet_does_not_give_way() -> None:
    """Experts are taken in ascending order: 1 is computed after 0 has come and gone."""
    executor = Executor(SlotTable(PoolSize(6, 2)), make_eviction("lru"))
    served(executor, Routing(0, Phase.PREFILL, EXPERTS, [[1, 1]] * 4), share=1)
    served(executor, Routing(0, Phase.PREFILL, EXPERTS, [[1, 1]] + [[0, 0]] * LAST_TOKENS), share=1)
    assert list(executor.table.cached()) == [(0, 1, EXACT)]
    served(executor, Routing(0, Phase.PREFILL, EXPERTS, [[0, 0]] * LAST_TOKENS), share=1)
    assert list(executor.table.cached()) == [(0, 0, EXACT)], "not used at all: it need not have served"


def test_the_eviction_policy_may_decide_what_stays() -> None:
    """Expert 0 has been used by more steps than the resident of another layer, so it takes that one's slot."""
    eviction = make_eviction("lfu")
    executor = Executor(SlotTable(PoolSize(2, 2)), eviction)
    served(executor, decode(1, 2, 3))
    for _ in range(3):
        eviction.observe(decode(0, 0, 5))
    prompt = Routing(0, Phase.PREFILL, EXPERTS, [[0, 4]] * 4)
    eviction.observe(observation(prompt))
    plan = plan_layer(prompt, executor.table, eviction, 1, None, "eviction")
    executor.carry_out(plan)
    assert sorted(executor.table.cached()) == [(0, 0, EXACT), (1, 3, EXACT)]


def test_the_cpu_takes_a_prompts_experts_of_few_tokens() -> None:
    """Loads take 4 each; three experts for 9, 2 and 1 tokens that cost the CPU 1 a token, or 1.5 at least."""
    rows = [[0, 0]] * 9 + [[1, 1]] * 2 + [[2, 2]]
    costs = Costs(load=4.0, host=1.5, token=0.5)
    table, eviction = SlotTable(PoolSize(2, 2)), make_eviction("lru")
    table.pools[0].free_cache.clear()  # nothing stays
    plan = plan_layer(Routing(0, Phase.PREFILL, EXPERTS, rows), table, eviction, 1, Balance("host", "score", costs))
    assert [serve.key[1] for serve in plan.serves] == [0, 1, 2], "served in ascending order all the same"
    assert [serve.key[1] for serve in plan.serves if serve.unit == HOST] == [1, 2]
    assert [load.key[1] for load in plan.loads] == [0] and plan.hits == 0


def test_what_stays_is_loaded_though_the_cpu_is_faster() -> None:
    executor = Executor(SlotTable(PoolSize(1, 2)), make_eviction("lru"))
    costs = Costs(load=9.0, host=1.0, token=0.1)
    prompt = Routing(0, Phase.PREFILL, EXPERTS, [[0, 1], [0, 2]])
    plan = plan_layer(prompt, executor.table, executor.eviction, 1, Balance("optimal", "score", costs))
    assert [load.key[1] for load in plan.loads] == [0]
    executor.carry_out(plan)
    assert list(executor.table.cached()) == [(0, 0, EXACT)]


def test_an_eviction_policy_learns_from_the_end_of_a_prompt_and_from_every_decode_step() -> None:
    rows = [[0, 1]] * 5 + [[2, 3]] * LAST_TOKENS
    assert observation(Routing(0, Phase.PREFILL, EXPERTS, rows)).top_k_index == [[2, 3]] * LAST_TOKENS
    step = Routing(0, Phase.DECODE, EXPERTS, rows)
    assert observation(step) is step


def test_each_sequence_of_a_batch_has_its_own_end() -> None:
    """Three prompts in one step: what stays, and what policies hear, is the end of each, not that of the last."""
    early, late = [[0, 1]] * 8, [[2, 3]] * LAST_TOKENS
    rows = [*early, *late, *early, *([[4, 3]] * LAST_TOKENS), *early, *([[5, 3]] * LAST_TOKENS)]
    routing = Routing(0, Phase.PREFILL, EXPERTS, rows, None, sequences=3)
    heard = observation(routing).top_k_index
    assert heard == [[2, 3], [4, 3], [5, 3]] * (LAST_TOKENS // 3), "token by token, as a batch decodes"
    executor = Executor(SlotTable(PoolSize(12, 2)), make_eviction("lru"))
    served(executor, routing, share=4)
    assert sorted(key[1] for key in executor.table.cached()) == [2, 3, 4, 5]


def test_padding_is_no_last_token() -> None:
    """On the left (prompts of different lengths), on the right (a caller's mask), and a sequence of nothing else."""
    none = [EXPERTS] * 2
    rows = [[none, [0, 1], [0, 2]], [[1, 2], [1, 3], none], [none, none, none]]
    routing = Routing(0, Phase.PREFILL, EXPERTS, [row for part in rows for row in part], None, sequences=3)
    assert observation(routing).top_k_index == [[0, 1], [1, 2], [0, 2], [1, 3]]


def test_prefill_without_staging_is_a_budget_error() -> None:
    executor = Executor(SlotTable(PoolSize(2, 0)), make_eviction("lru"))
    served(executor, decode(1, 0, 1))
    with pytest.raises(BudgetError, match="staging"):
        plan_layer(Routing(0, Phase.PREFILL, EXPERTS, [[0, 1]]), executor.table, executor.eviction, 1)


def test_slots_of_promoted_copies_are_free_for_the_next_layer() -> None:
    """Copies that were read ahead become resident at once. In exchange, free cache slots become staging slots, so that
    the layer after the next can be read ahead, too."""
    table, eviction, layers, begun = SlotTable(PoolSize(12, 3)), make_eviction("lru"), [], list[Load]()
    progress = Progress(table, eviction, begun.append)
    for layer in range(3):
        plan = plan_layer(Routing(layer, Phase.PREFILL, EXPERTS, [[0, 1]] * 4), table, eviction, 4)
        progress.adopt(plan)
        ahead = plan_prefetch([Prediction(layer + 1, [0, 1])], table, plan)
        progress.prefetch(ahead)
        layers.append((plan.hits, len(ahead)))
        while begun:
            progress.arrive(begun.pop().key)
        for computed, serve in enumerate(plan.serves, start=1):
            progress.served(serve, computed)
    assert layers == [(0, 2), (2, 2), (2, 2)]
