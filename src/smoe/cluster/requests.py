"""What main asks of its workers: experts for some rows, or a proof."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from smoe.cluster.members import Member
from smoe.compute.unit import Wanted
from smoe.memory.streams import Fetched


@dataclass
class Proof:
    """A request whose answer is known."""

    wanted: Sequence[Wanted]
    hidden: torch.Tensor
    expected: torch.Tensor
    """[n, H]"""


class Trial(NamedTuple):
    """A proof under way."""

    member: Member
    expected: torch.Tensor
    others: Iterator[Proof]
    """Still to come."""


@dataclass
class Request:
    """Experts asked for, and who has been asked."""

    number: int
    wanted: Sequence[Wanted]
    hidden: Fetched
    """[T, H]"""
    futures: list[Future[torch.Tensor]]
    first: int
    """The unit that the plan names."""
    trial: Trial | None = None
    """Whose proof it is: nobody else is asked."""
    asked: dict[int, tuple[float, float]] = field(default_factory=dict)
    """By unit: when it was sent, when the answer is due."""

    @property
    def rows(self) -> int:
        return sum(len(each.tokens) for each in self.wanted)


def only_used(hidden: torch.Tensor, wanted: Sequence[Wanted]) -> tuple[torch.Tensor, Sequence[Wanted]]:
    """The rows that are used, each once, and where they are then."""
    used = sorted({token for each in wanted for token in each.tokens})
    if len(used) == hidden.shape[0]:
        return hidden, wanted
    place = {token: n for n, token in enumerate(used)}
    return hidden[used], [Wanted(each.key, [place[token] for token in each.tokens]) for each in wanted]


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
    """The rows are there, unless nobody waits for them."""
    with suppress(InvalidStateError):  # cancelled, or somebody was faster
        future.set_result(rows)
