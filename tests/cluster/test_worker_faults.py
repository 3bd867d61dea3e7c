"""Workers that end, fall silent, are late or lie while a model is served: the bits stay, and the coordinator goes on.

Would catch a request that is lost with its worker, one that is waited for twice, a liar who is believed.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from smoe.cluster import frames
from smoe.cluster.frames import Frame, FrameKind, Times
from smoe.cluster.members import WorkerState
from smoe.cluster.remote import _PROOF_ROWS
from smoe.cluster.stored_identity import read_coordinator
from smoe.cluster.worker import WorkerProcess
from smoe.memory.streams import Fetched
from tests import oracle
from tests.cluster.conftest import BY_TURNS, cluster_of

Open = Callable[..., PreTrainedModel]
Start = Callable[..., list[Any]]


class Unreliable(WorkerProcess):
    """Serves its proofs, then does to every n-th request what `fault` says."""

    fault = "silent"
    every = 3
    served = 0

    def _answer(self, dealer: Any, frame: Frame) -> None:
        if frame.kind is FrameKind.WORK and self.is_proven:
            self.served += 1
            if self.served % self.every == 0:
                self.fail(dealer, frame)
                return
        super()._answer(dealer, frame)

    @property
    def is_proven(self) -> bool:
        return self.proofs_left <= 0

    proofs_left = len(_PROOF_ROWS)
    came_meanwhile: list[Frame]

    def _work(self, frame: Frame) -> None:
        self.proofs_left -= 1
        super()._work(frame)

    def fail(self, dealer: Any, frame: Frame) -> None:
        if self.fault == "garbage":
            self._send(dealer, [b"garbage", b"more"])
        elif self.fault == "other rows":
            self._send(dealer, [_done_header(frame), bytes(32), b"1234"])
        elif self.fault == "error":
            self._send(dealer, frames.failed(frame.request, "no disk"))
        elif self.fault == "lie":
            alone, asked = self._served.alone, frames.parse_work(frame, self._experts, self._rows.numbers)
            rows = [future.result().clone() for future in alone.experts.submit(asked.wanted, Fetched(asked.hidden))]
            rows[-1].view(torch.int16)[0, 0] ^= 1
            self._send(dealer, frames.done(frame.request, Times(1e-3, 1e-4), rows))
        elif self.fault == "slow":
            time.sleep(0.2)
            super()._answer(dealer, frame)
        elif self.fault == "frozen":
            time.sleep(0.8)
            while dealer.poll(0):
                self.came_meanwhile.append(frames.parse([part.buffer for part in dealer.recv_multipart(copy=False)]))
            self.every = 10**9
        elif self.fault == "gone":
            dealer.disconnect(self._me.address)
            self._is_ending = True


def _done_header(frame: Frame) -> bytes:
    return bytes(frames.done(frame.request, Times(0.0, 0.0), [torch.zeros(1, 1)])[0])


@pytest.mark.parametrize("fault", ["silent", "slow", "garbage", "other rows", "error", "gone"])
@pytest.mark.parametrize("others", [0, 1], ids=["alone", "beside another"])
def test_faults_change_no_bit(
    fault: str, others: int, toy: Callable[..., Path], start: Start, open_model: Open
) -> None:
    folder = toy("qwen3_moe", dtype=torch.bfloat16)
    kind = type("Faulty", (Unreliable,), {"fault": fault, "every": 8 if fault == "slow" else 5})
    start(folder, 1, kind)
    start(folder, others)
    model = open_model(folder, "minimum", cluster="test", cluster_workers=1 + others, **BY_TURNS)
    ours = oracle.greedy(model, new_tokens=12)
    theirs = oracle.reference_steps(folder)
    assert torch.equal(ours.prefill, theirs.prefill)
    assert all(torch.equal(a, b) for a, b in zip(ours.logits, theirs.logits, strict=False))
    faulty = [member for member in cluster_of(model).members if member.name == "w0"]
    if fault in ("garbage", "other rows", "gone"):
        assert any(member.why for member in faulty)
    if fault in ("silent", "slow"):
        assert any(member.missed for member in faulty)
    if others == 0:
        link = cluster_of(model).link
        assert link is not None and link.under_way.rescued > 0, "main went on alone"


def test_a_worker_that_is_silent_is_asked_no_more(toy: Callable[..., Path], start: Start, open_model: Open) -> None:
    """Until it says something: else every beat a token waits for it once more."""
    folder = toy("qwen3_moe", dtype=torch.bfloat16)
    (frozen,) = start(folder, 1, type("Frozen", (Unreliable,), {"fault": "frozen", "every": 20, "came_meanwhile": []}))
    start(folder, 2)
    model = open_model(folder, "minimum", cluster="test", cluster_workers=3, **BY_TURNS)
    alone = oracle.greedy(oracle.reference(folder), new_tokens=8)
    until = time.monotonic() + 20
    while not frozen.came_meanwhile and time.monotonic() < until:
        oracle.assert_same_steps(oracle.greedy(model, new_tokens=8), alone)
    came = [frame.kind for frame in frozen.came_meanwhile]
    assert came[-1] is FrameKind.BEAT, "the last word was no request, though coordinator has gone on"
    asked = cluster_of(model).members[0].requests
    while cluster_of(model).members[0].requests == asked and time.monotonic() < until:
        oracle.greedy(model, new_tokens=8)
    assert cluster_of(model).members[0].requests > asked or len(cluster_of(model).members) > 3, "it lives, and is asked"


def test_a_worker_that_lies_after_its_proof_is_found_out(
    toy: Callable[..., Path], start: Start, open_model: Open
) -> None:
    folder = toy("qwen3_moe", dtype=torch.bfloat16)
    (liar,) = start(folder, 1, type("Liar", (Unreliable,), {"fault": "lie", "every": 1}))
    start(folder, 1)
    model = open_model(folder, "minimum", cluster="test", cluster_workers=2, cluster_verify=1.0, **BY_TURNS)
    cluster = cluster_of(model)
    assert set(read_coordinator("test").workers) == {"w0", "w1"}
    oracle.greedy(model, new_tokens=12)
    model.offload.close()
    (doubt,) = cluster.doubts
    assert re.search(r"worker w0 returned a wrong result for expert \d of layer \d .* is no longer admitted", doubt)
    assert "may be wrong, so generate it again" in doubt
    assert set(read_coordinator("test").workers) == {"w1"}
    assert isinstance(cluster.greeted(liar._me.keys.public, liar._hello() | {"code": None}), str)


def test_who_says_nothing_is_late_though_nothing_was_asked(
    toy: Callable[..., Path], start: Start, open_model: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next token is not the one to find out. Heard of again, it is planned with."""
    folder = toy("qwen3_moe", dtype=torch.bfloat16)
    (worker,) = start(folder, 1)
    cluster = cluster_of(open_model(folder, "minimum", cluster="test", **BY_TURNS))
    (found,) = cluster.members
    turn, asleep = worker._turn, [0.8]

    def drowsy(dealer: Any) -> None:
        time.sleep(asleep.pop() if asleep else 0.0)
        turn(dealer)

    monkeypatch.setattr(worker, "_turn", drowsy)
    until = time.monotonic() + 10
    while found.state is WorkerState.READY and time.monotonic() < until:
        time.sleep(0.01)
    assert found.state is WorkerState.SUSPECT
    while not any(each.is_here for each in cluster.members) and time.monotonic() < until:
        time.sleep(0.01)
    assert any(each.is_here for each in cluster.members)


