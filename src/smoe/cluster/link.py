"""Main's end of all connections: one thread that sends requests, hears answers and sees to deadlines.

    computing thread --submit--> [link] --WORK--> worker ... DONE --> futures
                                   | deadline missed, disconnected, nonsense: the next worker is asked as well;
                                   ` nobody left: main computes it itself (`rescue`)

The first answer wins, whoever gave it; later ones are dropped. Keys decide who may speak: a stranger only where
somebody is invited, and no more than the words of a HELLO.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import partial
from typing import Any

import torch
import zmq

from smoe.cluster import frames
from smoe.cluster.address import Endpoint
from smoe.cluster.door import Door, Doorkeeper, user_of
from smoe.cluster.doorbell import Doorbell
from smoe.cluster.frames import Frame, FrameError, Kind, Rows
from smoe.cluster.members import Member, State
from smoe.cluster.requests import Proof, Request, Trial, only_used, resolve, take_over
from smoe.cluster.sending import FILE_KINDS, Courier
from smoe.cluster.spot_checks import SpotChecks
from smoe.compute.unit import ComputeUnit, Wanted
from smoe.expert import ExpertKey
from smoe.memory.streams import Fetched

_TICK_SECONDS = 0.01
"""How often deadlines are looked at while something is asked for."""
_BEAT_SECONDS = 0.5
_SILENCE_SECONDS = 1.0
"""Without a word from a worker after which it is out."""
PROOF_SECONDS = 30.0
"""For a proof: a worker compiles its kernels first."""
MOST_STRIKES = 2
"""Times that a worker may be late without having answered between."""
_CHECKING_SECONDS = 2.0
"""For answers that are still to be recomputed when main ends."""

_log = logging.getLogger(__name__)


class Link:
    """The thread and its sockets. `close` ends it; requests that are under way then are cancelled."""

    def __init__(
        self,
        address: Endpoint,
        public: str,
        secret: str,
        doorkeeper: Doorkeeper,
        rescue: ComputeUnit,
        rows: Rows,
        verify: float = 0.0,
    ) -> None:
        """`verify`: the share of answers that is recomputed. Raises `ClusterError` where the address cannot be listened
        at."""
        self.members: dict[int, Member] = {}
        """All that ever were, by unit."""
        self._doorkeeper = doorkeeper
        self._door = Door(address, public, secret, doorkeeper, rows.part_bytes)
        self._router, self._monitor = self._door.router, self._door.monitor
        self._rescue = rescue
        self._rows = rows
        self._requests: dict[int, Request] = {}
        self._numbers = itertools.count(secrets.randbits(62))  # what a worker still sends an earlier main is none
        self._bell: Doorbell[Callable[[], object]] = Doorbell()
        self.wake = partial(self._bell.put, lambda: None)
        self._spot_checks = SpotChecks(verify, rescue, self.wake, self._differs)
        self._by_route: dict[bytes, Member] = {}
        self.courier: Courier | None = None
        self._is_ending = False
        self._beaten = 0.0
        self.rescued = 0
        """Experts that main had to compute itself."""
        self.changed = threading.Condition()
        """Notified when a member's state changes."""
        self._thread = threading.Thread(target=self._run, name="smoe-cluster", daemon=True)
        self._thread.start()

    # -- for other threads --------------------------------------------------------------------------------------------

    def submit(self, unit: int, wanted: Sequence[Wanted], hidden: Fetched) -> list[Future[torch.Tensor]]:
        """Ask a worker; the results come as from a `ComputeUnit`."""
        futures: list[Future[torch.Tensor]] = [Future() for _ in wanted]
        if self._is_ending:
            self.forget(futures)
            return futures
        request = Request(next(self._numbers), wanted, hidden, futures, unit)
        self._bell.put(lambda: self._begin(request))
        return futures

    def fetch(self, unit: int, keys: Sequence[ExpertKey]) -> None:
        """Have a worker bring experts in that it does not hold."""
        self._bell.put(lambda: self._fetch(self.members.get(unit), keys))

    def forget(self, futures: Sequence[Future[torch.Tensor]]) -> None:
        """Nobody waits for these any more."""
        for future in futures:
            future.cancel()

    def close(self) -> None:
        """Say good-bye, end the thread, close the sockets. Idempotent."""
        if self._is_ending:
            return
        self._is_ending = True
        self.wake()
        self._thread.join()
        self._spot_checks.finish(_CHECKING_SECONDS)
        self._door.close()
        self._bell.close()

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        poller = zmq.Poller()
        for each in (self._router, self._monitor, self._bell.fileno()):
            poller.register(each, zmq.POLLIN)
        while not self._is_ending:
            try:
                poller.poll(int(1000 * (_TICK_SECONDS if self._requests else 10 * _TICK_SECONDS)))
                self._turn()
            except Exception:  # a request must not wait for ever for a thread that has ended
                _log.exception("the link has failed; what is under way is computed here")
        for member in self.members.values():
            if member.state is not State.OUT:
                self._send_to(member, frames.alone(Kind.LEAVE))
        for begin in self._bell.take():
            begin()
        for request in self._requests.values():
            self.forget(request.futures)

    def _turn(self) -> None:
        for begin in self._bell.take():
            begin()
        while self._router.poll(0):
            self._hear(self._router.recv_multipart(copy=False))
        while self._monitor.poll(0):
            self._monitor.recv_multipart()
            self._beaten = 0.0  # somebody has gone: who does not take a beat is out
        self._see_to_deadlines(time.monotonic())
        self._spot_checks.go_on(any(-1 in request.asked for request in self._requests.values()))
        if self.courier is not None:
            self.courier.turn(not self._requests, self._send)

    def _hear(self, parts: list[Any]) -> None:
        route, key = parts[0].bytes, user_of(parts[-1])
        member = self._by_route.get(route)
        try:
            frame = frames.parse([part.buffer for part in parts[1:]])
            if frame.kind is Kind.HELLO:
                self._knocked(route, key, frames.said(frame))
            elif self.courier is not None and frame.kind in FILE_KINDS:
                self.courier.heard(route, key, frame, self._send)
            elif member is not None and member.key == key and member.state is not State.OUT:
                self._answered(member, frame)
        except FrameError as error:
            _log.warning("%s sent what cannot be: %s", member.name if member else "a stranger", error)
            if member is not None:
                why = f"sent what cannot be: {error}"
                self._send(route, frames.talk(Kind.REFUSED, {"why": why}))
                self._out(member, why)

    def _knocked(self, route: bytes, key: str, said: dict[str, Any]) -> None:
        known = self._by_route.get(route)
        if known is not None and known.state is not State.OUT and known.key == key:
            return  # it was not heard yet that it is in
        found = self._doorkeeper.knocked(key, said)
        if isinstance(found, str):
            self._send(route, frames.talk(Kind.REFUSED, {"why": found}))
            return
        for other in self.members.values():
            if other.key == key and other.state is not State.OUT:
                self._out(other, "came back anew")
        self._drop_former(found.name)
        found.route, found.heard = route, time.monotonic()
        self.members[found.unit] = self._by_route[route] = found
        self._send(route, frames.talk(Kind.WELCOME, self._doorkeeper.welcome()))
        self._try_next(found, iter(self._doorkeeper.proof(found)))

    def _drop_former(self, name: str) -> None:
        """Of a worker that comes again and again only the last time is kept."""
        asked = {unit for request in self._requests.values() for unit in request.asked}
        for unit, member in list(self.members.items()):
            if member.name == name and member.state is State.OUT and unit not in asked:
                del self.members[unit]

    def _try_next(self, member: Member, proofs: Iterator[Proof]) -> None:
        """One proof after the other, so that what they take says something."""
        proof = next(proofs, None)
        if proof is None:
            self._became(member, State.READY)
            return
        number = next(self._numbers)
        self._begin(
            Request(number, proof.wanted, Fetched(proof.hidden), [], member.unit, Trial(member, proof.expected, proofs))
        )

    def _answered(self, member: Member, frame: Frame) -> None:
        member.heard = time.monotonic()
        if frame.kind is Kind.LEAVE:
            self._out(member, "left")
        elif frame.kind in (Kind.DONE, Kind.FAILED):
            request = self._requests.get(frame.request)
            member.strikes = 0
            if member.state is State.SUSPECT:
                self._became(member, State.READY)
            if request is None or member.unit not in request.asked:
                return  # somebody else was faster
            if frame.kind is Kind.FAILED:
                self._failed(request, member, frames.text_of(frame))
            else:
                self._done(request, member, frames.parse_done(frame, request.rows, *self._rows[:2]))

    def _done(self, request: Request, member: Member, done: frames.Done) -> None:
        del self._requests[request.number]
        sent, _ = request.asked[member.unit]
        member.note(request.wanted, time.monotonic() - sent, done.times)
        if request.trial is not None:
            self._proven(request.trial, done.rows)
            return
        came = done.rows.split([len(each.tokens) for each in request.wanted])
        self._spot_checks.note(member, request, came)
        for future, rows in zip(request.futures, came, strict=True):
            resolve(future, rows)
        self._doorkeeper.answered(member, [each.key for each in request.wanted])

    def _proven(self, trial: Trial, rows: torch.Tensor) -> None:
        if torch.equal(rows, trial.expected):
            self._try_next(trial.member, trial.others)
            return
        far = (rows.float() - trial.expected.float()).abs().max().item()
        why = f"its arithmetic gives other bits than main's (by {far:.2g}), so results would depend on who computes"
        self._send(trial.member.route, frames.talk(Kind.REFUSED, {"why": why}))
        self._out(trial.member, why)

    def _differs(self, member: Member, key: ExpertKey, far: float) -> None:
        """A worker that has proven itself has returned other bits than main's."""
        why = f"returned other bits than main's for expert {key[1]} of layer {key[0]} (by {far:.2g})"
        self._doorkeeper.doubt(member, why)
        for each in [each for each in self.members.values() if each.key == member.key]:
            self._send_to(each, frames.talk(Kind.REFUSED, {"why": f"it {why}"}))
            self._out(each, why)
        member.why = why

    def _failed(self, request: Request, member: Member, why: str) -> None:
        _log.warning("worker %s could not serve a request: %s", member.name, why)
        if request.trial is not None:
            self._out(member, why)
            return
        self._ask_next(request)

    # -- requests -----------------------------------------------------------------------------------------------------

    def _begin(self, request: Request) -> None:
        self._requests[request.number] = request
        self._ask_next(request)

    def _ask_next(self, request: Request) -> None:
        """Ask somebody more; where that cannot be, whoever waits is told."""
        try:
            self._ask_someone(request)
        except Exception as error:
            self._requests.pop(request.number, None)
            for future in request.futures:
                with suppress(InvalidStateError):
                    future.set_exception(error)

    def _ask_someone(self, request: Request) -> None:
        """Ask the unit that the plan names, then whoever is left and least asked, then ourselves."""
        if request.futures and all(future.done() for future in request.futures):
            self._requests.pop(request.number, None)  # forgotten meanwhile
            return
        if request.trial is not None:
            self._ask(request, request.trial.member)
            return
        if request.rows > self._rows.most:
            self._rescue_it(request)  # more than was planned for: nobody could receive it
            return
        first = self.members.get(request.first)
        others = sorted(
            (each for each in self.members.values() if each is not first), key=lambda each: self._open(each)
        )
        for member in [*([first] if first is not None else []), *others]:
            if member.is_here and member.unit not in request.asked and self._ask(request, member):
                return
        self._rescue_it(request)

    def _open(self, member: Member) -> int:
        return sum(member.unit in request.asked for request in self._requests.values())

    def _ask(self, request: Request, member: Member) -> bool:
        keys, now = [each.key for each in request.wanted], time.monotonic()
        loads, coming = member.will_use(keys), member.take_coming(keys)
        before = [each.asked[member.unit][1] for each in self._requests.values() if member.unit in each.asked]
        due = max([now, *before]) + member.deadline(request.wanted, loads + coming)  # it computes one after the other
        if request.trial is not None:
            due = now + PROOF_SECONDS
        request.asked[member.unit] = (now, due)
        member.requests += 1
        hidden, wanted = only_used(request.hidden.wait(), request.wanted)
        return self._send_to(member, frames.work(request.number, wanted, hidden))

    def _fetch(self, member: Member | None, keys: Sequence[ExpertKey]) -> None:
        if member is not None:
            member.will_bring(keys)
            self._send_to(member, frames.fetch(keys))

    def _rescue_it(self, request: Request) -> None:
        """Nobody is left to ask: main computes it, unless somebody who is late answers first."""
        if -1 in request.asked:
            return
        self.rescued += len(request.wanted)
        for mine, theirs in zip(self._rescue.submit(request.wanted, request.hidden), request.futures, strict=True):
            mine.add_done_callback(partial(take_over, theirs))
        request.asked[-1] = (time.monotonic(), float("inf"))

    def _see_to_deadlines(self, now: float) -> None:
        for request in list(self._requests.values()):
            if request.futures and all(future.done() for future in request.futures):
                del self._requests[request.number]
                continue
            late = [self.members[unit] for unit, (_, due) in request.asked.items() if unit >= 0 and due < now]
            if len(late) == len(request.asked):
                for member in late:
                    self._missed(member)
                if request.trial is not None:
                    self._out(request.trial.member, "did not give its proof in time")
                elif request.number in self._requests:
                    self._ask_next(request)
        if now - self._beaten > _BEAT_SECONDS:
            self._beaten = now
            self._doorkeeper.tick()
            for member in list(self.members.values()):
                if member.state is State.OUT:
                    continue
                if member.state is not State.PROVING and now - member.heard > _SILENCE_SECONDS:
                    self._out(member, f"said nothing for {_SILENCE_SECONDS:g} s")
                    continue
                self._send_to(member, frames.alone(Kind.BEAT))
                if member.state is State.SUSPECT and not self._open(member):
                    self._became(member, State.READY)  # what it was late with was lost

    def _missed(self, member: Member) -> None:
        member.missed += 1
        if member.state is State.READY:
            member.strikes += 1
            self._became(member, State.SUSPECT)
            if member.strikes > MOST_STRIKES:
                self._out(member, f"was late {member.strikes} times in a row")

    # -- members ------------------------------------------------------------------------------------------------------

    def _became(self, member: Member, state: State, why: str = "") -> None:
        member.state, member.why = state, why
        _log.info("worker %s: %s%s", member.name, state.value, f" ({why})" if why else "")
        with self.changed:
            self.changed.notify_all()

    def _out(self, member: Member, why: str) -> None:
        if member.state is State.OUT:
            return
        self._send(member.route, frames.alone(Kind.LEAVE))  # so that it may greet us anew
        self._became(member, State.OUT, why)
        self._by_route.pop(member.route, None)
        for request in list(self._requests.values()):
            if request.trial is not None and request.trial.member is member:
                del self._requests[request.number]
            elif member.unit in request.asked and request.number in self._requests:
                open_to = [unit for unit in request.asked if unit < 0 or self.members[unit].state is not State.OUT]
                if not open_to:
                    self._ask_next(request)

    def _send_to(self, member: Member | None, parts: list[Any]) -> bool:
        if member is None or member.state is State.OUT:
            return False
        if self._send(member.route, parts):
            return True
        self._out(member, "has gone")
        return False

    def _send(self, route: bytes, parts: list[Any]) -> bool:
        try:
            self._router.send_multipart([route, *parts], zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:  # EHOSTUNREACH: gone; EAGAIN: it takes nothing any more
            _log.info("cannot reach %r: %s", route, error)
            return False
        return True
