"""Requests under way: who has been asked for what, until when, and who stands in for whom.

    a worker   | asked ........... x  late, silent, gone, or it has failed
    others                         | expert a ..... |       each goes to the machine that finishes first, the
    coordinator
                                   | expert b ... |         among them; who is late in turn is stood in for as well
    a worker                                    | all of it, late: what is there already does not count

Nobody is asked twice for the same experts; main's own hands are the last. Belongs to the link's thread.
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
"""Seconds for a proof: a worker compiles its kernels first."""


class UnderWay:
    """Asks workers, and others in their place."""

    def __init__(
        self,
        members: Mapping[int, Member],
        send: Callable[[Member, list[Any]], object],
        rescue: ComputeUnit,
        most_rows: int,
        here_load: Callable[[], float],
    ) -> None:
        """`send` calls `lost` for whom it cannot reach. `rescue`: main's own hands, which take `here_load` seconds to
        bring an expert in (infinite: they are a last resort); `most_rows`: of what can be sent."""
        self.most_rows = most_rows
        self.rescued = 0
        """Experts that main had to compute itself."""
        self._members = members
        self._send = send
        self._rescue = rescue
        self._here_load = here_load
        self._requests: dict[int, ExpertRequest] = {}
        self._numbers = itertools.count(secrets.randbits(62))  # what a worker still sends an earlier main is none

    @property
    def is_idle(self) -> bool:
        """No thread waits for anything."""
        return not self._requests

    @property
    def needs_rescue(self) -> bool:
        """Whether main's own hands are at work."""
        return any(request.unit == DEVICE for request in self._requests.values())

    def owes(self, member: Member) -> bool:
        """Whether something that it was asked for is still waited for."""
        return any(request.unit == member.unit for request in self._requests.values())

    def next_due(self) -> float:
        """The next deadline (`time.monotonic`); infinite: none."""
        return min((each.due for each in self._requests.values() if not each.is_lost), default=inf)

    def begin(self, request: ExpertRequest) -> None:
        """Send to the unit that the request names, or to its substitutes."""
        try:
            self._ask(request)
        except Exception as error:
            for future in request.futures:
                with suppress(InvalidStateError):
                    future.set_exception(error)

    def find(self, number: int, member: Member) -> ExpertRequest | None:
        """What a member answers; None: others were faster."""
        request = self._requests.get(number)
        return None if request is None or request.unit != member.unit else request

    def end(self, number: int) -> None:
        """It has been answered."""
        self._requests.pop(number, None)

    def overdue(self, now: float) -> set[int]:
        """The units that are late. What no thread waits for any more is forgotten."""
        self._requests = {number: each for number, each in self._requests.items() if not each.is_over}
        return {each.unit for each in self._requests.values() if each.due < now and not each.is_lost}

    def lost(self, member: Member) -> None:
        """No answer of its is to be waited for: others are asked as well."""
        for number, request in list(self._requests.items()):
            if request.unit == member.unit and request.trial is not None:
                del self._requests[number]
            elif request.unit == member.unit:
                self.stand_in(request)

    def stand_in(self, request: ExpertRequest) -> None:
        """Others are asked for what a unit does not do, each for the experts that it is done with first; once."""
        if request.is_lost:
            return
        request.is_lost = True
        for unit, places in self._shared_out(request).items():
            self.begin(request.part(unit, places))

    def cancel(self) -> None:
        """Cancel everything: no answers will come."""
        for request in self._requests.values():
            for future in request.futures:
                future.cancel()

    def _ask(self, request: ExpertRequest) -> None:
        if request.is_over:
            return  # forgotten meanwhile
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
        """The coordinator computes it, unless a late worker answers first."""
        request.unit = DEVICE
        self._requests[next(self._numbers)] = request
        self.rescued += len(request.wanted)
        for mine, theirs in zip(self._rescue.submit(request.wanted, request.hidden), request.futures, strict=True):
            mine.add_done_callback(partial(take_over, theirs))

    def _shared_out(self, request: ExpertRequest) -> dict[int, list[int]]:
        """Who stands in for which of a request's experts, by their places in it."""
        here = self._here_load()
        views = [
            view._replace(hop=view.hop + self._behind(member))
            for member in self._members.values()
            if member.is_here and member.unit not in {*request.tried, request.unit}
            for view in (member.view(),)
        ]
        # what main loads is forgotten at once, and its disk brings this layer's experts in: one load before it
        placement = Placement("finish", "", views, here, here, 0)
        left = [n for n, future in enumerate(request.futures) if not future.done()]
        serves = [Serve(each.key, tuple(range(len(each.tokens))), True) for each in request.wanted]
        units, found = placement.units([serves[n] for n in left]), dict[int, list[int]]()
        for n in left:
            found.setdefault(units.get(request.wanted[n].key, DEVICE), []).append(n)
        return found

    def _behind(self, member: Member) -> float:
        """Seconds that what it was asked for before should take: it computes one after the other."""
        return sum(each.expected for each in self._requests.values() if each.unit == member.unit)
