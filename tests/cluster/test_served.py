"""A model served by a cluster gives the bits of the unmodified library, whoever computes and whatever happens.

Would catch: rows that go to the wrong expert or come back in another order, a sum whose order depends on who answered
first, a prompt whose experts are both loaded here and computed there, a worker with another model that is believed.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from smoe.cluster import frames
from smoe.cluster.address import checked_address
from smoe.cluster.frames import Frame, Kind, Times
from smoe.cluster.identity import Main, keep_main, read_main
from smoe.cluster.remote import _PROOF_ROWS, Cluster
from smoe.cluster.worker import WorkerProcess
from smoe.compute.expert_math import ExpertMath
from smoe.compute.unit import Wanted
from smoe.errors import ClusterError, ConfigError
from smoe.expert import EXACT, ExpertKey
from smoe.kernels.isa import widest
from smoe.load.worker_experts import open_experts
from smoe.memory.streams import Fetched
from smoe.policy.placement import PLACEMENT
from smoe.presets import configure
from tests import oracle, zoo
from tests.cluster.conftest import has_ipv6, member
from tests.packs import pack_folder

Open = Callable[..., PreTrainedModel]
Start = Callable[..., list[Any]]
BY_TURNS: dict[str, Any] = {"placement": "round-robin", "prefetch": "next-gate", "eviction": "lru"}


def cluster_of(model: PreTrainedModel) -> Cluster:
    others = model.offload.executor.compute.others
    assert isinstance(others, Cluster)
    return others


def everything_there(model: PreTrainedModel) -> None:
    """From now on nothing is loaded here: workers are nearer than any disk."""
    cluster_of(model)._here_load = lambda: 1e9


@pytest.mark.parametrize("switches", [{}, BY_TURNS], ids=["finish", "by turns"])
@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_a_cluster_is_exact(
    dtype: torch.dtype, workers: int, switches: dict[str, Any], toy: Callable[..., Path], start: Start, open_model: Open
) -> None:
    folder = toy("qwen3_moe", dtype=dtype)
    start(folder, workers)
    model = open_model(folder, "minimum", cluster="test", cluster_workers=workers, **switches)
    everything_there(model)
    oracle.assert_same_steps(oracle.greedy(model), oracle.reference_steps(folder))
    stats = model.offload.stats()
    not_there = stats.decode_uses - stats.decode_hits - stats.host_computed
    assert 0 <= not_there <= stats.loads, "what is not computed there was being prefetched when it was asked for"
    assert stats.host_computed > stats.decode_uses // 2
    assert stats.prefill_host_computed > 0
    if switches:
        assert stats.loads == 0, "main keeps no experts"
    assert {member.name for member in cluster_of(model).members if member.experts} == {
        f"w{n}" for n in range(workers)
    }, "all have worked"


@pytest.mark.parametrize("placement", PLACEMENT)
def test_what_a_shadow_expects_is_brought_in_before_it_is_asked_for(
    placement: str, tmp_path: Path, start: Start, open_model: Open
) -> None:
    folder = zoo.save("qwen3_moe", tmp_path / "model", dtype=torch.bfloat16)
    pack_folder(folder, precision="int4")
    workers = start(folder, 3)
    fetched: list[Any] = []
    for worker in workers:
        bring = worker._served.alone.experts.bring
        worker._served.alone.experts.bring = lambda key, bring=bring: (fetched.append(key), bring(key))
    switches = {"prefetch": "shadow", "shadow_spares": 1, "prefetch_trial": False, "eviction": "lru"}
    model = open_model(folder, "minimum", cluster="test", cluster_workers=3, placement=placement, **switches)
    everything_there(model)
    oracle.assert_same_steps(oracle.greedy(model), oracle.reference_steps(folder))
    stats = model.offload.stats()
    assert len(fetched) > 10 and {key[0] for key in fetched} >= {1, 2, 3}, "of all layers that others come before"
    assert stats.host_computed > stats.decode_uses // 2


@pytest.mark.parametrize("family", ["gpt_oss", "deepseek_v3", "mixtral"])
def test_other_families_are_exact(family: str, toy: Callable[..., Path], start: Start, open_model: Open) -> None:
    folder = toy(family, dtype=torch.bfloat16)
    start(folder, 2)
    model = open_model(folder, "minimum", cluster="test", cluster_workers=2, **BY_TURNS)
    oracle.assert_same_steps(oracle.greedy(model), oracle.reference_steps(folder))


def test_a_batch_is_exact(toy: Callable[..., Path], start: Start, open_model: Open) -> None:
    folder = toy("qwen3_moe", dtype=torch.bfloat16)
    prompt = torch.cat([oracle.PROMPT, oracle.PROMPT.flip(1), oracle.PROMPT.roll(5, 1), oracle.PROMPT.roll(9, 1)])
    start(folder, 2)
    model = open_model(folder, "minimum", cluster="test", cluster_workers=2, max_sequences=4, **BY_TURNS)
    alone = oracle.greedy(oracle.reference(folder), prompt, 8)
    oracle.assert_same_steps(oracle.greedy(model, prompt, 8), alone)


class Unreliable(WorkerProcess):
    """Serves its proofs, then does to every n-th request what `fault` says."""

    fault = "silent"
    every = 3
    served = 0

    def _answer(self, dealer: Any, frame: Frame) -> None:
        if frame.kind is Kind.WORK and self.is_proven:
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
        assert link is not None and link.asking.rescued > 0, "main went on alone"


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
    assert came[-1] is Kind.BEAT, "the last word was no request, though main has gone on"
    asked = cluster_of(model).members[0].requests
    while cluster_of(model).members[0].requests == asked and time.monotonic() < until:
        oracle.greedy(model, new_tokens=8)
    assert cluster_of(model).members[0].requests > asked or len(cluster_of(model).members) > 3, "it lives, and is asked"


@pytest.mark.parametrize("host", ["localhost", "[::1]"])
def test_workers_come_by_a_name_and_by_ipv6(
    host: str, toy: Callable[..., Path], main: Main, start: Start, open_model: Open
) -> None:
    if host == "[::1]" and not has_ipv6():
        pytest.skip("no IPv6 here")
    keep_main(replace(main, address=checked_address(f"{host}:{main.address.rpartition(':')[2]}")))
    folder = toy("qwen3_moe", dtype=torch.bfloat16)
    start(folder, 1)
    model = open_model(folder, "minimum", cluster="test", **BY_TURNS)
    oracle.assert_same_steps(oracle.greedy(model, new_tokens=2), oracle.greedy(oracle.reference(folder), new_tokens=2))
    assert all(member.experts for member in cluster_of(model).members)


def test_a_worker_makes_room_for_a_main_of_longer_prompts(
    toy: Callable[..., Path], start: Start, open_model: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would be cut off from main by the first of them."""
    folder = toy("qwen3_moe", dtype=torch.bfloat16)
    monkeypatch.setattr("smoe.cluster.worker.PLANNED_ROWS", 8)
    monkeypatch.setattr("smoe.cluster.frames._MOST_TALK", 700)
    (worker,) = start(folder, 1)
    assert worker._rows.part_bytes < 24 * worker._rows.numbers * 2
    model = open_model(folder, "minimum", cluster="test", **BY_TURNS)
    oracle.assert_same_steps(oracle.greedy(model), oracle.reference_steps(folder))
    assert worker._rows == cluster_of(model)._rows and worker._rows.most == 2 * max(_PROOF_ROWS)
    link = cluster_of(model).link
    assert link is not None and link.asking.rescued == 0


