"""The coordinator's requests to its workers. A request is either for experts of a running pass, or a proof: a test
whose correct result the coordinator knows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

import torch

from smoe.cluster.members import Member
from smoe.compute.unit import ExpertTask
from smoe.memory.streams import Fetched


@dataclass
class Proof:
    """A request that tests a new worker: experts, hidden states, and the result that the coordinator itself has
    computed."""

    wanted: Sequence[ExpertTask]
    hidden: torch.Tensor
    expected: torch.Tensor
    """[n, H] the correct outputs, expert after expert."""


class PendingProof(NamedTuple):
    """A proof that was sent to a worker and is not answered yet: a test request whose correct result the coordinator
    knows. If the worker returns this result, it gets the next proof; otherwise it is refused."""

    member: Member
    expected: torch.Tensor
    others: Iterator[Proof]
    """The proofs that this worker gets after this one."""


@dataclass
class ExpertRequest:
    """A request to one compute unit: experts, and the hidden states of the tokens that chose them."""

    wanted: Sequence[ExpertTask]
    hidden: Fetched
    """[T, H] hidden states"""
    futures: list[Future[torch.Tensor]]
    unit: int
    """The unit that gets the request."""
    trial: PendingProof | None = None
    """The proof that this request carries, or None for a request of a running pass. A proof is never sent to another
    worker."""
    tried: frozenset[int] = frozenset()
    """The compute units that had this request before."""
    expected: float = 0.0
    """The seconds that the request should take if no other requests wait before it."""
    sent: float = 0.0
    """The time at which the request was sent (`time.monotonic`); 0 before."""
    due: float = inf
    """The time (`time.monotonic`) after which the request counts as late."""
    is_lost: bool = False
    """Whether other compute units have this request as well, because `unit` is late or disconnected."""

    @property
    def rows(self) -> int:
        return sum(len(each.tokens) for each in self.wanted)

    @property
    def is_over(self) -> bool:
        """Whether all futures of this request are done, so that no thread waits for its results."""
        return bool(self.futures) and all(future.done() for future in self.futures)

    def part(self, unit: int, places: Sequence[int]) -> ExpertRequest:
        """Return a new request to the compute unit `unit`, for the experts of this request at the indices `places`."""
        wanted, futures = [self.wanted[n] for n in places], [self.futures[n] for n in places]
        return ExpertRequest(wanted, self.hidden, futures, unit, tried=self.tried | {self.unit})


def only_used(hidden: torch.Tensor, wanted: Sequence[ExpertTask]) -> tuple[torch.Tensor, Sequence[ExpertTask]]:
    """Return the hidden states without the rows that no expert uses, and the experts with their rows renumbered
    accordingly."""
    used = sorted({token for each in wanted for token in each.tokens})
    if len(used) == hidden.shape[0]:
        return hidden, wanted
    place = {token: n for n, token in enumerate(used)}
    return hidden[used], [ExpertTask(each.key, [place[token] for token in each.tokens]) for each in wanted]


def take_over(future: Future[torch.Tensor], result: Future[torch.Tensor]) -> None:
    """Give `future` the result or the error of `result`, or cancel it if `result` was cancelled."""
    if result.cancelled():
        future.cancel()
    elif result.exception() is not None:
        with suppress(InvalidStateError):
            future.set_exception(result.exception())
    else:
        resolve(future, result.result())


def resolve(future: Future[torch.Tensor], rows: torch.Tensor) -> None:
    """Set a future's result, unless it is already done."""
    with suppress(InvalidStateError):  # cancelled, or another answer was faster
        future.set_result(rows)
