"""The threshold of a preset: whose word counts, and where it holds.

Would catch: a price taken for fewer resident experts than it was measured with, a folder's word before the user's own,
a broken or newer file believed, two models taken for one.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from transformers import PreTrainedModel

from smoe.config import DEFAULT_ALPHA
from smoe.load.priced_alpha import PricedAlpha, threshold_of
from smoe.presets import configure

PRICED = PricedAlpha(0.5, 0.01, -0.002, 0.004, 0.25, 2000, "a book")


def test_an_unpriced_model_has_the_usual_alpha(folder: Path) -> None:
    alpha, why = threshold_of(folder, 1.0)
    assert alpha == DEFAULT_ALPHA and "has not been measured" in why and "smoe tune" in why


def test_a_price_holds_with_as_many_experts_or_more(folder: Path) -> None:
    PRICED.store(folder)
    assert [threshold_of(folder, share)[0] for share in (0.2, 0.25, 1.0)] == [DEFAULT_ALPHA, 0.5, 0.5]
    assert "your quality cost is for 25% of the experts resident, and there are 20%" in threshold_of(folder, 0.2)[1]
    assert threshold_of(folder, 0.3)[1] == (
        "as you measured it: perplexity -0.20 .. +0.40 % "
        "(interval of 95 %; 2000 tokens of a book, 25% of the experts resident)"
    )


def test_the_users_own_price_counts_before_the_folders(folder: Path) -> None:
    (folder / PricedAlpha.file_name).write_text(json.dumps(replace(PRICED, alpha=0.6, resident_share=0.1).as_json()))
    assert "its quality cost is for 10%" in threshold_of(folder, 0.05)[1]
    assert (
        threshold_of(folder, 0.3)[0] == 0.6 and "the quality cost stored with the model" in threshold_of(folder, 0.3)[1]
    )
    PRICED.store(folder)
    assert [threshold_of(folder, share)[0] for share in (0.3, 0.15, 0.05)] == [0.5, DEFAULT_ALPHA, DEFAULT_ALPHA], (
        "never more than the user's own"
    )
    assert "your quality cost is for 25%" in threshold_of(folder, 0.15)[1]
    replace(PRICED, alpha=0.1).store(folder)
    assert [threshold_of(folder, share)[0] for share in (0.3, 0.15, 0.05)] == [0.1, 0.1, 0.1]


def test_an_impossible_alpha_is_not_used(folder: Path) -> None:
    (folder / PricedAlpha.file_name).write_text(json.dumps(PRICED.as_json() | {"alpha": 7}))
    assert threshold_of(folder, 1.0)[0] == DEFAULT_ALPHA


def test_an_alpha_that_is_given_is_meant() -> None:
    assert configure("smoe").alpha_as_priced and not configure("smoe", alpha=0.3).alpha_as_priced
    assert not configure("exact").alpha_as_priced and not configure("smoe-exact").alpha_as_priced


def test_a_loaded_model_is_served_with_its_price(
    toy: Callable[..., Path], open_model: Callable[..., PreTrainedModel], folder: Path
) -> None:
    source = toy("qwen3_moe")
    replace(PRICED, resident_share=0.1).store(source)
    engine = open_model(source, "half", preset="smoe").offload
    assert (
        engine.config.alpha == 0.5 == engine.executor.substitution.switches.alpha
        and "as you measured it" in engine.reasons["alpha"]
    )
    given = open_model(source, "half", preset="smoe", alpha=0.2).offload
    assert given.config.alpha == 0.2 and not given.reasons
