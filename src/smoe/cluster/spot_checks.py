"""A sample of what workers return, computed once more by main: a proof when a worker comes says nothing of later.

    answers    | DONE | DONE | DONE | DONE | ...
    drawn             ^ stored: rows in, rows out      ^ stored
    main's rescue      | recompute, compare bits |       ...         one at a time, while it is idle

Nothing waits for it. What is drawn depends on a seed that no worker knows: one that did would lie elsewhere.
"""

from __future__ import annotations

import logging
import random
import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, wait
from typing import NamedTuple

import torch

from smoe.cluster.members import Member
from smoe.cluster.requests import ExpertRequest
from smoe.compute.unit import ComputeUnit, ExpertTask
from smoe.expert import ExpertKey
from smoe.kernels.proof import same_bits
from smoe.memory.streams import Fetched

MOST_WAITING = 8
"""Drawn and not yet recomputed; what is drawn beyond them is let go."""

_log = logging.getLogger(__name__)


class _Drawn(NamedTuple):
    """An expert's rows that went to a worker [n, H], and those that came back."""

    member: Member
    key: ExpertKey
    rows: torch.Tensor
    came: torch.Tensor


class SpotChecks:
    """Used by the link's thread, and by the thread that closes the link."""

    def __init__(
        self,
        share: float,
        rescue: ComputeUnit,
        ring: Callable[[], None],
        on_difference: Callable[[Member, ExpertKey, float], None],
        seed: int | None = None,
    ) -> None:
        """`share` of the experts that workers compute is recomputed, of 1: all, as far as there is time. `ring`: call
        `go_on` soon; `on_difference` hears by how much a number differs. `seed`: None: a random one."""
        self._share = share
        self._rescue = rescue
        self._ring = ring
        self._on_difference = on_difference
        self._lot = random.Random(secrets.randbits(64) if seed is None else seed)
        self._waiting = deque[_Drawn]()
        self._under_way: tuple[_Drawn, Future[torch.Tensor]] | None = None

    def note(self, member: Member, request: ExpertRequest, came: Sequence[torch.Tensor]) -> None:
        """A worker has answered; its future is not set yet."""
        for each, future, rows in zip(request.wanted, request.futures, came, strict=True):
            if self._lot.random() >= self._share or len(self._waiting) >= MOST_WAITING:
                continue
            drawn = _Drawn(member, each.key, request.hidden.wait()[list(each.tokens)], rows.clone())
            if not future.done():  # else another answer was faster, and the rows may have changed
                self._waiting.append(drawn)

    def go_on(self, is_needed: bool) -> None:
        """Look at what has been recomputed, and begin the next, unless the rescue is needed for something else."""
        if self._under_way is not None and self._under_way[1].done():
            self._settle()
        if self._under_way is None and self._waiting and not is_needed:
            self._begin()

    def finish(self, seconds: float) -> None:
        """Recompute what is left, as far as the time goes."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if self._under_way is None:
                if not self._waiting:
                    return
                self._begin()
            elif wait([self._under_way[1]], left).done:
                self._settle()

    def _begin(self) -> None:
        drawn = self._waiting.popleft()
        (future,) = self._rescue.submit([ExpertTask(drawn.key, range(len(drawn.rows)))], Fetched(drawn.rows))
        self._under_way = drawn, future
        future.add_done_callback(lambda _: self._ring())

    def _settle(self) -> None:
        assert self._under_way is not None
        (member, key, _, came), future = self._under_way
        self._under_way = None
        try:
            mine = future.result()
        except (Exception, CancelledError) as error:
            _log.warning("an expert could not be recomputed: %s", error)
            return
        member.checked += 1
        if not same_bits(came, mine):
            self._waiting = deque(drawn for drawn in self._waiting if drawn.member is not member)  # enough is known
            self._on_difference(member, key, (came.float() - mine.float()).abs().max().item())