def test_what_is_longer_than_planned_is_computed_here(toy: Callable[..., Path], start: Start, open_model: Open) -> None:
    folder = toy("qwen3_moe", dtype=torch.bfloat16)
    start(folder, 1)
    model = open_model(folder, "minimum", cluster="test", **BY_TURNS)
    link = cluster_of(model).link
    assert link is not None
    link.asking.most_rows = 2
    oracle.assert_same_steps(oracle.greedy(model), oracle.reference_steps(folder))
    assert link.asking.rescued > 0 and not any(member.why for member in cluster_of(model).members)


def test_a_worker_that_lies_after_its_proof_is_found_out(
    toy: Callable[..., Path], start: Start, open_model: Open
) -> None:
    folder = toy("qwen3_moe", dtype=torch.bfloat16)
    (liar,) = start(folder, 1, type("Liar", (Unreliable,), {"fault": "lie", "every": 1}))
    start(folder, 1)
    model = open_model(folder, "minimum", cluster="test", cluster_workers=2, cluster_verify=1.0, **BY_TURNS)
    cluster = cluster_of(model)
    assert set(read_main("test").workers) == {"w0", "w1"}
    oracle.greedy(model, new_tokens=12)
    model.offload.close()
    (doubt,) = cluster.doubts
    assert re.search(
        r"worker w0 returned other bits than main's for expert \d of layer \d .* is let in no longer", doubt
    )
    assert "may be wrong, so have it written again" in doubt
    assert set(read_main("test").workers) == {"w1"}
    assert isinstance(cluster.knocked(liar._me.keys.public, liar._hello() | {"code": None}), str)


