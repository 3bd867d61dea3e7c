"""Recall on arrays small enough to count by hand (OD-MoE, equations 2 and 3).

Would catch: tokens after a prompt's end counted as wrong, a mean of means in the place of a sum over all, a spare that
counts without one, layers that nobody guessed counted against the guesser.
"""

from __future__ import annotations

import json

import numpy as np
import pytest

from smoe.eval.recall import Tally, by_token, named_right, overall
from smoe.prediction.activation_path import NO_EXPERT

RIGHT = np.array([[[2, 1], [2, 2], [0, 1]], [[1, 1], [2, 0], [2, 2]]])
"""c of 2 prompts, 3 tokens, 2 layers; the second prompt ends after two tokens, so its last row counts for nothing."""
EXISTS = np.array([[True, True, True], [True, True, False]])


def test_equation_2_by_hand() -> None:
    """Token 1: 3 + 2 of 8; token 2: 4 + 2 of 8; token 3: 1 of 4, as one prompt alone has it."""
    assert by_token(RIGHT, EXISTS, wanted=4).tolist() == [5 / 8, 6 / 8, 1 / 4]
    nowhere = by_token(RIGHT, EXISTS & [True, True, False], wanted=4)
    assert nowhere.tolist()[:2] == [5 / 8, 6 / 8] and np.isnan(nowhere[2])


def test_equation_3_by_hand() -> None:
    """12 of 20 chosen experts: not the mean of the three tokens' recalls, 13/24."""
    assert overall(RIGHT, EXISTS, wanted=4) == 12 / 20


def test_what_is_named_in_time_is_right() -> None:
    chosen = np.array([[[3, 5], [1, NO_EXPERT]]])
    named = np.array([[[5, 0, 3], [2, 1, NO_EXPERT]]])
    assert named_right(chosen, named, np.array([2, 1])).tolist() == [[1, 0]]
    assert named_right(chosen, named, np.array([3, 2])).tolist() == [[2, 1]], "with a spare"
    nobody = np.full_like(named, NO_EXPERT)
    assert named_right(chosen, nobody, np.array([2, 1])).tolist() == [[0, 0]], "nobody is no expert"


def test_a_tally_by_hand() -> None:
    """Two layers, top-2 and top-1; two prompts of 2 tokens and 1."""
    tally = Tally([2, 1], tokens=2, spares=1)
    tally.add(
        np.array([[[3, 5], [1, NO_EXPERT]], [[3, 4], [2, NO_EXPERT]]]),
        np.array([[[5, 3, 0], [1, 2, 0]], [[4, 5, 3], [1, 2, 0]]]),
    )
    tally.add(np.array([[[6, 7], [0, NO_EXPERT]]]), np.array([[[1, 2, 3], [0, 4, 5]]]))
    found = tally.finished()
    assert found.overall == (3 + 1 + 1) / 9 and found.overall_by_spares == [5 / 9, 7 / 9]
    assert found.whole_layer == 3 / 6 and found.whole_layer_by_spares == [3 / 6, 5 / 6]
    assert found.by_token.tolist() == [4 / 6, 1 / 3]
    assert found.by_layer == [3 / 6, 2 / 3]
    assert found.by_prompt == [4 / 6, 1 / 3]
    assert json.loads(json.dumps(found.as_json(), allow_nan=False))["recall_by_spares"] == [0.555556, 0.777778]


def test_layers_that_nobody_guessed_count_for_nothing() -> None:
    tally = Tally([2, 2], tokens=3, spares=1)
    named = np.full((1, 2, 3), NO_EXPERT)
    named[0, 1, :2] = 4, 5
    tally.add(np.array([[[0, 1], [4, 6]]]), named)
    found = tally.finished()
    assert (found.overall, found.whole_layer, found.by_layer) == (1 / 2, 0.0, [None, 1 / 2])
    assert not found.has_spares and found.overall_by_spares == [1 / 2], "as many as were chosen, and no more"
    assert np.isnan(found.by_token[1:]).all() and found.as_json()["by_token"] == [0.5, None, None]


@pytest.mark.parametrize("spares", [0, 2])
def test_a_guesser_that_knows_is_always_right(spares: int) -> None:
    tally, generator = Tally([2] * 3, tokens=5, spares=spares), np.random.default_rng(1)
    chosen = np.stack([[generator.permutation(8)[:2] for _ in range(3)] for _ in range(5)])
    rest = np.full((5, 3, spares), NO_EXPERT)
    tally.add(chosen, np.concatenate([chosen[..., ::-1], rest], axis=-1))
    assert tally.finished().overall == tally.finished().whole_layer == 1.0
