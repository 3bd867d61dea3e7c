"""Recomputes a sample of the workers' results on the coordinator, because a proof at the start says nothing about
later.

    results          | DONE | DONE | DONE | DONE | ...
    sample                  ^ stored: rows in, rows out      ^ stored
    coordinator          | recompute, compare bits |       ...         one at a time, while it is idle

Nothing waits for a check. The sample depends on a seed that no worker knows, so a faulty one cannot avoid it.
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
"""The most drawn results that wait to be recomputed; further ones are dropped."""

_log = logging.getLogger(__name__)


class _Drawn(NamedTuple):
    """A result that was drawn for a check: the rows [n, H] that were sent to a worker, and the rows that it
    returned."""

    member: Member
    key: ExpertKey
    rows: torch.Tensor
    came: torch.Tensor


class SpotChecks:
    """The spot checks of one link. Only its thread, and the thread that closes it, may use them."""

    def __init__(
        self,
        share: float,
        rescue: ComputeUnit,
        ring: Callable[[], None],
        on_difference: Callable[[Member, ExpertKey, float], None],
        seed: int | None = None,
    ) -> None:
        """`share`: the share of the workers' results that `rescue` recomputes; with 1 all, as far as there is time.
        `ring` requests a call of `go_on` when a recomputed result is there. `on_difference` is called for a result
        whose bits differ, with the largest absolute difference within it. Without a `seed` the draws are random."""
        self._share = share
        self._rescue = rescue
        self._ring = ring
        self._on_difference = on_difference
        self._lot = random.Random(secrets.randbits(64) if seed is None else seed)
        self._waiting = deque[_Drawn]()
        self._under_way: tuple[_Drawn, Future[torch.Tensor]] | None = None

    def note(self, member: Member, request: ExpertRequest, came: Sequence[torch.Tensor]) -> None:
        """Draw results to check from a worker's results. Called before their futures are set."""
        for each, future, rows in zip(request.wanted, request.futures, came, strict=True):
            if self._lot.random() >= self._share or len(self._waiting) >= MOST_WAITING:
                continue
            drawn = _Drawn(member, each.key, request.hidden.wait()[list(each.tokens)], rows.clone())
            if not future.done():  # otherwise another result was faster, and the rows may have changed
                self._waiting.append(drawn)

    def go_on(self, is_needed: bool) -> None:
        """Compare a recomputed result, and start the next one unless `is_needed`: the coordinator's own units have
        other work."""
        if self._under_way is not None and self._under_way[1].done():
            self._settle()
        if self._under_way is None and self._waiting and not is_needed:
            self._begin()

    def finish(self, seconds: float) -> None:
        """Recompute the remaining results within `seconds`."""
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
            self._waiting = deque(drawn for drawn in self._waiting if drawn.member is not member)
            self._on_difference(member, key, (came.float() - mine.float()).abs().max().item())
