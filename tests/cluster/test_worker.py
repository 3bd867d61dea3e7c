"""A worker's inside: what it reads, computes and forgets when. Would catch an earlier main's results sent to the next,
reading and computing that take turns, a slot that nobody gets back.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq

from smoe.cluster import frames
from smoe.cluster.stored_identity import Coordinator
from smoe.cluster.worker import WorkerProcess
from smoe.compute.expert_math import ExpertMath
from smoe.compute.unit import ExpertTask
from smoe.expert import EXACT, ExpertKey
from smoe.load.worker_experts import open_experts
from smoe.memory.streams import Fetched
from smoe.presets import configure
from tests.cluster.conftest import member


def test_what_an_earlier_main_asked_for_is_not_sent_to_the_next(
    toy: Callable[..., Path], coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An expert that was being computed when the next the coordinator let the worker in."""
    served = open_experts(toy("qwen3_moe", dtype=torch.bfloat16), 1 << 20, configure(threads=1))
    worker, experts = WorkerProcess(member("w"), served), served.alone.experts
    worker._welcomed({"arithmetic": "torch"})
    computing, begun, goes_on = experts._compute, threading.Event(), threading.Event()

    def slowly(*args: Any) -> torch.Tensor:
        begun.set()
        goes_on.wait(10)
        return computing(*args)

    monkeypatch.setattr(experts, "_compute", slowly)
    hidden = torch.ones(1, served.alone.hidden, dtype=torch.bfloat16)
    worker._work(frames.parse(frames.work(7, [ExpertTask((0, 0, EXACT), [0]), ExpertTask((0, 1, EXACT), [0])], hidden)))
    assert begun.wait(10)
    threading.Timer(0.05, goes_on.set).start()
    worker._welcomed({"arithmetic": "torch"})
    assert worker._queue.take() == []
    worker._work(frames.parse(frames.work(8, [ExpertTask((0, 1, EXACT), [0])], hidden)))
    experts.drain()
    until = time.monotonic() + 10
    while not (sent := worker._queue.take()) and time.monotonic() < until:
        time.sleep(0.01)
    assert [frames.parse(parts).request for parts in sent] == [8]
    worker._ahead.shutdown()
    worker._queue.close()
    served.alone.close()


class Dealer:
    """A connection to a coordinator that is not there at first, and says nothing."""

    def __init__(self) -> None:
        self.is_connected = False
        self.sent: list[frames.FrameKind] = []

    def poll(self, _: int) -> int:
        return 0

    def send_multipart(self, parts: list[Any], *_: Any, **__: Any) -> None:
        if not self.is_connected:
            raise zmq.Again
        self.sent.append(frames.parse([bytes(part) for part in parts]).kind)


def test_a_worker_greets_as_soon_as_there_is_a_connection(
    toy: Callable[..., Path], coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And again only after a while."""
    served = open_experts(toy("qwen3_moe", dtype=torch.bfloat16), 1 << 20, configure(threads=1))
    worker, dealer = WorkerProcess(member("w"), served), Dealer()
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    worker._turn(dealer)  # type: ignore[arg-type]
    dealer.is_connected = True
    worker._turn(dealer)  # type: ignore[arg-type]
    worker._turn(dealer)  # type: ignore[arg-type]
    assert dealer.sent == [frames.FrameKind.HELLO]
    now[0] = 101.0
    worker._turn(dealer)  # type: ignore[arg-type]
    assert dealer.sent == [frames.FrameKind.HELLO] * 2
    worker._over()
    worker._queue.close()
    served.alone.close()


def test_a_worker_reads_an_expert_while_it_computes_another(
    toy: Callable[..., Path], coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt's experts come in requests of their own."""
    served = open_experts(toy("qwen3_moe", dtype=torch.bfloat16), None, configure(threads=1), slots=2)
    experts, (first, second) = served.alone.experts, [(0, 0, EXACT), (0, 1, EXACT)]
    fill, forward, is_read = experts._filler.fill, ExpertMath.forward, threading.Event()

    def filled(key: ExpertKey, *args: Any) -> int:
        came = fill(key, *args)
        if key == second:
            is_read.set()
        return came

    overlapped = []

    def computed(*args: Any) -> torch.Tensor:
        overlapped.append(is_read.wait(10))
        return forward(*args)

    monkeypatch.setattr(experts._filler, "fill", filled)
    monkeypatch.setattr(ExpertMath, "forward", computed)
    hidden = Fetched(torch.ones(1, served.alone.hidden, dtype=torch.bfloat16))
    asked = [experts.submit([ExpertTask(key, [0])], hidden) for key in (first, second)]
    assert all(future.result(20).shape == hidden.wait().shape for (future,) in asked)
    assert overlapped == [True, True]
    assert len(list(experts.reads())) == 2
    served.alone.close()


def test_what_is_here_is_computed_while_the_rest_is_read(
    toy: Callable[..., Path], coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the answers are in the order asked for."""
    served = open_experts(toy("qwen3_moe", dtype=torch.bfloat16), None, configure(threads=1), slots=2)
    experts, computed = served.alone.experts, list[ExpertKey]()
    hidden = Fetched(torch.randn(1, served.alone.hidden).bfloat16())
    keys: list[ExpertKey] = [(0, expert, EXACT) for expert in range(4)]
    alone = [experts.submit([ExpertTask(key, [0])], hidden)[0].result(10) for key in keys]  # the last two are kept
    computing = experts._compute

    def noted(key: ExpertKey, *args: Any) -> torch.Tensor:
        computed.append(key)
        return computing(key, *args)

    monkeypatch.setattr(experts, "_compute", noted)
    together = [future.result(10) for future in experts.submit([ExpertTask(key, [0]) for key in keys], hidden)]
    assert all(map(torch.equal, together, alone))
    assert computed == [*keys[2:], *keys[:2]]
    served.alone.close()


def test_what_nobody_waits_for_leaves_its_slot(
    toy: Callable[..., Path], coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that are forgotten while their experts are read, or hold a slot; others get the slots."""
    served = open_experts(toy("qwen3_moe", dtype=torch.bfloat16), None, configure(threads=1), slots=2)
    experts, forward = served.alone.experts, ExpertMath.forward
    begun, goes_on = threading.Event(), threading.Event()

    def slowly(*args: Any) -> torch.Tensor:
        begun.set()
        goes_on.wait(10)
        return forward(*args)

    hidden = Fetched(torch.ones(1, served.alone.hidden, dtype=torch.bfloat16))
    monkeypatch.setattr(ExpertMath, "forward", slowly)
    dropped = experts.submit([ExpertTask((0, expert, EXACT), [0]) for expert in range(8)], hidden)
    assert begun.wait(10)
    threading.Timer(0.05, goes_on.set).start()
    experts.drain()
    assert sum(future.cancelled() for future in dropped) == 7
    again = experts.submit([ExpertTask((1, expert, EXACT), [0]) for expert in range(8)], hidden)
    assert all(future.result(10) is not None for future in again)
    experts.drain()
    assert not served.alone._host._leased
    served.alone.close()
