"""Who is asked in the place of a worker that does not answer. Would catch one worker left with all that another was
asked for, who is late being asked again, an expert that nobody computes, an answer that counts twice.
"""

from __future__ import annotations

from concurrent.futures import Future
from math import inf
from typing import Any

import pytest
import torch

from smoe.cluster import frames
from smoe.cluster.frames import Times
from smoe.cluster.members import Member, WorkerState
from smoe.cluster.requests import ExpertRequest, resolve
from smoe.cluster.requests_in_flight import UnderWay
from smoe.compute.unit import ExpertTask
from smoe.expert import EXACT, ExpertKey
from smoe.memory.streams import Fetched


def key(expert: int) -> ExpertKey:
    return (0, expert, EXACT)


class Bench:
    """Workers 2, 3, ... of equal speed: a load takes 10 ms, an expert 1 ms, there and back 2 ms."""

    def __init__(self, workers: int, here_load: float = inf) -> None:
        self.members = {
            unit: Member(unit, f"w{unit}", "key", b"", 8, WorkerState.READY) for unit in range(2, 2 + workers)
        }
        for each in self.members.values():
            each.note([ExpertTask(key(99), [0])], 0.013, Times(0.011, 0.001, 0.010, 1))
        self.sent: list[tuple[int, int, list[int]]] = []
        """(unit, request, experts)"""
        self.mine: dict[int, Future[torch.Tensor]] = {}
        """What main's own hands were asked for."""
        self.under_way = UnderWay(self.members, self._send, self, 100, lambda: here_load)  # type: ignore[arg-type]

    @property
    def owes_nothing(self) -> bool:
        """No worker has a request, and the coordinator none in a worker's place."""
        workers = (self.under_way.owes(each) for each in self.members.values())
        return not any(workers) and not self.under_way.needs_rescue

    def submit(self, wanted: Any, hidden: Fetched) -> list[Future[torch.Tensor]]:
        del hidden
        self.mine |= {each.key[1]: Future() for each in wanted}
        return [self.mine[each.key[1]] for each in wanted]

    def ask(self, unit: int, experts: list[int]) -> ExpertRequest:
        wanted = [ExpertTask(key(expert), [0]) for expert in experts]
        request = ExpertRequest(wanted, Fetched(torch.ones(1, 4)), [Future() for _ in wanted], unit)
        self.under_way.begin(request)
        return request

    def lose(self, unit: int, state: WorkerState = WorkerState.SUSPECT) -> None:
        self.members[unit].state = state
        self.under_way.lost(self.members[unit])

    def answer(self, unit: int) -> None:
        """Everything that a unit was asked for; row n of expert n."""
        for whose, number, experts in self.sent:
            request = self.under_way.find(number, self.members[whose]) if whose == unit else None
            if request is not None:
                self.under_way.end(number)
                for future, expert in zip(request.futures, experts, strict=True):
                    resolve(future, torch.full((1, 4), float(expert)))

    def asked(self, unit: int) -> list[int]:
        return [expert for whose, _, experts in self.sent if whose == unit for expert in experts]

    def _send(self, member: Member, parts: list[Any]) -> None:
        if member.state is WorkerState.OUT:
            self.under_way.lost(member)
            return
        frame = frames.parse([memoryview(bytes(part)) for part in parts])
        asked = frames.parse_work(frame, {0: 100}, 4)
        self.sent.append((member.unit, frame.request, [each.key[1] for each in asked.wanted]))


def test_experts_of_a_lost_request_are_shared_over_the_others() -> None:
    bench = Bench(4)
    request = bench.ask(2, [0, 1, 2, 3, 4, 5])
    bench.lose(2)
    assert [len(bench.asked(unit)) for unit in (3, 4, 5)] == [2, 2, 2], "who takes them all brings six in"
    assert sorted(bench.asked(3) + bench.asked(4) + bench.asked(5)) == [0, 1, 2, 3, 4, 5] and not bench.mine
    for unit in (3, 4, 5):
        bench.answer(unit)
    assert [future.result(0)[0, 0].item() for future in request.futures] == [0, 1, 2, 3, 4, 5]
    assert bench.under_way.overdue(0.0) == set() and bench.owes_nothing, "nothing is left of it"


def test_each_goes_to_who_is_done_with_it_first() -> None:
    bench = Bench(4)
    bench.members[4].will_hold([key(1)])
    bench.ask(3, [7, 8, 9])
    bench.ask(2, [0, 1])
    bench.lose(2)
    assert bench.asked(4) == [1], "it holds that"
    assert bench.asked(5) == [0], "the others have more to do"


