"""What a picture says: matplotlib leaves every text as a comment in an SVG."""

from __future__ import annotations

import pytest

from bench.mechanisms.plot import draw

pytest.importorskip("matplotlib")

_NONE = dict.fromkeys(
    (
        "wait_seconds_per_token",
        "host_wait_seconds_per_token",
        "look_ahead_seconds_per_token",
        "python_seconds_per_token",
        "expert_seconds_per_token",
    ),
    0.0,
)


def step(name: str, *rounds: float) -> dict[str, object]:
    times = {"seconds_per_token": rounds[0], "seconds_per_token_by_round": list(rounds)}
    shares = {"hit_ratio": 0.5, "host_computed_share": None, "other_layers_seconds_per_token": rounds[0]}
    return {"name": name} | times | shares | _NONE


def test_abbreviations_are_spelt_out_and_every_mark_has_a_name(tmp_path):
    draw([step("CE", 0.01, 0.012), step("CE + CR + Pre", 0.008, 0.009)], "a title", tmp_path / "a.svg")
    text = (tmp_path / "a.svg").read_text()
    for words in ("CE: eviction by score", "CR: substitution", "Pre: prefetch", "fastest to slowest", "of 2 rounds"):
        assert words in text
    assert "balance" not in text, "no step has it"


def test_a_missing_spread_is_said_to_be(tmp_path):
    draw([step("LRU on demand", 0.01)], "a title", tmp_path / "a.svg")
    text = (tmp_path / "a.svg").read_text()
    assert "one round: no spread is known" in text and "fastest to slowest" not in text
