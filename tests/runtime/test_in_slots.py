"""A whole model whose experts are computed by the kernels for GPUs: on the emulated device, by Triton's interpreter.

Would catch: late experts that lack the table of their addresses, a sum that hangs on who was resident, rows of the CPU
beside the device that go nowhere, a second wait for the device in a layer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from smoe.gpu_kernels import slot_experts, source
from smoe.gpu_kernels.slot_experts import SlotExperts
from smoe.load import slot_kernels
from smoe.routing import Phase
from smoe.runtime.step import Step
from tests import oracle
from tests.gpu_kernels.slots_of_bytes import WHOLE

pytest.importorskip("triton", reason="Triton is not installed")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: test_cuda.py runs them there")

Open = Callable[..., PreTrainedModel]
BENCH: dict[str, Any] = {"device": "emulated", "dilation": 1.0, "prefetch": "none", "balance": "none"}
NEW_TOKENS = 2
FP32_ROUNDING = 1e-5


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are chosen as on a GPU, without measuring, and run in few programs."""
    monkeypatch.setattr(slot_kernels, "_is_gpu", lambda device: True)
    monkeypatch.setattr(slot_kernels, "_is_no_slower", lambda *_: True)
    for module in (slot_experts, source):
        monkeypatch.setattr(module, "tile_for", lambda tokens: WHOLE)


def steps(model: PreTrainedModel, rows: int = 1) -> list[torch.Tensor]:
    """Logits of a prompt's end and of a fixed text behind it."""
    text = torch.randint(3, 128, (rows, NEW_TOKENS), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        out = model(oracle.PROMPT.repeat(rows, 1), use_cache=True)
        found, cache = [out.logits], out.past_key_values
        for position in range(NEW_TOKENS):
            out = model(text[:, position : position + 1], past_key_values=cache, use_cache=True)
            found.append(out.logits)
    return found


def assert_near(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert oracle.relative_error(a, b) <= FP32_ROUNDING


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_the_same_bits_at_every_budget(
    family: str, toy: Callable[..., Path], open_model: Open, as_on_a_gpu: None
) -> None:
    """Nobody late, or nearly everybody."""
    folder = toy(family)
    models = [open_model(folder, budget, **BENCH) for budget in ("full", "minimum")]
    assert all(model.offload.arithmetic == "slots" for model in models)
    ours = [steps(model) for model in models]
    assert all(map(torch.equal, *ours)), "a result that hangs on the budget"
    assert_near(ours[0], steps(oracle.reference(folder)))


def test_several_sequences_and_the_cpu_beside_them(
    toy: Callable[..., Path], open_model: Open, as_on_a_gpu: None
) -> None:
    folder = toy("qwen3_moe")
    model = open_model(folder, "minimum", **{**BENCH, "balance": "host"}, max_sequences=3)
    assert model.offload.arithmetic == "slots"
    assert_near(steps(model, 3), steps(oracle.reference(folder), 3))
    assert model.offload.stats().host_computed > 0


def test_the_setting_keeps_torch(toy: Callable[..., Path], open_model: Open, as_on_a_gpu: None) -> None:
    model = open_model(toy("qwen3_moe"), "half", **BENCH, kernels="torch")
    assert model.offload.arithmetic == "torch"


WAITING = ("tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__", "nonzero")


@contextmanager
def suspended(state: threading.local) -> Iterator[None]:
    before, state.is_watched = getattr(state, "is_watched", False), False
    yield
    state.is_watched = before


def test_a_layer_waits_once(
    toy: Callable[..., Path], open_model: Open, as_on_a_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In decode. Every operation that would stop the host on a GPU is watched, but what the interpreter does itself."""
    model = open_model(toy("qwen3_moe"), "half", **BENCH)
    state, seen = threading.local(), []

    def watched(name: str) -> Any:
        original = getattr(torch.Tensor, name)

        def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if getattr(state, "is_watched", False):
                seen.append(name)
            with suspended(state):
                return original(self, *args, **kwargs)

        return method

    def unwatched(name: str) -> Any:
        original = getattr(SlotExperts, name)

        def method(self: SlotExperts, *args: Any, **kwargs: Any) -> None:
            with suspended(state):
                original(self, *args, **kwargs)

        return method

    run = model.offload.passes._answer

    def watch(step: Step) -> torch.Tensor:
        state.is_watched = step.phase is Phase.DECODE  # a prompt's guesses of the next layer wait, too
        try:
            return run(step)
        finally:
            state.is_watched = False

    for name in WAITING:
        monkeypatch.setattr(torch.Tensor, name, watched(name))
    for name in ("multiply", "sum"):
        monkeypatch.setattr(SlotExperts, name, unwatched(name))
    monkeypatch.setattr(model.offload.passes, "_answer", watch)
    executor = model.offload.executor
    before = executor.waits.copy()
    steps(model)
    layers = len(model.offload.store.layers)
    assert seen == ["tolist"] * layers * NEW_TOKENS
    assert executor.waits - before == {"choice": layers * (1 + NEW_TOKENS)}
    assert model.offload.stats().loads > 0
