"""Texts of a model whose experts are all in memory: no plan, and the bits, counts and errors of the usual way.

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

from smoe.errors import GenerationCancelledError
from smoe.kernels.token_router import TokenRouter
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
def read(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The number of tokens, for every layer that computed several without a plan."""
    seen: list[int] = []
    original = resident._ResidentLayer._several

    def noted(self: Any, after: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
        seen.append(after.shape[1])
        return original(self, after, normed)

    monkeypatch.setattr(resident._ResidentLayer, "_several", noted)
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


def test_bits_and_counts_of_prompts_are_those_of_the_usual_way(model: PreTrainedModel, read: list[int]) -> None:
    layers, prompt = model.config.num_hidden_layers, oracle.PROMPT.repeat(1, 3)

    def logits() -> tuple[torch.Tensor, dict[str, float]]:
        before = model.offload.stats()
        with torch.no_grad():
            first = model(prompt, use_cache=True)
            found = model(prompt[:, :5], past_key_values=first.past_key_values, use_cache=True)
        counts = asdict(model.offload.stats() - before)
        return torch.cat([first.logits, found.logits], 1), {
            name: value for name, value in counts.items() if "seconds" not in name
        }

    ours, counts = logits()
    assert read == [prompt.shape[1]] * layers + [5] * layers
    with model.offload.observed_by(StepObserver()):
        theirs, wanted = logits()
    assert len(read) == 2 * layers, "an observer sees every step"
    assert torch.equal(ours, theirs) and counts == wanted and counts["prefill_uses"] == counts["prefill_hits"] > 0


def test_a_prompt_can_be_cancelled_between_layers(model: PreTrainedModel, read: list[int]) -> None:
    """Would catch a prompt that computes all layers after its request was cancelled."""
    before = model.offload.passes.turns.check
    calls = iter(range(100))

    def check() -> None:
        if next(calls) == 2:
            model.offload.cancel()
        before()

    model.offload.passes.turns.check = check  # type: ignore[method-assign]
    with pytest.raises(GenerationCancelledError):
        model(oracle.PROMPT, use_cache=True)
    assert len(read) == 2 < model.config.num_hidden_layers
    del model.offload.passes.turns.check  # type: ignore[method-assign]
    steps(model, oracle.PROMPT)


def test_a_module_with_a_hook_is_called(model: PreTrainedModel, read: list[int]) -> None:
    """Would catch hooks of routers, which scores and measurements need, that see no prompt."""
    seen: list[int] = []
    handle = model.model.layers[1].mlp.gate.register_forward_hook(lambda *_: seen.append(1))
    model(oracle.PROMPT, use_cache=True)
    handle.remove()
    assert len(seen) == 1 and len(read) == model.config.num_hidden_layers - 1


def test_not_in_a_smaller_budget(path: Path, open_model: Open, passed: list[int], read: list[int]) -> None:
    steps(open_model(path, "half", kernels="auto"), oracle.PROMPT)
    assert not passed and not read


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


@pytest.mark.parametrize("is_complete", [False, True])
def test_an_interrupt_while_tasks_are_made_again(
    is_complete: bool, model: PreTrainedModel, passed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before or after the router has the new tasks. Would catch tasks that count as made although no router writes
    addresses into them, which ends the process."""
    original = TokenRouter.complete

    def interrupted(*given: Any) -> None:
        if is_complete:
            original(*given)
        raise KeyboardInterrupt

    wanted = steps(model, oracle.PROMPT)
    with torch.no_grad():
        model(oracle.PROMPT.repeat(1, 8))
    with monkeypatch.context() as patched:
        patched.setattr(TokenRouter, "complete", interrupted)
        with pytest.raises(KeyboardInterrupt):
            steps(model, oracle.PROMPT)
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
