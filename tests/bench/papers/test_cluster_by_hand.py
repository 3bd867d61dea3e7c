"""The simulated cluster on tokens so few that every second can be written down, and what it must keep on any.

Would catch: messages that take no time, a load before its slot is free, a wrong guess that costs nothing, a draft that
knows too early.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise, product
from math import inf
from typing import Any

import pytest

from bench.papers.cluster import AlignedDraft, ClusterSetting, decode
from bench.papers.cluster_worker import SimulatedWorker
from smoe.expert import EXACT
from smoe.simulator.cluster import DecodedToken, Wire
from smoe.simulator.cluster_machine import WorkerTimes
from smoe.simulator.events import Events

LAYER, LOAD, EXPERT, MESSAGE, DELAY = 1.0, 4.0, 0.5, 0.5, 0.5
ROW = 25.0
WIRE = Wire(100.0, DELAY, MESSAGE - ROW / 100.0)
"""A row takes `MESSAGE` of a port."""
AT_ONCE = Wire(inf)
CHOSEN = [[0, 1], [2, 3], [4, 5], [6, 7]] * 2
"""Of eight layers: four groups have two each, and load in each turn."""


def cluster(
    workers: int = 2, wire: Wire = WIRE, load: float = LOAD, slots: int = 1, chunk: float | None = None, **more: Any
) -> ClusterSetting:
    return ClusterSetting(LAYER, wire, ROW, [WorkerTimes(load, EXPERT, slots, chunk=chunk)] * workers, **more)


def token(*chosen: Sequence[int], named: Sequence[Sequence[int]] | None = None) -> DecodedToken:
    return DecodedToken(chosen, named)


def known(*chosen: Sequence[int]) -> DecodedToken:
    return DecodedToken(chosen, chosen)


def seconds(setting: ClusterSetting, *tokens: DecodedToken) -> list[float]:
    return decode(setting, tokens).token_seconds


def test_one_layer_one_miss() -> None:
    there_and_back = MESSAGE + DELAY + LOAD + EXPERT + DELAY + MESSAGE
    assert seconds(cluster(), token([3])) == [LAYER + there_and_back]


def test_rows_go_out_one_after_the_other() -> None:
    assert seconds(cluster(), token([3, 5])) == [LAYER + 2 * MESSAGE + DELAY + LOAD + EXPERT + DELAY + MESSAGE]


@pytest.mark.parametrize(("slots", "second_load"), [(1, LOAD + EXPERT + LOAD), (2, LOAD + LOAD)])
def test_one_worker_gets_a_row_once_and_sends_back_two(slots: int, second_load: float) -> None:
    """With one slot it must have computed the first before the second can come."""
    back = DELAY + (WIRE.message + 2 * ROW / 100.0)
    alone = cluster(1, slots=slots)
    assert seconds(alone, token([3, 5])) == [LAYER + MESSAGE + DELAY + second_load + EXPERT + back]


def test_a_load_known_early_enough_costs_nothing() -> None:
    run = decode(cluster(8, AT_ONCE), [known(*CHOSEN)] * 3)
    assert run.token_seconds[1:] == [8 * (LAYER + EXPERT)] * 2 and run.late_loads == 0
    assert run.loads == 3 * 16


@pytest.mark.parametrize(("groups", "load"), [(4, 6.0), (4, 20.0), (2, 6.0)])
def test_bound_by_loads_each_group_has_its_turn(groups: int, load: float) -> None:
    tokens = [known(*[[0, 1]] * 8)] * 4
    per_layer = max(LAYER + EXPERT, (load + EXPERT) / groups)
    assert seconds(cluster(2 * groups, AT_ONCE, load), *tokens)[-1] == pytest.approx(8 * per_layer)


def test_the_knee_of_equation_1_is_at_as_many_layers_as_there_are_groups() -> None:
    """G main's parts and G - 1 experts, G the number of groups: printed with their size, 2, it would be 2.5 here."""
    tokens, longest = [known(*[[0, 1]] * 8)] * 3, 4 * LAYER + 3 * EXPERT
    no_wait = 8 * (LAYER + EXPERT)
    assert seconds(cluster(8, AT_ONCE, longest), *tokens)[-1] == no_wait
    assert seconds(cluster(8, AT_ONCE, longest + 0.01), *tokens)[-1] > no_wait
    assert longest > 2 * LAYER + EXPERT


def test_a_wrong_guess_costs_a_load() -> None:
    right, wrong = known(*CHOSEN), token(*CHOSEN, named=[*CHOSEN[:2], [5, 6], *CHOSEN[3:]])
    run = decode(cluster(8, AT_ONCE), [right, right, wrong, right])
    every = 8 * (LAYER + EXPERT)
    assert run.token_seconds[1:] == [every, every + LOAD, every]
    assert run.late_loads == 1, "5 stays where it is, 4 comes in the place of 6"