def test_who_was_lost_and_came_back_is_told_with_all_that_it_has_done(
    toy: Callable[..., Path], start: Start, open_model: Open
) -> None:
    folder = toy("qwen3_moe", dtype=torch.bfloat16)
    (first,) = start(folder, 1)
    model = open_model(folder, "minimum", cluster="test")
    cluster = cluster_of(model)
    cluster._here = cluster._here._replace(load=lambda: 1e9)
    oracle.greedy(model)
    (before,) = cluster.described()
    assert before["experts_computed"] > 0 and cluster.lost() == []
    first.end()
    wait_until(lambda: cluster.lost())
    (lost,) = cluster.lost()
    assert (lost["name"], lost["why"]) == ("w0", "left") and abs(lost["at"] - time.time()) < 60
    again = WorkerProcess(first._me, first._served)
    thread = threading.Thread(target=again.serve)
    thread.start()
    try:
        assert cluster.wait(1, 30.0)
        counts = ("experts_computed", "experts_recomputed", "requests", "deadlines_missed")
        (back,) = cluster.described()
        assert [back[each] for each in counts] == [before[each] for each in counts]
        oracle.greedy(model)
        (after,) = cluster.described()
        assert after["experts_computed"] > before["experts_computed"] and after["requests"] > before["requests"]
        assert len(cluster.lost()) == 1
    finally:
        again.end()
        thread.join(10)


def wait_until(is_so: Callable[[], object]) -> None:
    until = time.monotonic() + 20
    while not is_so() and time.monotonic() < until:
        time.sleep(0.02)
    assert is_so()
