"""Which experts serve a token: the model's own choice, or resident ones of like score in place of the least important.

The expert-cache router of SMoE (Algorithm 1 and section IV-B of the second version; section 5.4 of the first for
batches). With S the choice score of rank k+1:

    score      (1 - alpha) S        S        (1 + alpha) S
    ----------------|---------------|---------------|------------->
      never used    |  substitutes  |   low-score   |  top-score
                    |  if resident  |   replaced if |  always stays
                    |               |   not resident|

Low-score experts that are resident, or top-score for another token of the batch, stay: they cost nothing. The missing
ones are replaced, lowest score first, by the substitutes of highest score; those for which no substitute is left are
the most important, and are loaded. As the set of top-score experts must not depend on the order of the tokens, it is
collected over the whole batch first.

Where the two versions' prose and their printed algorithm differ, the prose is followed: the printed loop would replace
resident low-score experts too, and would count rank k+1 itself among the active ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Sequence
from math import inf
from typing import NamedTuple

from smoe.routing import Routing


class Replacement(NamedTuple):
    """One route that another expert serves."""

    token: int
    choice: int
    """Position among the token's K choices."""
    active: int
    """The expert that the model chose."""
    substitute: int | None
    """The expert that serves instead; None where the route is dropped."""


class Selection(NamedTuple):
    """What becomes of a layer's routes."""

    replacements: list[Replacement]
    low_score: int
    """Routes whose expert is low-score."""
    low_score_missing: int
    """Those of them whose expert was neither resident nor top-score for another token."""
    top_score_missing: int
    """Routes whose expert is top-score and not resident."""
    top: frozenset[int] = frozenset()
    """Experts that are top-score for some token."""


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
    """Replace what is low-score and missing; `resident` are the experts of this layer that cost no load.

    Of these some may be `under_way`. A chosen one stays all the same; a substitute that would have to be waited for,
    and for no other reason, comes after all that are ready.

    `share`: in a batch, what has to be loaded for one token serves the others too, and a substitute that serves more
    tokens goes before one of higher score (first version, section 5.4). `drop`: leave missing low-score experts out
    instead of replacing them. `routing.scores` [T, E] must be there; `alpha` 0 replaces nothing.
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
    """The routing with the substitutes in the place of what they replace; a dropped route gets the index E."""
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
    """One token's active experts by importance."""

    bound: float
    """S: the choice score of rank k+1."""
    least: float
    """(1 - alpha) S"""
    active: Sequence[int]
    top: Sequence[int]
    low: list[_Low]
    """Ascending by score, then by expert."""


class _Here(NamedTuple):
    """What may serve without a load of its own."""

    resident: Container[int]
    coming: Container[int]
    """Loaded for other tokens: the layer waits for these in any case."""
    under_way: Container[int]

    def has(self, expert: int) -> bool:
        return expert in self.resident or expert in self.coming

    def is_late(self, expert: int) -> bool:
        return expert in self.under_way and expert not in self.coming


_Like = tuple[float, int]
"""(minus the score, expert)"""


def _split(scores: Sequence[float], active: Sequence[int], alpha: float, experts: int) -> _Token:
    """Without a rank k+1, or with one whose score is not above zero, there is no interval and all experts are
    top-score."""
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
    """For each token its missing low-score experts, lowest first, paired with its substitutes, best first."""
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
    """Inactive experts of like score, best first; ties by number."""
    bound, least, active = token.bound, token.least, token.active
    found = [(-score, expert) for expert, score in enumerate(scores) if least < score <= bound]
    return sorted(entry for entry in found if entry[1] not in active)


def _substitutes(like: Sequence[_Like], here: _Here, serving: Counter[int] | None) -> list[int]:
    """Those that cost no load of their own, what is late last; where `serving` counts, what serves more tokens goes
    before all."""
    found = sorted((expert for _, expert in like if here.has(expert)), key=here.is_late)
    return found if serving is None else sorted(found, key=lambda expert: -serving[expert])


def _replace_again(
    tokens: Sequence[_Token],
    missing: Sequence[Sequence[_Low]],
    like: Sequence[Sequence[_Like]],
    replaced: Sequence[Replacement],
    here: _Here,
) -> list[Replacement]:
    """With what the first round leaves to be loaded counted as present: it serves every token that chose it, and those
    that need a substitute. Nothing more is loaded than after the first round."""
    done = {(entry.token, entry.choice) for entry in replaced}
    loaded = {e.expert for number, entries in enumerate(missing) for e in entries if (number, e.choice) not in done}
    still = [[entry for entry in entries if entry.expert not in loaded] for entries in missing]
    gone = {(number, entry.expert) for number, entries in enumerate(still) for entry in entries}
    serving = Counter(e for number, token in enumerate(tokens) for e in token.active if (number, e) not in gone)
    coming = loaded.union(expert for token in tokens for expert in token.top)
    return _replace(tokens, still, like, here._replace(coming=coming), serving, False)
