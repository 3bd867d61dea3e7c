"""A model served by a cluster gives the bits of the unmodified library, whoever computes and whatever happens.

Would catch: rows that go to the wrong expert or come back in another order, a sum whose order depends on who answered
first, a prompt whose experts are both loaded here and computed there, a worker with another model that is believed.
"""

from __future__ import annotations

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
from smoe.cluster.frames import Times
from smoe.cluster.remote import _PROOF_ROWS
from smoe.cluster.stored_identity import Coordinator, store_coordinator
from smoe.cluster.worker import WorkerProcess
from smoe.errors import ClusterError, ConfigError, WorkerRefusedError
from smoe.kernels.isa import widest
from smoe.load.worker_experts import open_experts
from smoe.policy.placement import PLACEMENT
from smoe.presets import PRESETS, configure
from tests import oracle, zoo
from tests.cluster.conftest import BY_TURNS, GiveUpWhen, cluster_of, has_ipv6, member
from tests.packs import pack_folder

Open = Callable[..., PreTrainedModel]
Start = Callable[..., list[Any]]


def everything_there(model: PreTrainedModel) -> None:
    """From now on nothing is loaded here: workers are nearer than any disk."""
    cluster = cluster_of(model)
    cluster._here = cluster._here._replace(load=lambda: 1e9)


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
    assert any(member.experts for member in cluster_of(model).members)
    if switches:
        assert stats.loads == 0, "main keeps no experts"
        assert all(member.experts for member in cluster_of(model).members), "all have worked"


@pytest.mark.parametrize("placement", PLACEMENT)
def test_what_a_draft_expects_is_brought_in_before_it_is_asked_for(
    placement: str, tmp_path: Path, start: Start, open_model: Open
) -> None:
    folder = zoo.save("qwen3_moe", tmp_path / "model", dtype=torch.bfloat16)
    pack_folder(folder, precision="int4")
    workers = start(folder, 3)
    fetched: list[Any] = []
    for worker in workers:
        bring = worker._served.alone.experts.bring
        worker._served.alone.experts.bring = lambda key, bring=bring: (fetched.append(key), bring(key))
    switches = {"prefetch": "draft-model", "draft_extra": 1, "prefetch_trial": False, "eviction": "lru"}
    model = open_model(folder, "minimum", cluster="test", cluster_workers=3, placement=placement, **switches)
    everything_there(model)
    oracle.assert_same_steps(oracle.greedy(model), oracle.reference_steps(folder))
    stats = model.offload.stats()
    assert len(fetched) > 10 and {key[0] for key in fetched} >= {1, 2, 3}, "of all layers that others come before"
    assert stats.host_computed > stats.decode_uses // 2


@pytest.mark.parametrize(("preset", "precision"), [("cluster", "int4"), ("od-moe", "int8")])
def test_presets_are_exact(preset: str, precision: str, tmp_path: Path, start: Start, open_model: Open) -> None:
    folder = zoo.save("mixtral", tmp_path / "model", dtype=torch.bfloat16)
    pack_folder(folder, precision=precision)
    start(folder, 3)
    model = open_model(folder, "minimum", cluster="test", cluster_workers=3, **PRESETS[preset])
    everything_there(model)
    oracle.assert_same_steps(oracle.greedy(model), oracle.reference_steps(folder))
    assert model.offload.stats().host_computed > 0


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


@pytest.mark.parametrize("host", ["localhost", "[::1]"])
def test_workers_come_by_a_name_and_by_ipv6(
    host: str, toy: Callable[..., Path], coordinator: Coordinator, start: Start, open_model: Open
) -> None:
    if host == "[::1]" and not has_ipv6():
        pytest.skip("no IPv6 here")
    store_coordinator(replace(coordinator, address=checked_address(f"{host}:{coordinator.address.rpartition(':')[2]}")))
    folder = toy("qwen3_moe", dtype=torch.bfloat16)
    start(folder, 1)
    model = open_model(folder, "minimum", cluster="test", **BY_TURNS)
    oracle.assert_same_steps(oracle.greedy(model, new_tokens=2), oracle.greedy(oracle.reference(folder), new_tokens=2))
    assert all(member.experts for member in cluster_of(model).members)