def test_an_honest_worker_is_not_accused(toy: Callable[..., Path], start: Start, open_model: Open) -> None:
    """Of what it has computed a part is recomputed, of prompts and of tokens; nothing is another number for it."""
    folder = toy("qwen3_moe", dtype=torch.bfloat16)
    start(folder, 2)
    model = open_model(folder, "minimum", cluster="test", cluster_workers=2, cluster_verify=1.0, **BY_TURNS)
    cluster = cluster_of(model)
    oracle.assert_same_steps(oracle.greedy(model), oracle.reference_steps(folder))
    members = cluster.members
    model.offload.close()
    assert cluster.doubts == [] and all(member.checked > 0 and not member.why for member in members)


def test_workers_come_and_go_between_tokens(toy: Callable[..., Path], start: Start, open_model: Open) -> None:
    folder = toy("qwen3_moe", dtype=torch.bfloat16)
    (first,) = start(folder, 1)
    model = open_model(folder, "minimum", cluster="test", cluster_workers=1, **BY_TURNS)
    alone = oracle.greedy(oracle.reference(folder), new_tokens=8)
    oracle.assert_same_steps(oracle.greedy(model, new_tokens=8), alone)
    start(folder, 1)
    assert len(cluster_of(model).wait(2, 10)) == 2
    oracle.assert_same_steps(oracle.greedy(model, new_tokens=8), alone)
    first.end()
    until = time.monotonic() + 10
    while cluster_of(model).members[0].is_here and time.monotonic() < until:
        time.sleep(0.02)
    oracle.assert_same_steps(oracle.greedy(model, new_tokens=8), alone)
    assert [member.why for member in cluster_of(model).members] == ["left", ""]


@pytest.mark.skipif(widest() is None, reason="needs llvmlite and AVX2")
def test_a_worker_serves_mains_of_other_kernels(toy: Callable[..., Path], start: Start, open_model: Open) -> None:
    """One after the other; and what computed for the one before is over."""
    folder = toy("qwen3_moe", dtype=torch.bfloat16, hidden_size=256, head_dim=64, moe_intermediate_size=64)
    (worker,) = start(folder, 1)
    pool: Any = None
    for kernels in ("torch", "own-order", "torch"):
        alone = open_model(folder, "minimum", kernels=kernels)
        model = open_model(folder, "minimum", kernels=kernels, cluster="test", **BY_TURNS)
        pool = worker._served.alone.experts._pool or pool
        oracle.assert_same_steps(oracle.greedy(model), oracle.greedy(alone))
        assert sum(member.experts for member in cluster_of(model).members) > 0
        model.offload.close()
    assert pool.own_order is not None and pool._is_closed
    assert worker._served.alone.experts._pool is None


