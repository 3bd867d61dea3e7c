"""The pictures' numbers against loops in plain Python, and every picture drawn from next to nothing.

Would catch: ranks off by one, a sequence that goes on into the next, missing experts of the wrong kind.
"""

from __future__ import annotations

import argparse
import json
from math import exp
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from bench import figure_data as data
from bench import figures
from smoe.errors import ConfigError
from smoe.policy.budget import MIN_STAGING_SLOTS
from smoe.policy.registry import make_eviction
from smoe.simulator.replay import replay
from smoe.trace.file import Trace, TraceWriter
from smoe.trace.ranks import reuse_by_rank, shares_by_rank, stretches
from smoe.trace.record import TracedLayer, TraceHeader

EXPERTS, TOP_K, SLOTS = 8, 2, 6
RULE = {"score": "softmax", "weight": "share", "scale": 1.0, "bias": None, "groups": None}
HEADER = TraceHeader("toy", "toy", 0.0, (TracedLayer(0, EXPERTS, TOP_K, RULE), TracedLayer(3, EXPERTS, TOP_K, RULE)))
LENGTHS = (9, 3, 12)
"""Tokens of the sequences; of the second, none has enough that follow."""

Token = list[float]


@pytest.fixture(scope="module")
def logits() -> dict[tuple[int, int], list[Token]]:
    """(layer, sequence): [T, E], as float16 has them."""
    chance = np.random.default_rng(7)
    return {
        (layer, sequence): chance.normal(0.0, 2.0, (length, EXPERTS)).astype("f2").tolist()
        for sequence, length in enumerate(LENGTHS)
        for layer in (0, 3)
    }


