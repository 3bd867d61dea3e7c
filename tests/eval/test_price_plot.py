"""What a picture says: matplotlib leaves every text as a comment in an SVG."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from smoe.eval.plot import draw

pytest.importorskip("matplotlib")


def price(alpha: float, has_enough_tokens: bool) -> SimpleNamespace:
    quality = SimpleNamespace(alpha=alpha, median_seconds=0.1, hit_ratio=0.5)
    change = SimpleNamespace(value=alpha, low=alpha - 0.1, high=alpha + 0.1)
    return SimpleNamespace(quality=quality, perplexity=change, has_enough_tokens=has_enough_tokens)


def test_every_line_has_a_name(tmp_path):
    draw([price(0.0, True), price(0.3, True)], "a title", tmp_path / "a.svg")
    text = (tmp_path / "a.svg").read_text()
    for words in ("95 % interval", "perplexity", "exact model", "time a token, median (left)", "hits (right)"):
        assert f"<!-- {words} -->" in text


def test_an_interval_that_is_missing_is_said_to_be(tmp_path):
    draw([price(0.0, False), price(0.3, False)], "a title", tmp_path / "a.svg")
    text = (tmp_path / "a.svg").read_text()
    assert "too short for an interval" in text and "95 %" not in text