@pytest.mark.parametrize(("chunk", "begins"), [(None, LOAD), (0.75, 1.5)])
def test_a_wrong_load_under_way_is_waited_for_or_given_up(chunk: float | None, begins: float) -> None:
    """The router speaks at 1.0; two chunks of 0.75 have come at 1.5."""
    wrong = token([3], named=[[4]])
    assert seconds(cluster(2, AT_ONCE, chunk=chunk, group_size=1), wrong) == [begins + LOAD + EXPERT]


def test_a_spare_worker_has_the_third_candidate() -> None:
    named = [[*chosen, spare] for chosen, spare in zip(CHOSEN, [5, 0, 1, 2] * 2, strict=True)]
    run = decode(cluster(12, AT_ONCE, group_size=3), [token(*CHOSEN, named=named)] * 3)
    assert run.token_seconds[1:] == [8 * (LAYER + EXPERT)] * 2 and run.late_loads == 0
    assert run.loads == 3 * 8 * 3


def test_where_groups_do_not_divide_the_layers_turns_may_run_on() -> None:
    """Layer 2 and the next token's layer 0 are the first group's: its load of 2 has 1 second, or 2.5."""
    tokens = [known([0, 1], [2, 3], [4, 5])] * 5
    fixed = cluster(4, AT_ONCE, 2.0)
    assert seconds(fixed, *tokens)[-1] == pytest.approx(3 * (LAYER + EXPERT) + 1.0)
    assert seconds(replace(fixed, turns_run_on=True), *tokens)[-1] == pytest.approx(3 * (LAYER + EXPERT))


def test_a_draft_departs_when_it_has_been_told() -> None:
    """A token takes 0.064 of the port, keys and values 0.236 more, a layer of the draft a quarter of a second."""
    wire, delay = Wire(1000.0, 0.1), 0.1
    told = AlignedDraft(0.25, kv_period=0, kv_bytes=236.0)
    after_naming = 0.064 + delay + LOAD + EXPERT + delay + 0.025
    setting = cluster(2, wire, group_size=1, draft=told)
    assert seconds(setting, known([3])) == [pytest.approx(0.064 + delay + 0.25 + after_naming)]
    late = replace(setting, draft=replace(told, kv_period=1))
    assert seconds(late, known([3])) == [pytest.approx(0.3 + delay + 0.25 + after_naming)]
    never = replace(setting, draft=replace(told, token_period=0))
    assert seconds(never, known([3])) == [pytest.approx(0.25 + after_naming)], "it begins with main"


def test_keys_and_values_hold_up_the_rows_behind_them() -> None:
    """The port is theirs until 2.0; main has spoken at 1.0, and the draft is too late to matter."""
    slow = AlignedDraft(9.0, kv_bytes=200.0 - 64.0)
    setting = cluster(2, Wire(100.0, DELAY), group_size=1, draft=slow)
    assert seconds(setting, known([3])) == [2.0 + 0.25 + DELAY + LOAD + EXPERT + DELAY + 0.25]
    early = replace(setting, draft=replace(slow, is_early=True))
    assert seconds(early, known([3])) == [1.0 + 0.25 + DELAY + LOAD + EXPERT + DELAY + 0.25], "they go after the rows"


def test_keys_and_values_of_several_tokens_travel_together() -> None:
    every = AlignedDraft(0.25, token_period=0, kv_period=2, kv_bytes=100.0)
    assert [every.is_sent(number) for number in range(4)] == [True, False, True, False]
    assert every.kv_message_bytes == 200.0 and replace(every, kv_since=False).kv_message_bytes == 100.0
    assert not any(AlignedDraft(0.25, token_period=0, kv_period=0).is_sent(number) for number in range(4))


def test_an_early_draft_has_the_next_token_loaded_when_it_begins() -> None:
    draft = AlignedDraft(0.25, is_early=True)
    setting = cluster(2, AT_ONCE, group_size=1, draft=draft, turns_run_on=True)
    first = 0.25 + LOAD + EXPERT
    right = known([1])
    assert seconds(setting, known([0]), right) == [first, LAYER + EXPERT]
    wrong = right._replace(own_is_right=False, astray=[[7]])
    assert seconds(setting, known([0]), wrong) == [first, 0.25 + LOAD + EXPERT], "as late as if it had waited"
    assert seconds(replace(setting, draft=replace(draft, is_early=False)), known([0]), right) == [first] * 2


def test_what_is_expected_for_a_later_step_is_not_held_yet() -> None:
    worker = SimulatedWorker(Events(), WorkerTimes(LOAD, EXPERT))
    for step in (0, 4):
        worker.name(step, [(step, 1, EXACT)])
    assert worker.holds(3) == {(0, 1, EXACT)} and worker.holds(4) == {(0, 1, EXACT), (4, 1, EXACT)}


