"""Requests in flight: the units that have them, their deadlines, and the units that replace late ones.

    a worker       | request ........ x  late, silent, gone, or it has failed
    others                            | expert a ..... |       each expert goes to the machine that finishes it first,
    coordinator                       | expert b ... |         possibly this one; a late machine is replaced in turn
    a worker                                    | all of it, late: results that are already there do not count

No unit gets the same experts twice; the coordinator itself is the last. Only the link's thread may use this module.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Callable, Mapping
from concurrent.futures import InvalidStateError
from contextlib import suppress
from functools import partial
from math import inf
from typing import Any

from smoe.cluster import frames
from smoe.cluster.members import Member, deadline
from smoe.cluster.requests import ExpertRequest, only_used, take_over
from smoe.compute.unit import ComputeUnit
from smoe.policy.placement import Placement
from smoe.policy.plan import DEVICE, Serve

PROOF_SECONDS = 30.0
"""The most seconds for a proof, the test of a new worker, which compiles its kernels first."""


class UnderWay:
    """The coordinator's requests that are in flight. If a worker is late or fails, other compute units get its
    requests."""

    def __init__(
        self,
        members: Mapping[int, Member],
        send: Callable[[Member, list[Any]], object],
        rescue: ComputeUnit,
        most_rows: int,
        here_load: Callable[[], float],
    ) -> None:
        """`send` sends a message, and calls `lost` if it cannot reach the member. `rescue`: the coordinator's own
        compute unit. `here_load` returns the seconds in which `rescue` loads an expert; if infinite, `rescue` is used
        only as the last resort. `most_rows`: the maximum number of rows of a message."""
        self.most_rows = most_rows
        self.rescued = 0
        """The number of experts that the coordinator had to compute in place of a worker."""
        self._members = members
        self._send = send
        self._rescue = rescue
        self._here_load = here_load
        self._requests: dict[int, ExpertRequest] = {}
        self._numbers = itertools.count(secrets.randbits(62))  # excludes results for an earlier coordinator

    @property
    def needs_rescue(self) -> bool:
        """Whether the coordinator's own compute unit is computing a request in place of a worker."""
        return any(request.unit == DEVICE for request in self._requests.values())

    def owes(self, member: Member) -> bool:
        """Return whether a request to this worker is in flight, so that it still owes a result."""
        return any(request.unit == member.unit for request in self._requests.values())

    def next_due(self) -> float:
        """Return the next deadline (`time.monotonic`); infinite: none."""
        return min((each.due for each in self._requests.values() if not each.is_lost), default=inf)

    def begin(self, request: ExpertRequest) -> None:
        """Send a request to its compute unit, or to other units if that one cannot take it."""
        try:
            self._ask(request)
        except Exception as error:
            for future in request.futures:
                with suppress(InvalidStateError):
                    future.set_exception(error)

    def find(self, number: int, member: Member) -> ExpertRequest | None:
        """Return the request in flight that has this number and was sent to this worker; None if there is none, because
        another unit has answered it."""
        request = self._requests.get(number)
        return None if request is None or request.unit != member.unit else request

    def end(self, number: int) -> None:
        """Remove a request whose result has arrived."""
        self._requests.pop(number, None)

    def overdue(self, now: float) -> set[int]:
        """Return the compute units whose requests are late. Drop requests for which no thread waits any more."""
        self._requests = {number: each for number, each in self._requests.items() if not each.is_over}
        return {each.unit for each in self._requests.values() if each.due < now and not each.is_lost}

    def lost(self, member: Member) -> None:
        """Send the requests of a lost worker to other units. A proof that the worker had is dropped."""
        for number, request in list(self._requests.items()):
            if request.unit == member.unit and request.trial is not None:
                del self._requests[number]
            elif request.unit == member.unit:
                self.stand_in(request)

    def stand_in(self, request: ExpertRequest) -> None:
        """Send the experts of a request to other units, each expert to the unit that will finish it first. A second
        call for the same request does nothing."""
        if request.is_lost:
            return
        request.is_lost = True
        for unit, places in self._shared_out(request).items():
            self.begin(request.part(unit, places))

    def cancel(self) -> None:
        """Cancel the futures of all requests in flight, because no results will arrive."""
        for request in self._requests.values():
            for future in request.futures:
                future.cancel()

    def _ask(self, request: ExpertRequest) -> None:
        if request.is_over:
            return  # no longer needed
        if request.unit == DEVICE or request.rows > self.most_rows:  # too large to send
            self._rescue_it(request)
            return
        member = self._members.get(request.unit)
        if member is None or not (member.takes(request.wanted) or request.trial is not None):
            self.stand_in(request)
            return
        keys, now = [each.key for each in request.wanted], time.monotonic()
        loads = member.will_use(keys) + member.take_coming(keys)
        before, request.sent, request.expected = self._behind(member), now, member.expected(request.wanted, loads)
        request.due = now + (deadline(before + request.expected) if request.trial is None else PROOF_SECONDS)
        number = next(self._numbers)
        self._requests[number] = request
        member.requests += 1
        hidden, wanted = only_used(request.hidden.wait(), request.wanted)
        self._send(member, frames.work(number, wanted, hidden))

    def _rescue_it(self, request: ExpertRequest) -> None:
        """Compute a request on the coordinator. If a late worker finishes an expert first, the worker's result is
        used."""
        request.unit = DEVICE
        self._requests[next(self._numbers)] = request
        self.rescued += len(request.wanted)
        for mine, theirs in zip(self._rescue.submit(request.wanted, request.hidden), request.futures, strict=True):
            mine.add_done_callback(partial(take_over, theirs))

    def _shared_out(self, request: ExpertRequest) -> dict[int, list[int]]:
        """Return which units take over the unfinished experts of a late request: {unit: indices of the experts in the
        request}."""
        here = self._here_load()
        views = [
            view._replace(hop=view.hop + self._behind(member))
            for member in self._members.values()
            if member.is_here and member.unit not in {*request.tried, request.unit}
            for view in (member.view(),)
        ]
        # the coordinator's disk is loading this layer's experts: one load precedes
        placement = Placement("finish", "", views, here, here, 0)
        left = [n for n, future in enumerate(request.futures) if not future.done()]
        serves = [Serve(each.key, tuple(range(len(each.tokens))), True) for each in request.wanted]
        units, found = placement.units([serves[n] for n in left]), dict[int, list[int]]()
        for n in left:
            found.setdefault(units.get(request.wanted[n].key, DEVICE), []).append(n)
        return found

    def _behind(self, member: Member) -> float:
        """Return the seconds that the worker still needs for its requests in flight, since it computes them one after
        the other."""
        return sum(each.expected for each in self._requests.values() if each.unit == member.unit)
