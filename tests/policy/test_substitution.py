"""The expert-cache router against a reading of the prose, word by word, and its edges.

Would catch: rank k+1 counted as active, resident experts replaced, the best instead of the worst expert replaced, a set
of top-score experts that depends on the order of the tokens, a substitute used twice by one token.
"""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from smoe.expert import EXACT
from smoe.policy.plan import Load, LoadReason
from smoe.policy.residency import ExpertsAtHand, ExpertsUnderWay, PoolSize, SlotTable
from smoe.policy.substitution import NOTHING, Replacement, Selection, applied, substitute
from smoe.routing import Phase, Routing

EXPERTS, TOP_K = 8, 3
STEP = 1 / 64
"""Scores are multiples of it, so that ties and interval ends are hit exactly."""


def routing_of(scores: list[list[float]], top_k: int = TOP_K) -> Routing:
    """Routing as a router would have it: the highest scores, ties to the lower number."""
    index = [sorted(range(len(row)), key=lambda e: (-row[e], e))[:top_k] for row in scores]
    return Routing(0, Phase.DECODE, len(scores[0]), index, scores)


rows = st.lists(st.sampled_from([n * STEP for n in range(24)] + [-inf]), min_size=EXPERTS, max_size=EXPERTS)
"""One token's scores; minus infinity is an expert in a group that is left out."""
batches = st.lists(rows.filter(lambda row: sum(score > -inf for score in row) >= TOP_K), min_size=1, max_size=4)
residents = st.sets(st.integers(0, EXPERTS - 1))
alphas = st.sampled_from([0.0, 0.1, 0.25, 0.5, 1.0])


def by_the_prose(routing: Routing, resident: set[int], alpha: float) -> list[Replacement]:
    """Section IV-B, sentence by sentence, as slowly as it is written."""
    assert routing.scores is not None
    experts, per_token = range(routing.experts), []
    for scores, active in zip(routing.scores, routing.top_k_index, strict=True):
        ranked = sorted((scores[e] for e in experts), reverse=True)
        bound = ranked[len(active)] if len(ranked) > len(active) else 0.0
        low = {e for e in active if bound < scores[e] < (1 + alpha) * bound} if bound > 0 else set()
        per_token.append((scores, set(active), bound, low))
    top = {e for _, active, _, low in per_token for e in active - low}
    found = []
    for token, (scores, active, bound, low) in enumerate(per_token):
        missing = sorted((e for e in low if e not in resident and e not in top), key=lambda e: (scores[e], e))
        substitutes = sorted(
            (
                e
                for e in experts
                if e not in active and (1 - alpha) * bound < scores[e] <= bound and e in resident | top
            ),
            key=lambda e: (-scores[e], e),
        )
        for gone, instead in zip(missing, substitutes, strict=False):
            found.append(Replacement(token, list(routing.top_k_index[token]).index(gone), gone, instead))
    return found


@given(scores=batches, resident=residents, alpha=alphas)
@example([[0.3, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3]], {4, 5}, 0.5)
@example([[0.0] * EXPERTS], {4, 5}, 0.5)
def test_it_does_what_the_prose_says(scores: list[list[float]], resident: set[int], alpha: float) -> None:
    routing = routing_of(scores)
    selection = substitute(routing, resident, alpha, share=False, drop=False)
    expected = by_the_prose(routing, resident, alpha) if alpha else []
    assert sorted(selection.replacements) == sorted(expected)


@given(scores=batches, resident=residents, alpha=alphas, share=st.booleans(), order=st.randoms())
def test_promises_that_hold_for_every_variant(
    scores: list[list[float]], resident: set[int], alpha: float, share: bool, order: object
) -> None:
    routing = routing_of(scores)
    selection = substitute(routing, resident, alpha, share=share, drop=False)
    after = applied(selection, routing)
    assert all(len(set(row)) == TOP_K for row in after.top_k_index), "an expert serves a token twice"
    for token, choice, active, instead in selection.replacements:
        assert routing.top_k_index[token][choice] == active
        assert active not in resident, "what is resident is never replaced"
        assert instead is not None
        assert scores[token][instead] <= scores[token][active]

    def needed(top_k_index: object) -> set[int]:
        return {e for row in top_k_index for e in row} - resident  # type: ignore[attr-defined]

    assert needed(after.top_k_index) <= needed(routing.top_k_index), "substitution never loads what was not wanted"
    permuted = list(range(len(scores)))
    order.shuffle(permuted)  # type: ignore[attr-defined]
    again = substitute(routing_of([scores[n] for n in permuted]), resident, alpha, share=share, drop=False)
    moved = sorted(r._replace(token=permuted[r.token]) for r in again.replacements)
    assert moved == sorted(selection.replacements), "the order of the tokens matters"


@given(scores=batches, resident=residents, alpha=alphas)
def test_sharing_loads_no_more(scores: list[list[float]], resident: set[int], alpha: float) -> None:
    """What the second round keeps is loaded after the first round anyway."""
    routing = routing_of(scores)

    def loads(share: bool) -> set[int]:
        selected = applied(substitute(routing, resident, alpha, share=share, drop=False), routing)
        return {e for row in selected.top_k_index for e in row} - resident

    assert loads(True) <= loads(False)