def test_main_s_own_hands_are_among_the_others_where_it_has_a_load_left() -> None:
    bench = Bench(3, here_load=0.010)
    request = bench.ask(2, [0, 1, 2, 3, 4, 5])
    bench.lose(2)
    assert len(bench.mine) == bench.under_way.rescued == 2 and bench.under_way.needs_rescue
    assert len(bench.asked(3)) == len(bench.asked(4)) == 2
    for expert, future in bench.mine.items():
        future.set_result(torch.full((1, 4), float(expert)))
        assert request.futures[expert].result(0)[0, 0].item() == expert


def test_nobody_is_asked_twice_and_main_is_the_last() -> None:
    bench = Bench(3)
    request = bench.ask(2, [0, 1])
    for unit in (2, 3, 4, 3):
        bench.lose(unit)
        bench.members[unit].state = WorkerState.READY  # heard of again, and late again
    assert bench.asked(2) == [0, 1], "and never again"
    assert all(len(bench.asked(unit)) == len(set(bench.asked(unit))) for unit in (3, 4))
    assert set(bench.mine) == {0, 1}
    for expert, future in bench.mine.items():
        future.set_result(torch.full((1, 4), float(expert)))
    assert [future.result(0)[0, 0].item() for future in request.futures] == [0, 1]


def test_who_is_late_is_not_asked_and_who_is_gone_neither() -> None:
    bench = Bench(4)
    bench.members[2].state, bench.members[3].state = WorkerState.SUSPECT, WorkerState.OUT
    bench.ask(2, [0, 1])
    assert not bench.asked(2) and not bench.asked(3)
    assert sorted(bench.asked(4) + bench.asked(5)) == [0, 1]


def test_a_late_answer_counts_for_what_is_not_there_yet() -> None:
    bench = Bench(3)
    request = bench.ask(2, [0, 1])
    bench.lose(2)
    bench.answer(3)
    assert sum(future.done() for future in request.futures) == 1
    bench.answer(2)
    assert [future.result(0)[0, 0].item() for future in request.futures] == [0, 1]
    bench.answer(4)
    assert bench.under_way.overdue(0.0) == set() and bench.owes_nothing


def test_late_is_who_has_not_answered_when_it_is_due_and_once() -> None:
    bench = Bench(3)
    request = bench.ask(2, [0])
    assert bench.under_way.next_due() == request.due > request.sent + 0.02
    assert bench.under_way.overdue(request.due - 1e-3) == set()
    assert bench.under_way.overdue(request.due + 1e-3) == {2}
    bench.lose(2)
    assert 2 not in bench.under_way.overdue(inf), "that is known"
    assert bench.under_way.next_due() > request.due, "others have time of their own"


def test_who_fails_again_and_again_costs_the_others_once() -> None:
    bench = Bench(2)
    request = bench.ask(2, [0, 1])
    for _ in range(3):
        bench.under_way.stand_in(request)
    assert bench.asked(3) == [0, 1]


def test_a_request_behind_another_has_time_for_both() -> None:
    bench = Bench(1)
    first, second = bench.ask(2, [0, 1, 2]), bench.ask(2, [3])
    assert first.due - first.sent == pytest.approx(3 * 0.035)
    assert second.due - second.sent == pytest.approx(3 * (0.035 + 0.013))
    for expert in range(4, 40):
        bench.answer(2)
        first, second = second, bench.ask(2, [expert])
    assert second.due - second.sent < 0.1, "what is done is not before it"


def test_what_nobody_waits_for_is_not_asked_of_others() -> None:
    bench = Bench(2)
    request = bench.ask(2, [0, 1])
    request.futures[0].cancel()
    bench.lose(2)
    assert bench.asked(3) == [1]
    request.futures[1].cancel()
    bench.lose(3)
    assert not bench.mine


def test_a_member_that_cannot_be_reached_is_stood_in_for_at_once() -> None:
    bench = Bench(3)
    send = bench._send

    def broken(member: Member, parts: list[Any]) -> None:
        if member.unit == 2:
            member.state = WorkerState.OUT
        send(member, parts)

    bench.under_way._send = broken
    bench.ask(2, [0, 1])
    assert sorted(bench.asked(3) + bench.asked(4)) == [0, 1]


def test_whoever_waits_is_told_what_fails() -> None:
    bench = Bench(0)

    def full(wanted: Any, hidden: Any) -> Any:
        raise MemoryError("no slot")

    bench.submit = full  # type: ignore[method-assign]
    request = bench.ask(2, [0])
    with pytest.raises(MemoryError, match="no slot"):
        request.futures[0].result(0)
