"""What the benchmark of tournaments makes of figures, by hand.

Would catch: a winner compared with itself alone, a baseline that is left out, evictions run beside a prefetch, or
predictors beside another eviction than the one that won.
"""

from __future__ import annotations

from typing import Any

import pytest

from bench.tournaments import DEFAULT, KINDS, Verdict, in_order, judged, runners_of, summarised, table


def entrant(name: str, simulated: float, *measured: float) -> dict[str, Any]:
    return {"name": name, "simulated_seconds": simulated, "measured_seconds": list(measured)}


FOUND = {
    "prefetch": {"entrants": [entrant("next-gate", 0.02, 0.03), entrant("none", 0.03, 0.04), entrant("affinity", 0.1)]},
    "eviction": {"entrants": [entrant("lfu", 0.05, 0.05), entrant("auto", 0.04, 0.06), entrant("lru", 0.07)]},
}
WINNERS = {"eviction": "lfu", "prefetch": "next-gate"}
ROUNDS = {
    ("eviction", "lfu"): [1.0, 1.2, 1.1],
    ("eviction", "auto"): [1.1, 1.0, 1.0],
    ("eviction", "lru"): [2.0, 2.0, 2.2],
    ("prefetch", "next-gate"): [0.9, 0.8, 0.9],
    ("prefetch", "none"): [1.0, 1.0, 1.0],
    ("prefetch", "affinity"): [1.5, 1.5, 1.5],
    (DEFAULT, DEFAULT): [0.75, 0.7, 0.8],
}


def rows() -> list[dict[str, Any]]:
    more = {"simulated_seconds": 0.5, "is_finalist": True, "hit_ratio": 0.5}
    return [{"kind": kind, "name": name, "rounds": rounds} | more for (kind, name), rounds in ROUNDS.items()]


def test_everybody_runs_as_they_were_judged() -> None:
    runners = {(runner.kind, runner.name): runner for runner in runners_of(FOUND)}
    assert runners.keys() == ROUNDS.keys()
    assert all(runners["eviction", name].switches["prefetch"] == "none" for name in ("lfu", "auto", "lru"))
    beside = [runners["prefetch", name].switches for name in ("next-gate", "none", "affinity")]
    assert all(switches["eviction"] == "lfu" and not switches["prefetch_trial"] for switches in beside)
    assert [switches["prefetch"] for switches in beside] == ["next-gate", "none", "affinity"]
    assert runners[DEFAULT, DEFAULT].switches == {"eviction": "auto", "prefetch": "auto"}
    assert [runner.name for runner in runners.values() if runner.is_finalist] == ["lfu", "auto", "next-gate", "none"]


def test_rounds_turn_round() -> None:
    runners = runners_of(FOUND)
    assert in_order(runners, 0) == in_order(runners, 2) == runners and in_order(runners, 1) == runners[::-1]


def test_the_winner_is_held_against_the_best_as_run() -> None:
    of_kind = {kind: [row for row in rows() if row["kind"] == kind] for kind in KINDS}
    verdict = judged(of_kind["eviction"], "lfu")
    assert verdict.best == "auto" and verdict.ratio == pytest.approx(1.1) and not verdict.is_within
    assert (verdict.least, verdict.most) == pytest.approx((1 / 1.1, 1.2))
    assert judged(of_kind["prefetch"], "next-gate") == Verdict("next-gate", "next-gate", 1.0, 1.0, 1.0)


def test_both_winners_are_held_against_every_baseline() -> None:
    found = summarised(rows(), WINNERS)
    assert found["verdicts"]["prefetch"]["is_within"] and not found["verdicts"]["eviction"]["is_within"]
    assert found["together_seconds"] == 0.9 and found["strongest_baseline"] == DEFAULT
    assert found["beside_baselines"] == pytest.approx({"lru": 0.45, "auto": 0.9, DEFAULT: 1.2})
    assert found["same_setting_twice"] == pytest.approx(1.1)


def test_the_table_says_who_won_and_what_the_verdict_is() -> None:
    size = {"resident_share": 0.25, "winners": WINNERS, "summary": summarised(rows(), WINNERS), "entrants": rows()}
    lines = table(size)
    assert lines[0].startswith("25%")
    assert sum("(won)" in line for line in lines) == 2
    assert any(line.startswith("eviction: the winner lfu takes 1.100") and "BEYOND 1.03" in line for line in lines)
    assert any(
        line.startswith("prefetch: the winner next-gate takes 1.000") and "within 1.03" in line for line in lines
    )
    assert any("lru 0.450, auto 0.900, default 1.200; the strongest is default" in line for line in lines)
