"""Forecasts of clusters from measured pieces, by hand.

Would catch: a hop that is counted once, main's own experts that travel, a placement that is not the product's.
"""

from __future__ import annotations

import pytest

from smoe.expert import EXACT
from smoe.routing import Phase, Routing
from smoe.simulator.cluster import DecodedToken, TokenWaits
from smoe.simulator.cluster_draft import DraftTimes
from smoe.simulator.cluster_forecast import (
    MeasuredCoordinator,
    MeasuredWorker,
    Port,
    decoded_tokens,
    foretell,
    named_at,
)

WORKER = MeasuredWorker(load=4.0, expert=0.5, hop=1.0, slots=8)
MAIN = MeasuredCoordinator(layer=1.0)


def trace(*tokens: list[list[int]]) -> list[Routing]:
    """A prompt of two tokens, then these; layers 1 and 3 have experts."""
    prompt = [Routing(layer, Phase.PREFILL, 8, [[0, 1], [2, 3]]) for layer in (1, 3)]
    return prompt + [
        Routing(layer, Phase.DECODE, 8, [chosen])
        for token in tokens
        for layer, chosen in zip((1, 3), token, strict=True)
    ]


def tokens(*given: list[list[int]], named: list[list[int]] | None = None) -> list[DecodedToken]:
    """Decoded ones, with what was named for each of their routings."""
    return decoded_tokens(trace(*given), named)


def test_a_trace_is_cut_into_tokens() -> None:
    found = decoded_tokens(trace([[0, 1], [2, 3]], [[4, 8], [6, 7]]), [[1], [2], [3], [4]])
    assert [token.chosen for token in found] == [[[0, 1], [2, 3]], [[4], [6, 7]]], "8 is no expert"
    assert [token.named for token in found] == [[[1], [2]], [[3], [4]]]


@pytest.mark.parametrize("placement", ["finish", "round-robin"])
def test_what_workers_hold_is_not_loaded_again(placement: str) -> None:
    """Two workers of a group: a hop, the load, an expert each; then without the load."""
    run = foretell(tokens(*[[[0, 1], [2, 3]]] * 3), MAIN, [WORKER] * 2, placement)
    assert run.token_seconds == [2 * (1.0 + 1.0 + 4.0 + 0.5)] + [2 * (1.0 + 1.0 + 0.5)] * 2
    assert run.loads_since(0) == (4, 0)


def test_one_worker_computes_one_expert_after_the_other() -> None:
    run = foretell(tokens([[0, 1], [2, 3]]), MAIN, [WORKER], "round-robin")
    assert run.token_seconds == [2 * (1.0 + 1.0 + 4.0 + 4.0 + 0.5)], "the first is computed while the second comes"


def test_messages_wait_for_each_other_at_main() -> None:
    slow = MeasuredCoordinator(layer=1.0, message=0.25)
    run = foretell(tokens(*[[[0, 1], [2, 3]]] * 2), slow, [WORKER] * 2, "finish")
    assert run.token_seconds[1] == 2 * (1.0 + 2 * 0.25 + 1.0 + 0.5 + 0.25)


def test_main_keeps_what_it_loads_where_that_is_sooner() -> None:
    """A load of 1.0 here is sooner than 4.0 there: the first expert comes here, the second after it, and both stay."""
    own = MeasuredCoordinator(layer=1.0, load=1.0, expert=0.5, slots=8)
    run = foretell(tokens(*[[[0, 1], [2, 3]]] * 2), own, [WORKER] * 2, "finish")
    assert run.token_seconds == [2 * (1.0 + 2 * 1.0 + 0.5), 2 * (1.0 + 2 * 0.5)]
    assert foretell(tokens([[0, 1], [2, 3]]), own, [WORKER] * 2, "round-robin").token_seconds == [2 * 6.5]


def test_what_main_names_a_layer_ahead_is_there_sooner() -> None:
    """The second layer's experts are named at 1.0 and have come at 5.5; its rows arrive at 6.5 + 1.0 + 0.5."""
    two = foretell(tokens([[0, 1], [2, 3]], named=[[], [2, 3]]), MAIN, [WORKER] * 4, "round-robin")
    assert two.token_seconds == [6.5 + 1.0 + 0.5 + 0.5 + 0.5]


