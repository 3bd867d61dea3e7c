"""The coordinator's requests to its workers: experts for some rows, or a proof."""

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
    """A request whose correct result the coordinator knows."""

    wanted: Sequence[ExpertTask]
    hidden: torch.Tensor
    expected: torch.Tensor
    """[n, H] the correct result"""


class PendingProof(NamedTuple):
    """A proof in flight."""

    member: Member
    expected: torch.Tensor
    others: Iterator[Proof]
    """The proofs that are sent after this one."""


@dataclass
class ExpertRequest:
    """A request to one unit for experts."""

    wanted: Sequence[ExpertTask]
    hidden: Fetched
    """[T, H] hidden states"""
    futures: list[Future[torch.Tensor]]
    unit: int
    """The unit that gets the request."""
    trial: PendingProof | None = None
    """The proof, if this request is one, else None. A proof is never sent to another worker."""
    tried: frozenset[int] = frozenset()
    """The units that got the request before this one."""
    expected: float = 0.0
    """The seconds that it should take, without other requests before it."""
    sent: float = 0.0
    """The time when it was sent (`time.monotonic`); 0: not yet."""
    due: float = inf
    """The time from which it is late."""
    is_lost: bool = False
    """Whether other units have got the request as well, because its unit is late or gone."""

    @property
    def rows(self) -> int:
        return sum(len(each.tokens) for each in self.wanted)

    @property
    def is_over(self) -> bool:
        """Whether no thread waits for its results any more."""
        return bool(self.futures) and all(future.done() for future in self.futures)

    def part(self, unit: int, places: Sequence[int]) -> ExpertRequest:
        """Return a request to another unit for some of the experts of this one."""
        wanted, futures = [self.wanted[n] for n in places], [self.futures[n] for n in places]
        return ExpertRequest(wanted, self.hidden, futures, unit, tried=self.tried | {self.unit})


def only_used(hidden: torch.Tensor, wanted: Sequence[ExpertTask]) -> tuple[torch.Tensor, Sequence[ExpertTask]]:
    """Return the hidden states with unused rows removed, and the experts with the new row numbers."""
    used = sorted({token for each in wanted for token in each.tokens})
    if len(used) == hidden.shape[0]:
        return hidden, wanted
    place = {token: n for n, token in enumerate(used)}
    return hidden[used], [ExpertTask(each.key, [place[token] for token in each.tokens]) for each in wanted]


def take_over(future: Future[torch.Tensor], result: Future[torch.Tensor]) -> None:
    """Give a future the result or the error of another one."""
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
