"""What the pictures of recall say: matplotlib leaves every text as a comment in an SVG."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from smoe.eval.draft_recall import DraftRecall, RecallComparison
from smoe.eval.recall import Recall, Tally
from smoe.runtime.draft_model import Alignment

pytest.importorskip("matplotlib")


def recall(right: int) -> Recall:
    """Of ten tokens' two experts in one layer, those of the first `right` tokens."""
    tally = Tally([2], tokens=12, spares=0)
    named = np.array([[[0, 1]] if n < right else [[4, 5]] for n in range(10)])
    tally.add(np.array([[[0, 1]]] * 10), named)
    return tally.finished()


def found(*alignments: Alignment) -> RecallComparison:
    drafts = [DraftRecall("int4", each, recall(5 + n), 1.0) for n, each in enumerate(alignments)]
    gates = {"popularity": recall(9), "gate 1 ahead": recall(3), "gate 2 ahead": recall(2)}
    return RecallComparison(tuple(drafts), gates, {}, (4,), (10,))


def test_curves_are_those_of_the_extremes_beside_the_best_gate(tmp_path: Path) -> None:
    """Also where the last tokens were never decoded, and a curve ends."""
    from smoe.eval.recall_plot import draw_by_token

    pairs = [Alignment(token, kv) for token in (0, 1, 4) for kv in (0, 1, 4)]
    draw_by_token(found(*pairs), "a title", tmp_path / "a.svg")
    text = (tmp_path / "a.svg").read_text()
    for words in ("a title", "int4", "T0 KV0", "T1 KV0", "T0 KV1", "T1 KV1", "gate 1 ahead, all tokens"):
        assert f"<!-- {words} -->" in text, words
    assert "T4" not in text and "popularity" not in text and "gate 2" not in text


def test_periods_stand_in_their_own_fields(tmp_path: Path) -> None:
    from smoe.eval.recall_plot import draw_by_periods

    draw_by_periods(found(Alignment(1, 1), Alignment(0, 1), Alignment(1, 0)), "a title", tmp_path / "a.svg")
    text = (tmp_path / "a.svg").read_text()
    order = [text.index(f"<!-- {words} -->") for words in ("50.00", "70.00", "60.00")]
    assert order == sorted(order), "T1 KV1, T1 KV0, T0 KV1: never is last"
    assert "<!-- never -->" in text and "nan" not in text
