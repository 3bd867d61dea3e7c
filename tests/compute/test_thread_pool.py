"""Several threads on one layer: same rows, nobody left at work after an error or an interrupt."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from smoe.compute.thread_pool import ThreadPool
from smoe.load import choose_kernel
from tests import oracle

PATIENCE_SECONDS = 10


@pytest.fixture
def thread_pool() -> Iterator[ThreadPool]:
    before = torch.get_num_threads()
    each = ThreadPool(3)
    yield each
    each.close()
    torch.set_num_threads(before)


def test_every_member_works_once(thread_pool: ThreadPool) -> None:
    for _ in range(50):
        seen: list[tuple[int, int]] = []
        thread_pool.run(lambda member, of, seen=seen: seen.append((member, of)))  # type: ignore[misc]
        assert sorted(seen) == [(0, 3), (1, 3), (2, 3)]


@pytest.mark.parametrize("member", [0, 1, 2])
def test_the_first_error_is_raised_and_the_team_goes_on(member: int, thread_pool: ThreadPool) -> None:
    def job(me: int, _: int) -> None:
        if me == member:
            raise ValueError(f"member {me}")

    with pytest.raises(ValueError, match=f"member {member}"):
        thread_pool.run(job)
    test_every_member_works_once(thread_pool)


@pytest.mark.parametrize("where", ["own share", "waiting"])
def test_an_interrupt_leaves_nobody_at_work(
    where: str, thread_pool: ThreadPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Would catch: the next request reading rows that a helper of the interrupted one is still writing."""
    go_on, ended = threading.Event(), []

    def job(me: int, _: int) -> None:
        if me == 0 and where == "own share":
            threading.Timer(0.05, go_on.set).start()
            raise KeyboardInterrupt
        if me > 0:
            assert go_on.wait(PATIENCE_SECONDS)
            ended.append(me)

    def interrupted() -> None:
        threading.Timer(0.05, go_on.set).start()
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        if where == "waiting":
            patched.setattr(thread_pool._helpers[0], "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            thread_pool.run(job)
    started = sorted(ended)
    test_every_member_works_once(thread_pool)
    assert sorted(ended) == started, "a helper of the interrupted run was still at work"


def test_closing_ends_the_threads() -> None:
    thread_pool = ThreadPool(2)
    threads = [helper._thread for helper in thread_pool._helpers]
    thread_pool.close()
    assert not any(thread.is_alive() for thread in threads)


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_a_team_changes_no_bit(
    family: str, toy: Callable[..., Path], open_model: Callable[..., PreTrainedModel], monkeypatch: Any
) -> None:
    """Put in by hand: toys are too small for one to be chosen."""
    folder = toy(family)
    model = open_model(folder, "full")
    thread_pool = ThreadPool(2)
    compute = model.offload.executor.compute
    compute.experts = compute.experts.by(thread_pool)
    runs: list[int] = []
    original = thread_pool.run
    monkeypatch.setattr(thread_pool, "run", lambda job: (runs.append(1), original(job))[1])
    steps = oracle.greedy(model)
    assert runs, "the thread_pool was never asked"
    oracle.assert_same_steps(steps, oracle.reference_steps(folder))


def test_the_chosen_way_is_exact(
    toy: Callable[..., Path], open_model: Callable[..., PreTrainedModel], monkeypatch: Any
) -> None:
    """Whatever wins the measurement on this machine, the logits are the library's."""
    monkeypatch.setattr(choose_kernel, "MIN_EXPERT_BYTES", 0)
    folder = toy("qwen3_moe")
    oracle.assert_same_steps(oracle.greedy(open_model(folder, "full")), oracle.reference_steps(folder))
