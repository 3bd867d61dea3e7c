"""Thresholds by shares: whose profile counts, what its quantiles are, and what is said where there is none.

Would catch: T1 and T2 in each other's place, a profile of another model or a broken one believed, thresholds that were
given overruled by a profile.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedModel

from smoe.errors import ConfigError
from smoe.load.importance_profile import ImportanceProfile, profile_of, thresholds_by
from smoe.models.files import DEMO_FOLDER
from smoe.policy.importance import Thresholds
from smoe.presets import configure
from tests.packs import pack_folder

VALUES = np.random.default_rng(0).beta(3, 2, 20_000)
VALUES[:5000] = 0.0
PROFILE = profile_of(VALUES.tolist(), 100, "a book")
HOBBIT = configure("hobbit")


@pytest.mark.parametrize("shares", [(67, 30, 3), (50, 49.75, 0.25), (33.3, 33.3, 33.4), (60, 40, 0)])
def test_shares_fall_to_each(shares: tuple[float, ...]) -> None:
    low, skip = PROFILE.thresholds(shares)
    found = [np.mean(low >= VALUES), np.mean((low < VALUES) & (skip >= VALUES)), np.mean(skip < VALUES)]
    assert np.allclose(found, np.array(shares) / 100, atol=0.004)
    assert shares[2] > 0 or skip == 1


def test_nobody_is_low_or_gone_who_should_not_be() -> None:
    assert PROFILE.thresholds((20, 80, 0)) == (0, 1), "the first of every token is always important"


def test_without_a_profile_hobbits_own_thresholds_hold(folder: Path) -> None:
    thresholds, why = thresholds_by(folder, HOBBIT)
    assert thresholds == (0.6, 0.9) and "not been profiled" in why and "smoe tune --shares 67,30,3" in why


def test_shares_that_were_asked_for_need_a_profile(folder: Path) -> None:
    asked = configure("hobbit", precision_shares=(50.0, 40.0, 10.0))
    with pytest.raises(ConfigError, match="smoe tune --shares 50,40,10 profiles it") as error:
        thresholds_by(folder, asked)
    assert error.value.setting == "precision_shares"
    PROFILE.store(folder)
    assert thresholds_by(folder, asked)[0] == PROFILE.thresholds((50, 40, 10))


def test_the_users_own_profile_counts_before_the_folders(folder: Path) -> None:
    other = profile_of((VALUES / 2).tolist(), 7, "a poem")
    (folder / ImportanceProfile.file_name).write_text(json.dumps(other.as_json()))
    thresholds, why = thresholds_by(folder, HOBBIT)
    assert thresholds == other.thresholds((67, 30, 3))
    assert why == "shares of 67/30/3 by the profile stored with the model: 7 tokens of a poem"
    PROFILE.store(folder)
    thresholds, why = thresholds_by(folder, HOBBIT)
    assert thresholds == PROFILE.thresholds((67, 30, 3)) and "as you profiled it: 100 tokens of a book" in why


STORED = PROFILE.as_json()


@pytest.mark.parametrize(
    "content",
    [
        json.dumps(STORED | {"quantiles": list(STORED["quantiles"])[:-1]}),
        json.dumps(STORED | {"quantiles": list(STORED["quantiles"])[::-1]}),
        json.dumps(STORED | {"quantiles": [2.0] * 201}),
        json.dumps(STORED | {"quantiles": ["a"] * 201}),
        json.dumps(STORED | {"quantiles": 3}),
    ],
)
def test_what_is_not_understood_is_not_believed(folder: Path, content: str) -> None:
    (folder / ImportanceProfile.file_name).write_text(content)
    assert thresholds_by(folder, HOBBIT)[0] == (0.6, 0.9)


def test_the_embedded_model_brings_one() -> None:
    if not (DEMO_FOLDER / ImportanceProfile.file_name).exists():
        pytest.skip("the embedded model is not in this tree")
    stored = json.loads((DEMO_FOLDER / ImportanceProfile.file_name).read_text())
    assert stored.pop("format") == STORED["format"]
    low, skip = ImportanceProfile(**stored).thresholds((67, 30, 3))
    assert 0.5 < low < skip < 1


def test_a_loaded_model_has_its_thresholds(
    toy: Callable[..., Path], open_model: Callable[..., PreTrainedModel], folder: Path
) -> None:
    source = Path(shutil.copytree(toy("qwen3_moe"), folder / "toy"))
    with pytest.raises(
        ConfigError, match=r"`low_precision=int4`: .*experts\.int4\.smoe is not there; run smoe pack"
    ) as e:
        open_model(source, "full", preset="hobbit", prefetch="none")
    assert e.value.setting == "low_precision" and e.value.facts["allowed"].startswith("none, or")
    pack_folder(source, precision="int4")
    PROFILE.store(source)
    engine = open_model(source, "full", preset="hobbit", prefetch="none").offload
    low, skip = PROFILE.thresholds((67, 30, 3))
    assert engine.executor.substitution.switches.thresholds == Thresholds(low, skip)
    assert (engine.config.low_threshold, engine.config.skip_threshold) == (low, skip)
    assert engine.config.lossy == [f"missing experts in int4 beyond {low:g}", f"none beyond {skip:g}"]
    assert f"dropped beyond {skip:g}: shares of 67/30/3 as you profiled it" in engine.reasons["low_threshold"]
    given = open_model(source, "full", preset="hobbit", prefetch="none", low_threshold=0.25).offload
    assert (given.config.low_threshold, given.config.skip_threshold) == (0.25, 0.9)
    assert "low_threshold" not in given.reasons
    assert engine.describe()["low_slots"] == engine.ledger.low_slots > 0
    assert f"and {engine.ledger.low_slots} low copies fit in memory" in repr(engine)
