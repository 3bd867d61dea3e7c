"""What the coordinator recomputes of its workers' answers. Would catch a check that waits for ever for nothing to do,
one that delays a rescue, rows compared with others than those that were sent, a lot that a worker could foresee.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import torch

from smoe.cluster.members import Member
from smoe.cluster.requests import ExpertRequest
from smoe.cluster.spot_checks import MOST_WAITING, SpotChecks
from smoe.compute.unit import ExpertTask
from smoe.expert import EXACT, ExpertKey
from smoe.memory.streams import Fetched

WORKER = Member(2, "shelf", "key", b"", 4)


class Rescue:
    """Gives twice the rows, when it is told to."""

    def __init__(self) -> None:
        self.asked: list[tuple[ExpertKey, torch.Tensor, Future[torch.Tensor]]] = []

    def submit(self, wanted: Any, hidden: Fetched) -> list[Future[torch.Tensor]]:
        ((key, tokens),) = wanted
        self.asked.append((key, hidden.wait()[list(tokens)], Future()))
        return [self.asked[-1][2]]

    def compute(self) -> None:
        _, rows, future = self.asked[-1]
        future.set_result(2 * rows)


class Bench:
    def __init__(self, share: float = 1.0, seed: int | None = 0) -> None:
        self.rescue, self.rings, self.found = Rescue(), 0, list[ExpertKey]()
        rescue: Any = self.rescue
        self.checks = SpotChecks(share, rescue, self.ring, lambda _, key, far: self.found.append(key), seed)

    def ring(self) -> None:
        self.rings += 1

    def answer(self, expert: int, error: float = 0.0) -> ExpertRequest:
        hidden = torch.randn(3, 4)
        request = ExpertRequest([ExpertTask((0, expert, EXACT), [2, 0])], Fetched(hidden), [Future()], 2)
        self.checks.note(WORKER, request, [2 * hidden[[2, 0]] + error])
        return request


def test_equal_bits_are_no_news_and_others_are() -> None:
    bench = Bench()
    bench.answer(1)
    bench.answer(5, error=1e-3)
    for expert in (1, 5):
        bench.checks.go_on(False)
        assert bench.rescue.asked[-1][0] == (0, expert, EXACT)
        bench.rescue.compute()
        bench.checks.go_on(False)
    assert bench.found == [(0, 5, EXACT)] and bench.rings == 2


def test_one_difference_is_enough() -> None:
    """The user is told once."""
    bench = Bench()
    for expert in range(4):
        bench.answer(expert, error=1.0)
    for _ in range(4):
        bench.checks.go_on(False)
        if not bench.rescue.asked[-1][2].done():
            bench.rescue.compute()
    assert bench.found == [(0, 0, EXACT)]


def test_one_at_a_time_and_none_while_the_rescue_is_needed() -> None:
    bench = Bench()
    for expert in range(3):
        bench.answer(expert)
    bench.checks.go_on(True)
    assert not bench.rescue.asked
    bench.checks.go_on(False)
    bench.checks.go_on(False)
    assert len(bench.rescue.asked) == 1
    bench.rescue.compute()
    bench.checks.go_on(True)
    assert len(bench.rescue.asked) == 1


def test_no_more_wait_than_a_few() -> None:
    bench = Bench()
    for expert in range(3 * MOST_WAITING):
        bench.answer(expert)
    assert len(bench.checks._waiting) == MOST_WAITING


def test_rows_that_may_have_changed_are_not_held_against_anybody() -> None:
    """Another worker was faster, and the coordinator has gone on: its hidden states are another layer's."""
    bench = Bench()
    hidden, future = torch.randn(3, 4), Future[torch.Tensor]()
    future.set_result(torch.zeros(1))
    bench.checks.note(
        WORKER, ExpertRequest([ExpertTask((0, 1, EXACT), [0])], Fetched(hidden), [future], 2), [hidden[:1]]
    )
    assert not bench.checks._waiting


def drawn(seed: int | None) -> list[bool]:
    bench, found = Bench(0.25, seed), []
    for expert in range(200):
        bench.answer(expert)
        found.append(bool(bench.checks._waiting))
        bench.checks._waiting.clear()
    return found


def test_the_lot_is_repeatable_with_a_seed_and_nobody_s_without() -> None:
    assert drawn(7) == drawn(7)
    assert 20 < sum(drawn(7)) < 90, "a quarter, within five standard deviations"
    assert drawn(None) != drawn(None), "wrong once in 10^19 times"
    assert not any(Bench(0.0).checks._waiting for _ in range(9))


def test_what_is_left_is_checked_at_the_end_as_far_as_there_is_time() -> None:
    bench = Bench()
    bench.answer(1, error=1.0)
    submit = bench.rescue.submit

    def at_once(wanted: Any, hidden: Fetched) -> list[Future[torch.Tensor]]:
        futures = submit(wanted, hidden)
        bench.rescue.compute()
        return futures

    bench.rescue.submit = at_once  # type: ignore[method-assign]
    bench.checks.finish(10.0)
    assert bench.found == [(0, 1, EXACT)]
    bench.answer(2)
    bench.rescue.submit = submit  # type: ignore[method-assign]
    bench.checks.finish(0.05)
    assert bench.found == [(0, 1, EXACT)], "nothing came of it, and it ends"
