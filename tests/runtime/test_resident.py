"""Tokens of a model whose experts are all in memory: no plan, and the bits, counts and errors of the usual way.

Would catch an expert of another layer, an address that stays behind when an expert moves to another slot, an observer
that sees nothing, a count that is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from smoe.runtime import resident
from smoe.runtime.observer import StepObserver
from tests import gguf_toy, oracle, promised
from tests.models.test_gguf_quantised import steps
from tests.runtime.test_preload import wait_for_all

Open = Callable[..., PreTrainedModel]
NEW = oracle.PROMPT.shape[1] - 12


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    promised.needs_machine_code()
    file = tmp_path_factory.mktemp("resident") / "toy.gguf"
    return gguf_toy.quantised(file, "Q4_K_M", num_experts=32, head_dim=64)[0]


@pytest.fixture
def passed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """One entry for every layer that needed no plan."""
    seen: list[int] = []
    original = resident._ResidentLayer.__call__

    def noted(self: Any, *given: torch.Tensor) -> torch.Tensor:
        seen.append(1)
        return original(self, *given)

    monkeypatch.setattr(resident._ResidentLayer, "__call__", noted)
    yield seen


@pytest.fixture
def model(path: Path, open_model: Open) -> PreTrainedModel:
    """All of its experts are in memory."""
    found = open_model(path, "full", kernels="auto", preload=None, context_tokens=256)
    wait_for_all(found)
    return found


def counted(model: PreTrainedModel) -> tuple[list[torch.Tensor], dict[str, float]]:
    """Logits, and what was counted meanwhile, times aside."""
    before = model.offload.stats()
    found = steps(model, oracle.PROMPT)
    return found, {
        name: value for name, value in asdict(model.offload.stats() - before).items() if "seconds" not in name
    }


def test_bits_and_counts_are_those_of_the_usual_way(model: PreTrainedModel, passed: list[int]) -> None:
    layers = model.config.num_hidden_layers
    ours, counts = counted(model)
    assert len(passed) == NEW * layers
    with model.offload.observed_by(StepObserver()):
        theirs, wanted = counted(model)
    assert len(passed) == NEW * layers, "an observer sees every step"
    assert all(map(torch.equal, ours, theirs)) and counts == wanted
    assert counts["decode_uses"] == counts["decode_hits"] == NEW * layers * model.config.num_experts_per_tok


def test_not_in_a_smaller_budget(path: Path, open_model: Open, passed: list[int]) -> None:
    steps(open_model(path, "half", kernels="auto"), oracle.PROMPT)
    assert not passed


def test_experts_that_move_are_found(model: PreTrainedModel, passed: list[int]) -> None:
    """Would catch addresses from before: everything is loaded again, into other slots."""
    wanted, engine = steps(model, oracle.PROMPT), model.offload
    table = engine.executor.table
    before = dict(table.ready)
    with engine.passes.turn():
        table.clear()
        table.pools[0].free_cache.rotate(3)
        engine.executor.arrivals.preload()
    wait_for_all(model)
    assert table.ready.keys() == before.keys() and table.ready != before
    passed.clear()
    assert all(map(torch.equal, steps(model, oracle.PROMPT), wanted)) and passed


def test_a_long_prompt_between_two_tokens_changes_nothing(model: PreTrainedModel, passed: list[int]) -> None:
    """Would catch tasks that refer to memory of the pool which a prompt has replaced by more."""
    wanted = steps(model, oracle.PROMPT)
    with torch.no_grad():
        model(oracle.PROMPT.repeat(1, 8))
    passed.clear()
    assert all(map(torch.equal, steps(model, oracle.PROMPT), wanted)) and passed


def test_a_row_that_needs_no_expert_goes_the_usual_way(model: PreTrainedModel, passed: list[int]) -> None:
    steps(model, oracle.PROMPT)
    passed.clear()
    with torch.no_grad():
        cache = model(oracle.PROMPT, use_cache=True).past_key_values
        mask = torch.ones(1, oracle.PROMPT.shape[1] + 1, dtype=torch.long)
        mask[0, -1] = 0
        model(oracle.PROMPT[:, :1], past_key_values=cache, attention_mask=mask, use_cache=True)
    assert not passed
