"""What was in memory at the end of a run is loaded first by the next one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from smoe import user_cache
from smoe.load.last_residents import LastResidents, filling_when_idle
from tests import oracle
from tests.runtime.test_preload import wait_for_all

Open = Callable[..., PreTrainedModel]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(user_cache.PLACE, str(tmp_path / "cache"))


def residents(model: PreTrainedModel) -> set[tuple[int, int]]:
    return {key[:2] for key in model.offload.executor.table.cached()}


def test_the_next_run_begins_with_the_experts_of_the_last_one(toy: Callable[..., Path], open_model: Open) -> None:
    folder = toy("qwen3_moe")
    first = open_model(folder, "half", preload=None)
    with filling_when_idle(folder, first.offload):
        model_of_prompt = first.generate(oracle.PROMPT, max_new_tokens=8)
        assert model_of_prompt is not None
    stored = LastResidents.stored(folder)
    assert stored is not None and set(stored.experts) == residents(first)
    second = open_model(folder, "half", preload=None)
    with filling_when_idle(folder, second.offload):
        wait_for_all(second)
    assert residents(second) >= set(stored.experts[: second.offload.ledger.cache_slots])


def test_a_short_run_forgets_no_expert(toy: Callable[..., Path], open_model: Open) -> None:
    folder = toy("qwen3_moe")
    before = LastResidents(((0, 1), (1, 0)))
    before.store(folder)
    model = open_model(folder, "half", preload=False)
    with filling_when_idle(folder, model.offload):
        pass
    stored = LastResidents.stored(folder)
    assert stored is not None and set(stored.experts) >= set(before.experts)


def test_a_model_that_fits_stores_nothing(toy: Callable[..., Path], open_model: Open) -> None:
    folder = toy("qwen3_moe")
    model = open_model(folder, "full", preload=None)
    with filling_when_idle(folder, model.offload):
        wait_for_all(model)
    assert LastResidents.stored(folder) is None


@pytest.mark.parametrize("damage", ['{"format": 1, "experts": "3"}', '{"format": 1, "experts": 7}', "[]", ""])
def test_a_damaged_file_is_ignored(damage: str, toy: Callable[..., Path], open_model: Open) -> None:
    folder = toy("qwen3_moe")
    path = LastResidents.path_of(folder)
    path.parent.mkdir(parents=True)
    path.write_text(damage)
    model = open_model(folder, "half", preload=None)
    with filling_when_idle(folder, model.offload):
        wait_for_all(model)
    stored = LastResidents.stored(folder)
    assert stored is not None and len(stored.experts) == model.offload.ledger.cache_slots
