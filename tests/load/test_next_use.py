"""What was learned of a model: kept for it, refused where it is another's, of another version or cut short.

Would catch: numbers that change on disk, another model's estimate believed, `eviction` learned without one.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedModel

from smoe.errors import ConfigError
from smoe.load.next_use import TrainedNextUse, next_use_of, remember
from smoe.policy.eviction.learned import FEATURES, Learned, NextUse


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
    return TrainedNextUse(next_use, experts, 900)


EXPERTS = {1: 8, 2: 6}


def test_what_was_learned_is_for_its_model(folder: Path) -> None:
    with pytest.raises(ConfigError, match="nobody has trained it yet on traces of this model; run smoe record, then"):
        next_use_of(folder, EXPERTS)
    kept = trained(EXPERTS)
    remember(folder, kept)
    found, why = next_use_of(folder, EXPERTS)
    assert why == "as trained on 900 recorded steps" and found.rate == 0.25
    assert all(np.array_equal(one, other) for one, other in zip(found, kept.next_use, strict=True))
    with pytest.raises(ConfigError, match="nobody has trained it"):
        next_use_of(folder.parent, EXPERTS)
    with pytest.raises(ConfigError, match="of a model with other layers or experts"):
        next_use_of(folder, {1: 8, 2: 8})


@pytest.mark.parametrize(
    "change",
    [
        None,
        {"format": 2},
        {"rate": "much"},
        {"weights": [1.0]},
        {"experts": {"1": 8, "3": 6}},
        {"source": {"shape": [3, 8, 2], "float32": "AAAA"}},
        {"usual": {"shape": [1], "float32": "AADAfw=="}},
        {"target": 0},
        {"experts": []},
    ],
)
def test_what_cannot_be_understood_is_as_nothing(folder: Path, change: dict[str, object] | None) -> None:
    path = remember(folder, trained(EXPERTS))
    text = path.read_text()
    path.write_text(text[: len(text) // 2] if change is None else json.dumps(json.loads(text) | change))
    with pytest.raises(ConfigError, match="nobody has trained it"):
        next_use_of(folder, EXPERTS)


def test_a_loaded_model_has_it(
    toy: Callable[..., Path], open_model: Callable[..., PreTrainedModel], folder: Path
) -> None:
    source = toy("qwen3_moe")
    with pytest.raises(ConfigError, match="`eviction` is 'learned', but nobody"):
        open_model(source, "half", eviction="learned")
    plain = open_model(source, "half").offload
    experts = {layer: held.experts for layer, held in plain.store.layers.items()}
    kept = trained(experts)
    remember(source, kept)
    engine = open_model(source, "half", eviction="learned").offload
    assert "as trained on 900" in engine.reasons["eviction"]
    policy = engine.fresh_eviction()
    assert isinstance(policy, Learned) and np.array_equal(policy._learned.target, kept.next_use.target)
