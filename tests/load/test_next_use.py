"""What was learned of a model: kept for it, refused where it is another's, of another version or cut short.

Would catch: numbers that change on disk, another model's estimate believed, `eviction=learned` without one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedModel

from smoe.errors import ConfigError
from smoe.load.learned_file import ModelShape, path_of
from smoe.load.next_use import TrainedNextUse
from smoe.policy.eviction.learned import FEATURES, Learned, NextUse
from smoe.policy.registry import LEARNED


def trained(experts: dict[int, int]) -> TrainedNextUse:
    layers, width, rank = max(experts) + 1, max(experts.values()), 2
    chance = np.random.default_rng(3)

    def numbers(*shape: int) -> np.ndarray:
        return chance.normal(size=shape).astype(np.float32)

    vectors = (layers, width, rank)
    next_use = NextUse(
        0.25, chance.normal(size=FEATURES), numbers(*vectors), numbers(layers, rank), numbers(*vectors),
        numbers(layers, width),
    )  # fmt: skip
    return TrainedNextUse(next_use, 900)


EXPERTS = {1: 8, 2: 6}


def read(folder: Path, experts: dict[int, int] = EXPERTS) -> TrainedNextUse:
    return TrainedNextUse.read(LEARNED, folder, ModelShape(experts))


@pytest.fixture
def folder(toy: Callable[..., Path], own_cache: None) -> Path:
    return toy("mixtral")


def test_what_was_learned_is_for_its_model(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"no tuned values are stored for the model in .* run smoe record, then"):
        read(folder)
    kept = trained(EXPERTS)
    assert kept.store(folder) == path_of("next-use", folder)
    found = read(folder)
    assert found.origin == "as trained on 900 recorded steps" and found.next_use.rate == 0.25
    assert all(np.array_equal(one, other) for one, other in zip(found.next_use, kept.next_use, strict=True))
    with pytest.raises(ConfigError, match="to a model with other layers or experts"):
        read(folder, {1: 8, 2: 16})


@pytest.mark.parametrize(
    "change",
    [{"weights": np.ones(1)}, {"usual": np.ones((1, 2), np.float32)}, {"offset": np.full((3, 8), np.nan)}],
)
def test_what_does_not_fit_is_refused(folder: Path, change: dict[str, np.ndarray]) -> None:
    kept = trained(EXPERTS)
    replace(kept, next_use=kept.next_use._replace(**change)).store(folder)
    with pytest.raises(ConfigError, match="to a model with other layers or experts"):
        read(folder)


def test_a_loaded_model_has_it(
    toy: Callable[..., Path], open_model: Callable[..., PreTrainedModel], folder: Path
) -> None:
    source = toy("qwen3_moe")
    with pytest.raises(ConfigError, match="`eviction=learned`: no tuned values"):
        open_model(source, "half", eviction="learned")
    plain = open_model(source, "half").offload
    experts = {layer: held.experts for layer, held in plain.store.layers.items()}
    kept = trained(experts)
    kept.store(source)
    engine = open_model(source, "half", eviction="learned").offload
    assert "as trained on 900" in engine.reasons["eviction"]
    assert engine.ledger.entries()["learned"] == kept.next_use.nbytes > 0
    policy = engine.fresh_eviction()
    assert isinstance(policy, Learned) and np.array_equal(policy._learned.target, kept.next_use.target)
