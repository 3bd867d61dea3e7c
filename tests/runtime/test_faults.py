"""What happens when something goes wrong in the middle: the request is lost, the engine is not.

Would catch: a slot that stays in flight for ever, a failed expert counted as resident, an expert still being read into
a slot that was given to another one.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from smoe.compute.expert_math import ExpertMath
from smoe.errors import TransferError
from smoe.policy.plan import LoadReason
from smoe.routing import Phase
from smoe.runtime.engine import Engine
from smoe.runtime.execute import LayerExecutor
from tests import oracle

Open = Callable[..., PreTrainedModel]
Move = Callable[..., int]


def make_move_fail(engine: Engine, monkeypatch: pytest.MonkeyPatch, at: int) -> list[LoadReason]:
    """From now on the `at`-th read fails, once; why it was read is then in the list that comes back."""
    mover = engine._transfers._mover
    original: Move = mover.move
    number = itertools.count(1)  # atomic: two threads read
    failed: list[LoadReason] = []

    def move(ticket: Any, between: Any) -> int:
        if next(number) == at:
            failed.append(ticket.load.reason)
            raise TransferError(5, "injected: the disk is gone")
        return original(ticket, between)

    monkeypatch.setattr(mover, "move", move)
    return failed


def assert_healthy(model: PreTrainedModel, folder: Path) -> None:
    """Tables are consistent, nothing but wrong guesses is under way, and the next generation is exact."""
    executor = model.offload.executor
    executor.table.check()
    assert executor.table.inflight.keys() == executor.arrivals.tickets.keys()
    assert all(ticket.load.reason is LoadReason.PREFETCH for ticket in executor.arrivals.tickets.values())
    if not executor.prefetching.predictors.get(Phase.DECODE):
        assert not executor.table.inflight and not executor.table.staged
    assert set(executor.table.cached()) == residents(executor)
    oracle.assert_same_steps(oracle.greedy(model), oracle.reference_steps(folder))
    executor.table.check()
    assert set(executor.table.cached()) == residents(executor)


def residents(executor: LayerExecutor) -> set[Any]:
    """What the eviction policy believes is resident."""
    return set(executor.arrivals.eviction.victims(10**6, ()))


@pytest.mark.parametrize(("eviction", "prefetch"), [("lru", "none"), ("lru", "next-gate"), ("lfu", "next-gate")])
@pytest.mark.parametrize("at", [1, 9, 40, 100])
def test_read_error_loses_one_request(
    at: int,
    eviction: str,
    prefetch: str,
    toy: Callable[..., Path],
    open_model: Open,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In prefill (the first reads) and in decode. A failed prefetch is not an error: it is read again on demand."""
    folder = toy("qwen2_moe")
    model = open_model(folder, "fifth", eviction=eviction, prefetch=prefetch)
    failed = make_move_fail(model.offload, monkeypatch, at)
    try:
        oracle.greedy(model)
    except TransferError as error:
        assert "injected" in str(error)
    else:
        assert failed == [LoadReason.PREFETCH], "a failed demand load went unnoticed"
    assert len(failed) == 1
    assert_healthy(model, folder)


def test_every_read_fails_until_the_disk_is_back(
    toy: Callable[..., Path], open_model: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = toy("mixtral")
    model = open_model(folder, "minimum")

    def move(ticket: Any, between: Any) -> int:
        raise TransferError(5, "no disk")

    with monkeypatch.context() as broken:
        broken.setattr(model.offload._transfers._mover, "move", move)
        for _ in range(3):
            with pytest.raises(TransferError, match="no disk"):
                oracle.greedy(model)
    assert_healthy(model, folder)


@pytest.mark.parametrize("call", [1, 3, 20, 60, 120])
def test_interrupt_while_computing(
    call: int, toy: Callable[..., Path], open_model: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = toy("gpt_oss")  # has biases, hence one `forward` for each expert
    model = open_model(folder, "minimum")
    original = ExpertMath.forward
    calls: list[int] = []

    def forward(self: ExpertMath, *args: Any) -> torch.Tensor:
        calls.append(1)
        if len(calls) == call:
            raise KeyboardInterrupt
        return original(self, *args)

    with monkeypatch.context() as broken:
        broken.setattr(ExpertMath, "forward", forward)
        with pytest.raises(KeyboardInterrupt):
            oracle.greedy(model)
    assert_healthy(model, folder)


def interrupt_at(target: tuple[str, int], run: Callable[[], object]) -> bool:
    """Raise KeyboardInterrupt the first time `target` (file, line) is reached; whether it was."""
    hit: list[int] = []

    def local(frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line" and not hit and (frame.f_code.co_filename, frame.f_lineno) == target:
            hit.append(1)
            raise KeyboardInterrupt
        return local

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        return local if frame.f_code.co_filename == target[0] else None

    sys.settrace(trace)
    try:
        run()
    except KeyboardInterrupt:
        assert hit
    finally:
        sys.settrace(None)
    return bool(hit)


def reached_lines(files: set[str], run: Callable[[], object]) -> list[tuple[str, int]]:
    """(file, line) of every line of `files` that `run` executes, outside error handling."""
    lines: set[tuple[str, int]] = set()

    def local(frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line":
            lines.add((frame.f_code.co_filename, frame.f_lineno))
        return local

    sys.settrace(lambda frame, event, arg: local if frame.f_code.co_filename in files else None)
    try:
        run()
    finally:
        sys.settrace(None)
    return sorted(lines)


def test_interrupt_at_any_line(toy: Callable[..., Path], open_model: Open) -> None:
    """Ctrl-C between any two lines of planning, booking and submitting: would catch a window that loses a slot."""
    folder = toy("qwen2_moe", num_hidden_layers=2)
    model = open_model(folder, 6, prefetch="next-gate")
    executor = model.offload.executor
    files = {
        sys.modules[f"smoe.{name}"].__file__ or ""
        for name in (
            "runtime.execute",
            "runtime.arrivals",
            "policy.residency",
            "policy.eviction.auto",
            "policy.plan_progress",
            "memory.reading_threads",
            "runtime.engine",
            "runtime.passes",
        )
    }

    def step() -> object:
        return model.generate(oracle.PROMPT[:, :8], max_new_tokens=3, min_new_tokens=3, do_sample=False)

    expected = step()
    lines = reached_lines(files, step)
    assert len(lines) > 100
    for line in lines:
        interrupt_at(line, step)
        executor.table.check()
        assert not executor.table.inflight and not executor.table.staged, line
        assert set(executor.table.cached()) == residents(executor), line
        assert not model.offload.cancel(), f"{line}: it is still somebody's turn"
        assert torch.equal(step(), expected), line
    assert_healthy(model, folder)


@pytest.mark.slow
def test_an_interrupt_in_a_prediction_leaves_the_threads(toy: Callable[..., Path], open_model: Open) -> None:
    """A prediction computes on one thread: would catch an engine that goes on with it, slowly and with other bits."""
    files = {sys.modules[name].__file__ or "" for name in ("smoe.prediction.next_gate", "smoe.runtime.execute")}
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        model = open_model(toy("qwen2_moe", num_hidden_layers=2), 6, prefetch="next-gate")
        model.generate(oracle.PROMPT[:, :4], max_new_tokens=1)

        def step() -> object:
            return model(oracle.PROMPT[:, :1], use_cache=False)

        lines = reached_lines(files, step)
        assert any("prediction" in file for file, _ in lines), "nothing was predicted"
        for line in lines:
            assert interrupt_at(line, step), line
            assert torch.get_num_threads() == 2, line
    finally:
        torch.set_num_threads(before)
