"""Recomputes a sample of the workers' results on the coordinator, because a proof (a test at the start) says nothing
about later results.

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
    """One expert's result that was chosen at random to be recomputed: the rows [n, H] that were sent to a worker, and
    the rows that the worker returned."""

    member: Member
    key: ExpertKey
    rows: torch.Tensor
    came: torch.Tensor


class SpotChecks:
    """Recomputes a random sample of the results of one link's workers. Only the link's thread, and the thread that
    closes the link, may use this class."""

    def __init__(
        self,
        share: float,
        rescue: ComputeUnit,
        ring: Callable[[], None],
        on_difference: Callable[[Member, ExpertKey, float], None],
        seed: int | None = None,
    ) -> None:
        """`share`: the fraction of the workers' results that the unit `rescue` recomputes; 1 means all for which there
        is time. `ring` is called when a recomputed result is ready, and must lead to a call of `go_on`. `on_difference`
        is called for a result whose bits differ, with the largest absolute difference. Without a `seed`, the sample is
        random."""
        self._share = share
        self._rescue = rescue
        self._ring = ring
        self._on_difference = on_difference
        self._lot = random.Random(secrets.randbits(64) if seed is None else seed)
        self._waiting = deque[_Drawn]()
        self._under_way: tuple[_Drawn, Future[torch.Tensor]] | None = None

    def note(self, member: Member, request: ExpertRequest, came: Sequence[torch.Tensor]) -> None:
        """Choose at random which of a worker's results will be recomputed, and store copies of them. Called before the
        futures of the request get these results."""
        for each, future, rows in zip(request.wanted, request.futures, came, strict=True):
            if self._lot.random() >= self._share or len(self._waiting) >= MOST_WAITING:
                continue
            drawn = _Drawn(member, each.key, request.hidden.wait()[list(each.tokens)], rows.clone())
            if not future.done():  # otherwise another result was faster, and the rows may have changed
                self._waiting.append(drawn)

    def go_on(self, is_needed: bool) -> None:
        """Compare a recomputed result with the worker's, and start to recompute the next one. With `is_needed` nothing
        is started, because the coordinator's own units have other work."""
        if self._under_way is not None and self._under_way[1].done():
            self._settle()
        if self._under_way is None and self._waiting and not is_needed:
            self._begin()

    def finish(self, seconds: float) -> None:
        """Recompute the results that still wait, for at most `seconds`."""
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
            _log.warning("the coordinator could not recompute an expert to check a worker's result: %s", error)
            return
        member.checked += 1
        if not same_bits(came, mine):
            self._waiting = deque(drawn for drawn in self._waiting if drawn.member is not member)
            self._on_difference(member, key, (came.float() - mine.float()).abs().max().item())