@pytest.fixture(scope="module")
def trace(logits: dict[tuple[int, int], list[Token]], tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """One token a step, one sequence after the other, with a padding token in between."""
    path, step = tmp_path_factory.mktemp("trace") / "toy.trace", 0
    with TraceWriter(path, HEADER) as writer:
        for sequence, length in enumerate(LENGTHS):
            for token in range(length):
                for layer in HEADER.layers:
                    rows = HEADER.blank_rows(layer, 1)
                    rows["step"], rows["sequence"], rows["phase"] = step, sequence, 1
                    rows["router_logits"] = logits[layer.layer, sequence][token]
                    rows["top_k_index"] = ranked(logits[layer.layer, sequence][token])[:TOP_K]
                    writer.append(rows)
                writer.keep()
                step += 1
        padding = HEADER.blank_rows(HEADER.layers[0], 1)
        padding["step"], padding["phase"], padding["router_logits"] = step, 1, 0.0
        writer.append(padding)
        writer.keep()
    return Trace(path)


def ranked(token: Token) -> list[int]:
    return sorted(range(EXPERTS), key=lambda expert: (-token[expert], expert))


def step(name: str, alpha: float = 0.0, hit_ratio: float = 0.5, **more: Any) -> dict[str, Any]:
    """A made-up step with the entries that pictures read."""
    lossy = {"substituted_share": 0.2, "low_score_missing_share": 0.25, "top_score_missing_share": 0.1}
    return {
        "name": name,
        "switches": {"eviction": "lru" if "LRU" in name else "score", "prefetch": name.count("Pre"), "alpha": alpha},
        "alpha": alpha,
        "seconds_per_token": 0.02 - 0.01 * alpha,
        "seconds_per_token_by_round": [0.019, 0.021],
        "hit_ratio": hit_ratio,
        "host_computed_share": 0.0,
        "loads_per_token": 2.5,
        **(lossy if alpha else dict.fromkeys(lossy)),
        "prefetch_top_score_share": 0.8 if "Pre" in name else None,
        "prefetch_active_among_others": None,
        "link_seconds_per_token": 0.01,
        "host_seconds_per_token": 0.003 if "BA" in name else 0.0,
        "wait_seconds_per_token": 0.006,
        "expert_seconds_per_token": 0.003,
        "other_layers_seconds_per_token": 0.002,
        "python_seconds_per_token": 0.001,
        **more,
    }


@pytest.fixture
def cell() -> dict[str, Any]:
    lossy = ("CE + CR", "CE + CR + Pre", "all four (+ BA)", "BA as printed")
    presets = {"the preset smoe-exact": 0.0, "at alpha 0.3 in any case": 0.3, "the preset smoe": 0.6}
    return {
        "device": "emulated",
        "profile": "rtx-a6000",
        "emulated_expert_bytes": 2**20,
        "batch": 1,
        "resident_share": SLOTS / HEADER.experts,
        "steps": [
            *(step(name) for name in ("LRU on demand", "CE", "CE + BA")),
            *(step(name, 0.6) for name in lossy),
            *(step(name, alpha, switches={"prefetch": "auto", "alpha": alpha}) for name, alpha in presets.items()),
        ],
    }


def test_reuse_by_rank(trace: Trace, logits: dict[tuple[int, int], list[Token]]) -> None:
    used, cases = [0] * EXPERTS, 0
    for tokens in logits.values():
        chosen = [set(ranked(token)[:TOP_K]) for token in tokens]
        for t in range(len(tokens) - 3):
            cases += 1
            for rank, expert in enumerate(ranked(tokens[t])):
                used[rank] += any(expert in chosen[t + after] for after in (1, 2, 3))
    assert cases == 2 * (6 + 9)
    np.testing.assert_allclose(reuse_by_rank(stretches(trace)), [count / cases for count in used])


def test_shares_by_rank(trace: Trace, logits: dict[tuple[int, int], list[Token]]) -> None:
    expected = []
    for layer in (0, 3):
        for sequence in range(len(LENGTHS)):
            for token in logits[layer, sequence]:
                whole = sum(map(exp, token))
                expected.append([exp(token[expert]) / whole for expert in ranked(token)])
    np.testing.assert_allclose(shares_by_rank(stretches(trace)), expected, rtol=1e-5)


def test_missing_by_kind(trace: Trace, logits: dict[tuple[int, int], list[Token]]) -> None:
    """All that a replay misses is of one kind or the other; with the interval that holds every score, all is low."""
    routings = trace.routings(with_scores=True)
    counts = replay(routings, SLOTS, MIN_STAGING_SLOTS, make_eviction("lru"))
    ratio = counts.misses / counts.uses
    assert 0 < ratio < 1
    found = data.missing_by_kind(routings, SLOTS, "lru", 0.5, 0)
    assert found.top > 0 and found.low > 0
    assert found.top + found.low == pytest.approx(ratio)
    assert data.missing_by_kind(routings, SLOTS, "lru", 1e9, 0) == (0.0, pytest.approx(ratio))
    first = [logits[layer, 0][0] for layer in (0, 3)]
    low = sum(exp(token[e]) < 1.5 * exp(token[ranked(token)[TOP_K]]) for token in first for e in ranked(token)[:TOP_K])
    assert data.missing_by_kind(routings[:2], SLOTS, "lru", 0.5, 0).low == pytest.approx(low / 4)


def test_shares_add_up(trace: Trace, cell: dict[str, Any]) -> None:
    assert sum(data.time_shares(trace, cell, 0.6)) == pytest.approx(1.0)
    assert data.missing_of(trace, cell, "CE + CR", 0.6) == pytest.approx((0.1, 0.05, 0.2))
    assert sum(data.missing_of(trace, cell, "CE", 0.6)) == pytest.approx(0.5)
    assert data.prefetches_per_token(trace, cell, data.step_of(cell, "CE + CR + Pre")) == pytest.approx(2.5 - 0.5 * 4)


def test_all_are_drawn(
    trace: Trace,
    cell: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ablation = tmp_path / "ablation.json"
    ablation.write_text(json.dumps(cell))
    given = argparse.Namespace(out=tmp_path / "out", trace=trace.path, ablation=ablation, only=list(figures.FIGURES))
    monkeypatch.setattr(figures, "parse", lambda: given)
    figures.main()
    assert capsys.readouterr().err == ""
    names = {path.name for path in given.out.iterdir()}
    assert names == {*(f"smoe-figure-{n}.png" for n in (4, 6, 10, 15, 16, 17, 18)), "smoe-table-1.png"}
    assert all((given.out / name).read_bytes().startswith(b"\x89PNG") for name in names)


def test_what_is_not_there_is_left_out(
    trace: Trace, cell: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cell["steps"] = [entry for entry in cell["steps"] if entry["name"] != "LRU on demand"]
    written = figures.draw_all(trace, cell, tmp_path, ["6", "table-1"])
    assert [path.name for path in written] == ["smoe-figure-6.png"]
    assert "no step 'LRU on demand'" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="more than 12 tokens"):
        reuse_by_rank(stretches(trace), ahead=12)