def test_sharing_prefers_what_serves_others() -> None:
    """Expert 4 is top-score for two tokens; token 2 takes it rather than resident 6 of higher score."""
    scores = [
        [0.40, 0.02, 0.02, 0.02, 0.40, 0.02, 0.02, 0.02],
        [0.40, 0.02, 0.02, 0.02, 0.40, 0.02, 0.02, 0.02],
        [0.50, 0.00, 0.00, 0.00, 0.10, 0.12, 0.11, 0.00],
    ]
    routing = routing_of(scores, top_k=2)
    alone = substitute(routing, {0, 6}, 0.3, share=False, drop=False)
    shared = substitute(routing, {0, 6}, 0.3, share=True, drop=False)
    assert alone.replacements == [Replacement(2, 1, 5, 6)]
    assert shared.replacements == [Replacement(2, 1, 5, 4)]


def test_dropping_leaves_the_route_empty() -> None:
    routing = routing_of([[0.4, 0.21, 0.2, 0.19, 0.0, 0.0, 0.0, 0.0]], top_k=2)
    selection = substitute(routing, {0}, 0.2, share=True, drop=True)
    assert selection == Selection([Replacement(0, 1, 1, None)], 1, 1, 0, frozenset({0}))
    assert applied(selection, routing).top_k_index == [[0, EXPERTS]]


def test_dropping_never_takes_the_last_expert() -> None:
    routing = routing_of([[0.2, 0.21, 0.19, 0.19, 0.0, 0.0, 0.0, 0.0]], top_k=2)
    selection = substitute(routing, set(), 0.5, share=True, drop=True)
    assert applied(selection, routing).top_k_index == [[1, EXPERTS]]


def test_counts_say_what_was_missing() -> None:
    routing = routing_of([[0.4, 0.21, 0.2, 0.19, 0.0, 0.0, 0.0, 0.0]], top_k=2)
    assert substitute(routing, set(), 0.2, share=False, drop=False) == Selection([], 1, 1, 1, frozenset({0}))
    assert substitute(routing, {0, 1}, 0.2, share=False, drop=False) == Selection([], 1, 0, 0, frozenset({0}))


@pytest.mark.parametrize("resident", [set(), {0, 1, 2, 3, 4, 5, 6, 7}])
def test_nothing_and_everything_resident_replace_nothing(resident: set[int]) -> None:
    routing = routing_of([[0.3, 0.2, 0.15, 0.14, 0.13, 0.05, 0.02, 0.01]])
    assert substitute(routing, resident, 1.0, share=True, drop=False).replacements == []


def test_alpha_zero_all_experts_chosen_and_padding_are_left_alone() -> None:
    scores = [[0.4, 0.3, 0.2, 0.1]]
    assert substitute(routing_of(scores), {3}, 0.0, share=True, drop=False) is NOTHING
    everything = routing_of(scores, top_k=4)
    assert substitute(everything, {0}, 1.0, share=True, drop=False).replacements == []
    padding = Routing(0, Phase.DECODE, 4, [[4, 4], [0, 1]], [[0.25] * 4, [0.4, 0.3, 0.29, 0.0]])
    found = substitute(padding, {0, 2}, 0.5, share=False, drop=False).replacements
    assert found == [Replacement(1, 1, 1, 2)]


def test_what_is_ready_goes_before_what_is_under_way() -> None:
    """Expert 3 is being read for a guess: taking it means waiting, and 4 of lower like score is here."""
    routing = routing_of([[0.50, 0.40, 0.38, 0.36, 0.34, 0.0, 0.0, 0.0]], top_k=3)
    at_hand = {0, 1, 3, 4}
    taken = substitute(routing, at_hand, 0.3, share=True, drop=False, under_way={3})
    assert taken.replacements == [Replacement(0, 2, 2, 4)]
    assert substitute(routing, at_hand, 0.3, share=True, drop=False).replacements == [Replacement(0, 2, 2, 3)]
    assert substitute(routing, {0, 1, 3}, 0.3, share=True, drop=False, under_way={3}).replacements == [
        Replacement(0, 2, 2, 3)
    ], "under way it still costs no load"


def test_what_a_batch_waits_for_anyway_costs_no_wait_of_its_own() -> None:
    """Expert 4 is under way and top-score for token 0, so token 1 may have it too, before ready 6 of lower score."""
    scores = [
        [0.45, 0.02, 0.02, 0.02, 0.40, 0.02, 0.02, 0.02],
        [0.50, 0.00, 0.00, 0.00, 0.11, 0.12, 0.10, 0.00],
    ]
    routing = routing_of(scores, top_k=2)
    for share in (False, True):
        taken = substitute(routing, {0, 4, 6}, 0.3, share=share, drop=False, under_way={4})
        assert taken.replacements == [Replacement(1, 1, 5, 4)]


def test_the_table_says_what_is_under_way() -> None:
    table = SlotTable(PoolSize(2, 2))
    for expert, slot, keep in ((3, 0, True), (5, 2, False)):
        table.begin(Load((1, expert, EXACT), slot, None, keep, LoadReason.PREFETCH, 0))
    table.arrive((1, 3, EXACT))
    at_hand, under_way = ExpertsAtHand(1, table), ExpertsUnderWay(1, table)
    assert [expert for expert in range(8) if expert in at_hand] == [3, 5]
    assert [expert for expert in range(8) if expert in under_way] == [5]
    assert 5 not in ExpertsUnderWay(0, table)