def test_what_an_earlier_main_asked_for_is_not_sent_to_the_next(
    toy: Callable[..., Path], main: Main, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An expert that was being computed when the next main let the worker in."""
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
    worker._work(frames.parse(frames.work(7, [Wanted((0, 0, EXACT), [0]), Wanted((0, 1, EXACT), [0])], hidden)))
    assert begun.wait(10)
    threading.Timer(0.05, goes_on.set).start()
    worker._welcomed({"arithmetic": "torch"})
    assert worker._bell.take() == []
    worker._work(frames.parse(frames.work(8, [Wanted((0, 1, EXACT), [0])], hidden)))
    experts.drain()
    until = time.monotonic() + 10
    while not (sent := worker._bell.take()) and time.monotonic() < until:
        time.sleep(0.01)
    assert [frames.parse(parts).request for parts in sent] == [8]
    worker._ahead.shutdown()
    worker._bell.close()
    served.alone.close()


def test_a_worker_reads_an_expert_while_it_computes_another(
    toy: Callable[..., Path], main: Main, monkeypatch: pytest.MonkeyPatch
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
    asked = [experts.submit([Wanted(key, [0])], hidden) for key in (first, second)]
    assert all(future.result(20).shape == hidden.wait().shape for (future,) in asked)
    assert overlapped == [True, True]
    assert len(list(experts.reads())) == 2
    served.alone.close()


def test_what_is_here_is_computed_while_the_rest_is_read(
    toy: Callable[..., Path], main: Main, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the answers are in the order asked for."""
    served = open_experts(toy("qwen3_moe", dtype=torch.bfloat16), None, configure(threads=1), slots=2)
    experts, computed = served.alone.experts, list[ExpertKey]()
    hidden = Fetched(torch.randn(1, served.alone.hidden).bfloat16())
    keys: list[ExpertKey] = [(0, expert, EXACT) for expert in range(4)]
    alone = [experts.submit([Wanted(key, [0])], hidden)[0].result(10) for key in keys]  # the last two are kept
    computing = experts._compute

    def noted(key: ExpertKey, *args: Any) -> torch.Tensor:
        computed.append(key)
        return computing(key, *args)

    monkeypatch.setattr(experts, "_compute", noted)
    together = [future.result(10) for future in experts.submit([Wanted(key, [0]) for key in keys], hidden)]
    assert all(map(torch.equal, together, alone))
    assert computed == [*keys[2:], *keys[:2]]
    served.alone.close()


def test_what_nobody_waits_for_leaves_its_slot(
    toy: Callable[..., Path], main: Main, monkeypatch: pytest.MonkeyPatch
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
    dropped = experts.submit([Wanted((0, expert, EXACT), [0]) for expert in range(8)], hidden)
    assert begun.wait(10)
    threading.Timer(0.05, goes_on.set).start()
    experts.drain()
    assert sum(future.cancelled() for future in dropped) == 7
    again = experts.submit([Wanted((1, expert, EXACT), [0]) for expert in range(8)], hidden)
    assert all(future.result(10) is not None for future in again)
    experts.drain()
    assert not served.alone._host._leased
    served.alone.close()


@pytest.mark.parametrize("slots", [1, 2])
def test_workers_without_a_cache_are_exact(
    slots: int, toy: Callable[..., Path], start: Start, open_model: Open
) -> None:
    """OD-MoE's: an expert is forgotten for the next; with two slots while the next one comes."""
    folder = toy("qwen3_moe", dtype=torch.bfloat16)
    workers = start(folder, 2, slots=slots)
    assert all(worker._served.alone.slots == slots for worker in workers)
    model = open_model(folder, "minimum", cluster="test", cluster_workers=2, **BY_TURNS)
    oracle.assert_same_steps(oracle.greedy(model), oracle.reference_steps(folder))
    assert all(member.experts for member in cluster_of(model).members)


def test_another_model_is_refused_by_name(toy: Callable[..., Path], main: Main, open_model: Open) -> None:
    folder, other = toy("qwen3_moe", dtype=torch.bfloat16), toy("mixtral", dtype=torch.bfloat16)
    served = open_experts(other, 1 << 20, configure(threads=1))
    said: list[str] = []

    def serve() -> None:
        try:
            WorkerProcess(member("other"), served).serve()
        except ClusterError as error:
            said.append(str(error))

    thread = threading.Thread(target=serve)
    thread.start()
    with pytest.raises(ClusterError, match="0 of 1 workers"):
        open_model(folder, "minimum", cluster="test", cluster_timeout_seconds=2.0)
    thread.join(10)
    served.alone.close()
    assert len(said) == 1 and "its weights" in said[0]


def test_other_bits_are_refused(
    toy: Callable[..., Path], start: Start, open_model: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker whose arithmetic is off by one bit in one number."""
    original = frames.done

    def off(request: int, times: Times, rows: Any) -> Any:
        rows = [row.clone() for row in rows]
        rows[0].view(torch.int16)[0, 0] ^= 1
        return original(request, times, rows)

    monkeypatch.setattr(frames, "done", off)
    folder = toy("qwen3_moe", dtype=torch.bfloat16)
    start(folder, 1)
    with pytest.raises(ClusterError, match="other bits"):
        open_model(folder, "minimum", cluster="test", cluster_timeout_seconds=3.0)


def test_a_stranger_is_not_let_in(toy: Callable[..., Path], start: Start, open_model: Open) -> None:
    folder = toy("qwen3_moe", dtype=torch.bfloat16)
    start(folder, 1)
    main = read_main("test")
    keep_main(Main(main.name, main.address, main.keys))  # all invitations are withdrawn
    with pytest.raises(ClusterError, match="0 of 1 workers"):
        open_model(folder, "minimum", cluster="test", cluster_timeout_seconds=1.5)


def test_one_main_at_a_time(toy: Callable[..., Path], start: Start, open_model: Open) -> None:
    folder = toy("qwen3_moe", dtype=torch.bfloat16)
    start(folder, 1)
    open_model(folder, "minimum", cluster="test")
    with pytest.raises(ClusterError, match="cannot listen"):
        open_model(folder, "minimum", cluster="test")


def test_settings_that_do_not_go_together(toy: Callable[..., Path], open_model: Open) -> None:
    with pytest.raises(ConfigError, match="belongs to `cluster`"):
        open_model(toy("qwen3_moe"), "minimum", placement="finish")
    with pytest.raises(ConfigError, match="`cluster_verify` belongs to `cluster`"):
        open_model(toy("qwen3_moe"), "minimum", cluster_verify=0.5)
    with pytest.raises(ConfigError, match="does not go with `balance`"):
        open_model(toy("qwen3_moe"), "minimum", cluster="test", balance="host", device="emulated")
    with pytest.raises(ClusterError, match="there is no cluster 'none'"):
        open_model(toy("qwen3_moe"), "minimum", cluster="none")
