"""Miss-ratio curves, against caches in plain Python.

Would catch: misses of prompts counted, a size off by one, traces that share a cache, a worker that counts otherwise.
"""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

import pytest

from smoe.errors import ConfigError
from smoe.policy.eviction.learned import untrained
from smoe.policy.registry import EVICTION, ONLINE_EVICTION
from smoe.trace.curves import BOUND, Curves, curves, in_words, sizes_of, turns
from smoe.trace.file import Trace
from tests.trace.written import Token, header_of, random_tokens, write

HEADER = header_of(experts=8, top_k=2)
Uses = list[list[tuple[int, int]]]


@pytest.fixture
def trace(tmp_path: Path) -> Trace:
    return write(tmp_path / "a.trace", HEADER, random_tokens(HEADER, 60))


def uses_of(tokens: list[Token]) -> Uses:
    """(layer, expert) wanted together, in order."""
    return [[(n, e) for e in sorted(chosen)] for token in tokens for n, chosen in enumerate(token.chosen)]


def lru(uses: Uses, slots: int) -> int:
    """A plain dict; what one layer wants is found before anything goes, and does not push itself out."""
    cache: OrderedDict[tuple[int, int], None] = OrderedDict()
    misses = 0
    for wanted in uses:
        missing = [key for key in wanted if key not in cache]
        for key in wanted:
            if key in cache:
                cache.move_to_end(key)
        for key in missing:
            cache[key] = None
        while len(cache) > slots:
            cache.popitem(last=False)
        misses += len(missing)
    return misses


def belady(uses: Uses, slots: int) -> int:
    cache: set[tuple[int, int]] = set()
    misses = 0
    for now, wanted in enumerate(uses):
        misses += len(set(wanted) - cache)

        def next_use(key: tuple[int, int], now: int = now) -> int:
            return next((n for n, later in enumerate(uses) if n > now and key in later), len(uses))

        others = sorted(cache - set(wanted), key=lambda key: (next_use(key), key))
        cache = {*wanted, *others[: slots - len(wanted)]}
    return misses


def test_every_point_is_what_a_plain_cache_misses(trace: Trace) -> None:
    found, uses = curves([trace], 1000), uses_of(random_tokens(HEADER, 60))
    assert found.slots == (2, 3, 4, 6, 8, 9, 11, 12, 14, 16) and found.experts == 16
    assert (found.steps, found.uses, found.steps_are_tokens) == (60, 240, True)
    assert list(found.misses["lru"]) == [lru(uses, slots) for slots in found.slots]
    assert list(found.misses[BOUND]) == [belady(uses, slots) for slots in found.slots]


def test_all_policies_are_there_and_none_beats_the_bound(trace: Trace) -> None:
    found = curves([trace], 1000)
    assert list(found.misses) == [*(name for name in ONLINE_EVICTION if name != "learned"), BOUND]
    assert "learned" in found.left_out and set(found.misses) <= set(EVICTION)
    for misses in found.misses.values():
        assert all(ours >= least for ours, least in zip(misses, found.misses[BOUND], strict=True))
        assert misses[-1] == found.misses[BOUND][-1]


def test_what_was_learned_of_the_model_joins_in(trace: Trace) -> None:
    found = curves([trace], 10, untrained())
    assert list(found.misses) == [*ONLINE_EVICTION, BOUND] and found.left_out == {}


def test_without_a_rule_there_is_no_score(tmp_path: Path) -> None:
    header = header_of(8, 2, rule=None)
    found = curves([write(tmp_path / "b.trace", header, random_tokens(header, 4))], 1000)
    assert "score" not in found.misses and "no scores" in found.left_out["score"]


def test_traces_begin_with_an_empty_cache_each(trace: Trace) -> None:
    one, two = curves([trace], 1000), curves([trace, trace], 1000)
    assert two.steps == 2 * one.steps
    assert two.misses == {name: tuple(2 * count for count in misses) for name, misses in one.misses.items()}


def test_the_first_steps_only(trace: Trace) -> None:
    found = curves([trace], 10)
    assert found.steps == 10 and found.misses["lru"][3] == lru(uses_of(random_tokens(HEADER, 60)[:10]), 6)


def test_other_processes_count_the_same(tmp_path: Path) -> None:
    header = header_of(8, 2, rule=None)  # without scores, so that they need no torch
    trace = write(tmp_path / "b.trace", header, random_tokens(header, 20))
    heard: list[tuple[int, int]] = []
    alone = curves([trace], 20, processes=1)
    assert curves([trace], 20, tick=lambda done, points: heard.append((done, points)), processes=2) == alone
    points = len(alone.misses) * len(alone.slots)
    assert heard == [(done, points) for done in range(1, points + 1)]


def test_prompts_warm_the_cache_and_are_not_counted(tmp_path: Path) -> None:
    tokens = random_tokens(HEADER, 20)
    warm = [token._replace(phase=0) for token in tokens]
    found = curves([write(tmp_path / "b.trace", HEADER, [*warm, *tokens])], 1000)
    assert found.steps == 20 and found.misses["lru"][-1] == 0
    with pytest.raises(ConfigError, match="only prompts were recorded"):
        curves([write(tmp_path / "c.trace", HEADER, warm)], 1000)


def test_sizes_are_of_choices_and_of_shares() -> None:
    assert sizes_of(header_of(64, 8, layers=12))[:4] == (8, 38, 76, 96) and sizes_of(HEADER)[-1] == 16


def curve(*misses: int, slots: tuple[int, ...] = (5, 10, 30, 50, 80, 100)) -> Curves:
    return Curves(slots, 100, 10, 1000, {"auto": misses}, True, {})


def test_knee_and_plateau() -> None:
    """At 30 the curve hangs lowest; from 80 on only 4 of 1000 uses are saved."""
    found = curve(900, 700, 200, 100, 14, 10)
    assert turns(found, "auto") == (2, 4)
    assert in_words(found, "auto", 10 * 2**20) == (
        "auto: from 5 % to 30 % of the experts in memory saves 70 misses a token (28 for every 10 %, 1.00 MiB); "
        "from 30 % to 80 %, 18.6 (3.72); beyond 80 %, 0.4 in all"
    )


def test_a_straight_curve_has_no_knee() -> None:
    found = curve(950, 900, 700, 500, 200, 0)
    assert turns(found, "auto") == (None, 5)
    expected = "auto: from 5 % to 100 % of the experts in memory saves 95 misses a token (10 for every 10 %)"
    assert in_words(found, "auto") == expected


def test_where_the_least_cache_does() -> None:
    found = curve(12, 11, 10, 10, 10, 10)
    assert turns(found, "auto") == (None, 0)
    assert in_words(found, "auto") == "auto: 5 % of the experts do; all of them save 0.2 misses a token"
