"""What main asks of its workers: experts for some rows, or a proof."""

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
    """A request whose answer is known."""

    wanted: Sequence[ExpertTask]
    hidden: torch.Tensor
    expected: torch.Tensor
    """[n, H]"""


class PendingProof(NamedTuple):
    """A proof under way."""

    member: Member
    expected: torch.Tensor
    others: Iterator[Proof]
    """Still to come."""


@dataclass
class ExpertRequest:
    """Experts asked for, of one unit."""

    wanted: Sequence[ExpertTask]
    hidden: Fetched
    """[T, H]"""
    futures: list[Future[torch.Tensor]]
    unit: int
    """Who is asked."""
    trial: PendingProof | None = None
    """The worker that must compute it; no other one is asked."""
    tried: frozenset[int] = frozenset()
    """Who was asked for these before."""
    expected: float = 0.0
    """Seconds that it should take, with nothing before it."""
    sent: float = 0.0
    """When (`time.monotonic`); 0: not yet."""
    due: float = inf
    """When it is late."""
    is_lost: bool = False
    """Whether others have been asked as well."""

    @property
    def rows(self) -> int:
        return sum(len(each.tokens) for each in self.wanted)

    @property
    def is_over(self) -> bool:
        """Whether no thread waits for it, or for what is left of it."""
        return bool(self.futures) and all(future.done() for future in self.futures)

    def part(self, unit: int, places: Sequence[int]) -> ExpertRequest:
        """Some of its experts, of another unit."""
        wanted, futures = [self.wanted[n] for n in places], [self.futures[n] for n in places]
        return ExpertRequest(wanted, self.hidden, futures, unit, tried=self.tried | {self.unit})


def only_used(hidden: torch.Tensor, wanted: Sequence[ExpertTask]) -> tuple[torch.Tensor, Sequence[ExpertTask]]:
    """The rows that are used, each once, and where they are then."""
    used = sorted({token for each in wanted for token in each.tokens})
    if len(used) == hidden.shape[0]:
        return hidden, wanted
    place = {token: n for n, token in enumerate(used)}
    return hidden[used], [ExpertTask(each.key, [place[token] for token in each.tokens]) for each in wanted]


def take_over(future: Future[torch.Tensor], result: Future[torch.Tensor]) -> None:
    """A future ends as another has."""
    if result.cancelled():
        future.cancel()
    elif result.exception() is not None:
        with suppress(InvalidStateError):
            future.set_exception(result.exception())
    else:
        resolve(future, result.result())


def resolve(future: Future[torch.Tensor], rows: torch.Tensor) -> None:
    """The rows are there, unless no thread waits for them."""
    with suppress(InvalidStateError):  # cancelled, or another answer was faster
        future.set_result(rows)