def test_a_worker_makes_room_for_a_main_of_longer_prompts(
    toy: Callable[..., Path], start: Start, open_model: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would be cut off from the coordinator by the first of them."""
    folder = toy("qwen3_moe", dtype=torch.bfloat16)
    monkeypatch.setattr("smoe.cluster.worker.PLANNED_ROWS", 8)
    monkeypatch.setattr("smoe.cluster.members._LEAST_DEADLINE", 5.0)  # however busy this machine is
    monkeypatch.setattr("smoe.cluster.frames._MOST_TALK", 700)
    (worker,) = start(folder, 1)
    assert worker._rows.part_bytes < 24 * worker._rows.numbers * 2
    model = open_model(folder, "minimum", cluster="test", **BY_TURNS)
    oracle.assert_same_steps(oracle.greedy(model), oracle.reference_steps(folder))
    assert worker._rows == cluster_of(model)._rows and worker._rows.most == 2 * max(_PROOF_ROWS)
    link = cluster_of(model).link
    assert link is not None and link.under_way.rescued == 0


def test_what_is_longer_than_planned_is_computed_here(toy: Callable[..., Path], start: Start, open_model: Open) -> None:
    folder = toy("qwen3_moe", dtype=torch.bfloat16)
    start(folder, 1)
    model = open_model(folder, "minimum", cluster="test", **BY_TURNS)
    link = cluster_of(model).link
    assert link is not None
    link.under_way.most_rows = 2
    oracle.assert_same_steps(oracle.greedy(model), oracle.reference_steps(folder))
    assert link.under_way.rescued > 0 and not any(member.why for member in cluster_of(model).members)


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


def test_another_model_is_refused_by_name(
    toy: Callable[..., Path], coordinator: Coordinator, open_model: Open, give_up_when: GiveUpWhen
) -> None:
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
    give_up_when(lambda _: said)
    with pytest.raises(ClusterError, match="0 of 1 workers"):
        open_model(folder, "minimum", cluster="test")
    thread.join(10)
    served.alone.close()
    assert len(said) == 1 and "its weights" in said[0]


def test_other_bits_are_refused(
    toy: Callable[..., Path],
    start: Start,
    open_model: Open,
    give_up_when: GiveUpWhen,
    monkeypatch: pytest.MonkeyPatch,
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
    give_up_when(lambda cluster: cluster.refused)
    with pytest.raises(ClusterError, match="its results differ from the coordinator"):
        open_model(folder, "minimum", cluster="test")


def test_a_worker_whose_key_is_not_known_is_told(
    toy: Callable[..., Path], coordinator: Coordinator, open_model: Open, give_up_when: GiveUpWhen
) -> None:
    """By the connection that is closed, as nobody speaks with it."""
    folder = toy("qwen3_moe", dtype=torch.bfloat16)
    served = open_experts(folder, 1 << 20, configure(threads=1))
    said: list[str] = []
    worker = WorkerProcess(member("w"), served)
    store_coordinator(
        Coordinator(coordinator.name, coordinator.address, coordinator.keys)
    )  # its invitation is withdrawn

    def serve() -> None:
        try:
            worker.serve()
        except WorkerRefusedError as error:
            said.append(str(error))

    thread = threading.Thread(target=serve)
    thread.start()
    give_up_when(lambda _: said)
    with pytest.raises(ClusterError, match="0 of 1 workers"):
        open_model(folder, "minimum", cluster="test")
    thread.join(10)
    worker.end()
    served.alone.close()
    assert len(said) == 1 and "the coordinator does not know worker w" in said[0]


def test_one_main_at_a_time(toy: Callable[..., Path], start: Start, open_model: Open) -> None:
    folder = toy("qwen3_moe", dtype=torch.bfloat16)
    start(folder, 1)
    open_model(folder, "minimum", cluster="test")
    with pytest.raises(ClusterError, match="cannot listen"):
        open_model(folder, "minimum", cluster="test")


def test_who_came_and_was_refused_is_named(
    toy: Callable[..., Path], start: Start, open_model: Open, give_up_when: GiveUpWhen
) -> None:
    start(toy("mixtral", dtype=torch.bfloat16), 1)
    give_up_when(lambda cluster: cluster.refused)
    with pytest.raises(ClusterError, match=r"0 of 1 workers.*w0: its weights is"):
        open_model(toy("qwen3_moe", dtype=torch.bfloat16), "minimum", cluster="test")


def test_a_main_that_keeps_no_experts_reads_none_beforehand(
    toy: Callable[..., Path], start: Start, open_model: Open
) -> None:
    """Not even where it has room for all of them."""
    folder = toy("qwen3_moe", dtype=torch.bfloat16)
    start(folder, 1)
    model = open_model(folder, 64 << 20, cluster="test", preload=None, **BY_TURNS)
    assert model.offload.ledger.resident_share == 1
    oracle.assert_same_steps(oracle.greedy(model), oracle.reference_steps(folder))
    assert model.offload.stats().loads == model.offload.stats().decode_hits == 0
    assert "no experts resident while workers are connected" in repr(model.offload)


def test_settings_that_do_not_go_together(toy: Callable[..., Path], open_model: Open) -> None:
    with pytest.raises(ConfigError, match="needs a cluster"):
        open_model(toy("qwen3_moe"), "minimum", placement="finish")
    with pytest.raises(ConfigError, match="`cluster_verify` has an effect only with `cluster`"):
        open_model(toy("qwen3_moe"), "minimum", cluster_verify=0.5)
    with pytest.raises(ConfigError, match="cannot be combined with `balance="):
        open_model(toy("qwen3_moe"), "minimum", cluster="test", balance="host", device="emulated")
    with pytest.raises(ClusterError, match="there is no cluster 'none'"):
        open_model(toy("qwen3_moe"), "minimum", cluster="none")
