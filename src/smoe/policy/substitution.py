"""Substitution: resident experts of similar score replace the least important missing experts.

This is the expert-cache router of SMoE (Algorithm 1 and section IV-B of the second version; section 5.4 of the first
for batches). S is the score of rank k+1, the best expert that the token has not chosen. Scores decide what may happen
to an expert that is not resident:

    score      (1 - alpha) S        S        (1 + alpha) S
    ----------------|---------------|---------------|------------->
      not used      |  substitute   |   low-score   |  top-score
                    |  if resident  |   replaced    |  always computed

A low-score expert that is resident, or top-score for another token of the batch, is computed: it costs no load. The
missing ones are replaced, lowest score first, by the substitutes of highest score. Missing low-score experts for which
no substitute is left are the most important ones, and are loaded. The top-score experts of the whole batch are
collected first, so that the result does not depend on the order of tokens.

In two points the papers' text differs from their printed algorithm, and the text is followed. The printed loop would
also replace resident low-score experts, and would count rank k+1 itself as chosen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Sequence
from math import inf
from typing import NamedTuple

from smoe.routing import Routing


class Replacement(NamedTuple):
    """One route that another expert computes, or that is dropped."""

    token: int
    choice: int
    """The index among the token's K choices."""
    active: int
    """The expert that the model chose."""
    substitute: int | None
    """The expert that computes the route; None if the route is dropped."""


class Selection(NamedTuple):
    """The replaced and dropped routes of one layer, with statistics."""

    replacements: list[Replacement]
    low_score: int
    """The number of routes whose expert is low-score."""
    low_score_missing: int
    """The number of low-score routes whose expert is missing: neither resident nor top-score for another token."""
    top_score_missing: int
    """The number of routes whose expert is top-score and not resident."""
    top: frozenset[int] = frozenset()
    """Experts that are top-score for at least one token."""


NOTHING = Selection([], 0, 0, 0)


def substitute(
    routing: Routing,
    resident: Container[int],
    alpha: float,
    *,
    share: bool,
    drop: bool,
    under_way: Container[int] = (),
) -> Selection:
    """Return the replacements for missing low-score experts. `resident`: the experts of this layer that need no load.

    `share`: in a batch, an expert that is loaded for one token is available to the others, and a substitute that serves
    more tokens is preferred to one of higher score (first version, section 5.4). `drop`: missing low-score experts are
    dropped, not replaced. `under_way`: those of the `resident` experts that are in flight; a substitute for which the
    layer would have to wait is used only after all others. `routing.scores` [T, E] is required. With `alpha` 0 nothing
    is replaced.
    """
    if alpha <= 0.0:
        return NOTHING
    scores, chosen = routing.scores, routing.top_k_index
    assert scores is not None
    tokens = [_split(row, active, alpha, routing.experts) for row, active in zip(scores, chosen, strict=True)]
    top = {expert for token in tokens for expert in token.top}
    missing = [
        [entry for entry in token.low if entry.expert not in top and entry.expert not in resident] for token in tokens
    ]
    like = [_like(row, token) if entries else [] for row, token, entries in zip(scores, tokens, missing, strict=True)]
    here = _Here(resident, top, under_way)
    replaced = _replace(tokens, missing, like, here, None, drop)
    if share and len(tokens) > 1 and replaced and not drop:
        replaced = _replace_again(tokens, missing, like, replaced, here)
    return Selection(
        replaced,
        sum(len(token.low) for token in tokens),
        sum(map(len, missing)),
        sum(expert not in resident for token in tokens for expert in token.top),
        frozenset(top),
    )


def applied(selection: Selection, routing: Routing) -> Routing:
    """Return the routing with substitutes in place of the replaced experts, and with the index E for dropped routes."""
    if not selection.replacements:
        return routing
    rows = [list(row) for row in routing.top_k_index]
    for token, choice, _, expert in selection.replacements:
        rows[token][choice] = routing.experts if expert is None else expert
    return routing._replace(top_k_index=rows)


class _Low(NamedTuple):
    score: float
    expert: int
    choice: int


class _Token(NamedTuple):
    """The experts that one token has chosen, divided into top-score and low-score experts."""

    bound: float
    """S: the score of rank k+1."""
    least: float
    """(1 - alpha) S: a substitute's score must be above it."""
    active: Sequence[int]
    top: Sequence[int]
    low: list[_Low]
    """Low-score experts, ascending by score, then by expert."""