def test_a_message_to_each_of_the_group_and_to_nobody_else() -> None:
    """Each token: one to the draft, and in every layer two with rows and one to the spare."""
    named = [[*chosen, spare] for chosen, spare in zip(CHOSEN, [5, 0, 1, 2] * 2, strict=True)]
    told = AlignedDraft(0.01, kv_period=0)
    for workers, group_size, names, messages in ((8, None, CHOSEN, 2), (12, 3, named, 3)):
        setting = cluster(workers, group_size=group_size, draft=told)
        run = decode(setting, [token(*CHOSEN, named=names)] * 3)
        assert len(run.busy["up"]) == 3 * (1 + 8 * messages) and len(run.busy["down"]) == 3 * 8 * 2


def test_what_was_named_is_forgotten_once_main_has_asked_for_something_else() -> None:
    events = Events()
    worker = SimulatedWorker(events, WorkerTimes(LOAD, EXPERT))
    answers: list[float] = []
    for step, named, asked in ((0, 1, 1), (1, 2, 3)):
        worker.name(step, [(step, named, EXACT)])
        worker.ask(step, [(step, asked, EXACT)], lambda: answers.append(events.now))
    worker.name(1, [(1, 4, EXACT)])
    events.run()
    assert answers == [LOAD + EXPERT, 2 * (LOAD + EXPERT)] and len(worker.loads) == 2


def test_by_finish_who_holds_an_expert_or_loads_faster_computes_it() -> None:
    here = cluster(2, AT_ONCE, slots=4, placement="finish")
    run = decode(here, [token([0, 1], [2, 3])] * 3)
    assert run.loads == 4 and run.token_seconds[1:] == [2 * (LAYER + EXPERT)] * 2
    unlike = replace(here, workers=[WorkerTimes(10.0, EXPERT, 4), WorkerTimes(1.0, EXPERT, 4)])
    assert seconds(unlike, token([5])) == [LAYER + 1.0 + EXPERT]


def test_by_turns_of_the_product_layers_go_round_the_groups() -> None:
    run = decode(cluster(6, AT_ONCE), [token([0, 1], [2, 3], [4, 5], [6, 7])])
    assert [len(run.busy[f"experts of {unit}"]) for unit in range(2, 8)] == [2, 2, 1, 1, 1, 1]


def drawn(seed: int, layers: int = 6, tokens: int = 12) -> list[DecodedToken]:
    chance = random.Random(seed)

    def experts(count: int) -> list[list[int]]:
        return [chance.sample(range(8), count) for _ in range(layers)]

    found = []
    for _ in range(tokens):
        chosen = experts(2)
        named = [each if chance.random() < 0.7 else other for each, other in zip(chosen, experts(2), strict=True)]
        found.append(DecodedToken(chosen, named, chance.random() < 0.7, experts(2)))
    return found


HOW: list[dict[str, Any]] = [
    {"placement": "finish"},
    {"placement": "finish", "main_names": True, "here": WorkerTimes(3.0, EXPERT, 4)},
    {"turns_run_on": True},
    {"group_size": 3},
    {"main_names": True},
]
SETTINGS = [
    cluster(workers, slots=slots, draft=draft, chunk=chunk, **how)
    for workers, how, slots, draft, chunk in product(
        (3, 8),
        HOW,
        (1, 3),
        (None, AlignedDraft(0.4, kv_period=2, kv_bytes=30.0), AlignedDraft(0.4, True, kv_bytes=30.0)),
        (None, 0.3),
    )
]


@pytest.mark.parametrize("seed", range(3))
def test_nothing_does_two_things_at_a_time(seed: int) -> None:
    for setting in SETTINGS:
        tokens = drawn(seed)
        run = decode(setting, tokens)
        assert len(run.token_seconds) == len(tokens) and len(run.layers) == 6 * len(tokens)
        for what, spans in {**run.busy, "layers": run.layers}.items():
            assert all(before[1] <= after[0] for before, after in pairwise(spans)), (what, setting)
            assert all(begin <= end for begin, end in spans), (what, setting)
        assert run.most_held <= max(setting.workers[0].slots, 4 if setting.here else 0)
        computed = sum(len(spans) for what, spans in run.busy.items() if what.startswith("experts"))
        assert computed == 2 * 6 * len(tokens), "each choice once"
        least = LAYER + EXPERT + (0.0 if setting.here else 2 * MESSAGE + 2 * DELAY)
        assert min(end - begin for begin, end in run.layers) >= least - 1e-9


def test_the_same_tokens_take_the_same_time() -> None:
    for setting in SETTINGS[::5]:
        assert decode(setting, drawn(1)) == decode(setting, drawn(1))