@pytest.mark.parametrize("placement", ["finish", "round-robin"])
def test_what_is_named_comes_behind_what_was_asked_for(placement: str) -> None:
    """The second layer's come from 5.5 to 9.5, behind the first's; the coordinator asks at 8.0."""
    run = foretell(tokens([[0, 1], [2, 3]], named=[[], [2, 3]]), MAIN, [WORKER] * 2, placement)
    assert run.token_seconds == [9.5 + 0.5 + 0.5]


def test_by_finish_who_is_told_is_chosen_among_what_nobody_has() -> None:
    """Expert 2 is with the first worker: 5, alone, is told to either, and then loaded no more."""
    guesses = [[], [], [], [2, 5]]
    run = foretell(tokens([[0], [2]], [[0], [2, 5]], named=guesses), MAIN, [WORKER] * 2, "finish")
    assert run.loads_since(0) == (3, 0) and run.loads_since(1) == (1, 0)


def test_what_a_token_waits_for() -> None:
    """By the last answer of each of two layers."""
    there = foretell(tokens([[0, 1], [2, 3]]), MAIN, [WORKER] * 2, "finish")
    assert there.waits == [TokenWaits(main=2.0, between=2.0, computing=1.0, loads=8.0)] and there.loads_since(0) == (
        4,
        0,
    )
    own = MeasuredCoordinator(layer=1.0, load=1.0, expert=0.5, slots=8)
    here = foretell(tokens(*[[[0, 1], [2, 3]]] * 2), own, [WORKER] * 2, "finish")
    assert here.waits == [
        TokenWaits(main=2.0, computing=2.0, own_loads=3.0),
        TokenWaits(main=2.0, computing=2.0),
    ]
    assert here.loads_since(0) == (0, 4) and here.loads_since(1) == (0, 0)
    assert [sum(waits) for waits in here.waits] == here.token_seconds


@pytest.mark.parametrize("placement", ["finish", "round-robin"])
def test_what_was_used_before_is_there(placement: str) -> None:
    before = [(layer, expert, EXACT) for layer in (0, 1) for expert in range(4)]
    run = foretell(tokens([[0, 1], [2, 3]]), MAIN, [WORKER] * 2, placement, before=before)
    assert run.loads_since(0) == (0, 0) and run.token_seconds == [2 * (1.0 + 1.0 + 0.5)]


def test_of_what_was_used_before_the_last_stays() -> None:
    """Room for two: the second layer's, which were used last; the older one of them makes room for the first's."""
    narrow = MeasuredWorker(load=4.0, expert=0.5, hop=1.0, slots=2)
    before = [(0, 0, EXACT), (0, 1, EXACT), (1, 3, EXACT), (1, 2, EXACT)]
    run = foretell(tokens([[4], [2]]), MAIN, [narrow], "finish", before=before)
    assert run.token_seconds == [(1.0 + 1.0 + 4.0 + 0.5) + (1.0 + 1.0 + 0.5)]


def test_a_draft_on_main_tells_workers_by_the_coordinators_port() -> None:
    """Named at 0.5 and 1.0, there half a hop later: loads from 1.0 to 5.0 and on to 9.0. Rows come at 1.5 and 7.5."""
    ahead = tokens([[0, 1], [2, 3]], named=[[0, 1], [2, 3]])
    run = foretell(ahead, MAIN, [WORKER] * 2, "round-robin", DraftTimes(layer=0.5))
    assert run.token_seconds == [9.0 + 0.5 + 0.5]


def test_a_narrow_port_is_busy_with_rows() -> None:
    """A row takes a tenth: one goes up, two come back."""
    port = Port(bytes_per_second=10.0, row_bytes=1.0)
    run = foretell(tokens([[0, 1], [2, 3]]), MAIN, [WORKER], "finish", port=port)
    assert run.token_seconds == pytest.approx([2 * (1.0 + 0.1 + 1.0 + 2 * 4.0 + 0.5 + 0.2)])


def test_somebody_names_as_often_right_as_is_said() -> None:
    found = tokens(*[[[0, 1], [2, 3]]] * 200)
    assert [token.named for token in named_at(found, 8, 1.0)] == [[[0, 1], [2, 3]]] * 200
    for token in named_at(found, 8, 0.0):
        assert token.named is not None and not {0, 1} & {*token.named[0]} and not token.own_is_right
    right = [
        len({*chosen} & {*named})
        for token in named_at(found, 8, 0.75)
        for chosen, named in zip(token.chosen, token.named or (), strict=True)
    ]
    assert 0.68 < sum(right) / 800 < 0.82
    assert named_at(found, 8, 0.75) == named_at(found, 8, 0.75)