class _Here(NamedTuple):
    """The experts of the layer that can be used without an additional load."""

    resident: Container[int]
    coming: Container[int]
    """Experts that are loaded for other tokens, for which the layer waits in any case."""
    under_way: Container[int]

    def has(self, expert: int) -> bool:
        return expert in self.resident or expert in self.coming

    def is_late(self, expert: int) -> bool:
        return expert in self.under_way and expert not in self.coming


_Like = tuple[float, int]
"""A possible substitute as a pair that can be sorted: (minus its score, its expert number)."""


def _split(scores: Sequence[float], active: Sequence[int], alpha: float, experts: int) -> _Token:
    """Return one token's chosen experts, divided into top-score and low-score ones. If there is no expert of rank k+1,
    or if its score is not above zero, all are top-score."""
    if active[0] == experts:  # padding
        return _Token(0.0, 0.0, (), (), [])
    inactive = list(scores)
    for expert in active:
        inactive[expert] = -inf
    bound = max(inactive)
    if not bound > 0.0:
        return _Token(0.0, 0.0, active, active, [])
    limit = (1.0 + alpha) * bound
    low = sorted(_Low(scores[expert], expert, k) for k, expert in enumerate(active) if bound < scores[expert] < limit)
    if not low:
        return _Token(bound, bound, active, active, low)
    names = {entry.expert for entry in low}
    top = [expert for expert in active if expert not in names]
    return _Token(bound, (1.0 - alpha) * bound, active, top, low)


def _replace(
    tokens: Sequence[_Token],
    missing: Sequence[Sequence[_Low]],
    like: Sequence[Sequence[_Like]],
    here: _Here,
    serving: Counter[int] | None,
    drop: bool,
) -> list[Replacement]:
    """Return the replacements of one round. For each token, its missing low-score experts, lowest score first, are
    paired with its substitutes, best first. `serving`: as in `_substitutes`."""
    replaced: list[Replacement] = []
    for number, entries in enumerate(missing):
        if drop:
            keep = (
                1 if entries and len(entries) == len(tokens[number].active) else 0
            )  # no token is left without an expert
            dropped = entries[: len(entries) - keep]
            replaced += [Replacement(number, entry.choice, entry.expert, None) for entry in dropped]
        elif entries:
            pairs = zip(entries, _substitutes(like[number], here, serving), strict=False)
            replaced += [Replacement(number, entry.choice, entry.expert, expert) for entry, expert in pairs]
    return replaced


def _like(scores: Sequence[float], token: _Token) -> list[_Like]:
    """Return the experts that may replace an expert of the token, as pairs (-score, expert). Their score is above
    `least` and at most `bound`, and the token has not chosen them. The highest score comes first; of equal scores, the
    lowest expert number."""
    bound, least, active = token.bound, token.least, token.active
    found = [(-score, expert) for expert, score in enumerate(scores) if least < score <= bound]
    return sorted(entry for entry in found if entry[1] not in active)


def _substitutes(like: Sequence[_Like], here: _Here, serving: Counter[int] | None) -> list[int]:
    """Return the substitutes that need no additional load, those in flight last. `serving`: the number of tokens that
    each expert serves; substitutes with larger numbers come first. None: the order of scores."""
    found = sorted((expert for _, expert in like if here.has(expert)), key=here.is_late)
    return found if serving is None else sorted(found, key=lambda expert: -serving[expert])


def _replace_again(
    tokens: Sequence[_Token],
    missing: Sequence[Sequence[_Low]],
    like: Sequence[Sequence[_Like]],
    replaced: Sequence[Replacement],
    here: _Here,
) -> list[Replacement]:
    """Return the replacements of a second round. The missing experts that found no substitute in the first round will
    be loaded in any case. So in the second round they are available to all tokens that chose them or need a substitute.
    No more experts are loaded than after the first round."""
    done = {(entry.token, entry.choice) for entry in replaced}
    loaded = {e.expert for number, entries in enumerate(missing) for e in entries if (number, e.choice) not in done}
    still = [[entry for entry in entries if entry.expert not in loaded] for entries in missing]
    gone = {(number, entry.expert) for number, entries in enumerate(still) for entry in entries}
    serving = Counter(e for number, token in enumerate(tokens) for e in token.active if (number, e) not in gone)
    coming = loaded.union(expert for token in tokens for expert in token.top)
    return _replace(tokens, still, like, here._replace(coming=coming), serving, False)
