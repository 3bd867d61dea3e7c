"""The coordinator's end of all connections: one thread that sends requests, receives results and watches deadlines.

    computing thread --submit--> [link] --WORK--> worker ... DONE --> futures
                                   ` late, silent, disconnected, invalid: others get it too (`requests_in_flight.py`)

The first result counts; later ones are dropped. Keys decide which machines may send: an unknown key is accepted only
while an invitation is valid, and only for a HELLO.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch
import zmq

from smoe.cluster import frames
from smoe.cluster.address import to_listen_at
from smoe.cluster.draft_session import Seat
from smoe.cluster.frames import Frame, FrameError, FrameKind, RowFormat
from smoe.cluster.listening_sockets import ListeningSockets, Membership, user_of
from smoe.cluster.members import Loss, Member, WorkerState
from smoe.cluster.pollable_queue import PollableQueue
from smoe.cluster.requests import ExpertRequest, PendingProof, Proof, resolve
from smoe.cluster.requests_in_flight import UnderWay
from smoe.cluster.spot_checks import SpotChecks
from smoe.cluster.stored_identity import Coordinator
from smoe.compute.unit import ComputeUnit, ExpertTask
from smoe.expert import ExpertKey
from smoe.memory.streams import Fetched

_TICK_SECONDS = 0.1
"""The longest time in seconds that the thread waits for messages or deadlines."""
_BEAT_SECONDS = 0.5
_QUIET_SECONDS, _SILENCE_SECONDS = 0.5, 1.0
"""Seconds without a message after which a worker counts as late, and after which it is disconnected. A worker sends a
message every 0.1 s."""
MOST_STRIKES = 2
"""The number of missed deadlines in succession after which a worker is excluded."""
_CHECKING_SECONDS = 2.0
"""The most seconds for recomputing the remaining sampled results when the coordinator ends."""

_log = logging.getLogger(__name__)


class ClusterLink:
    """The thread that owns the coordinator's sockets. `close` ends the thread and cancels requests in flight."""

    def __init__(
        self,
        coordinator: Coordinator,
        membership: Membership,
        seat: Seat,
        rescue: ComputeUnit,
        rows: RowFormat,
        here_load: Callable[[], float],
        verify: float = 0.0,
    ) -> None:
        """Draft models connect through `seat`, one at a time. `rescue`, `here_load`: as for `UnderWay`. `verify`: the
        fraction of the workers' results that the coordinator recomputes. Raises `ClusterError` if the address is not
        available."""
        self.members: dict[int, Member] = {}
        """All workers that have ever connected, by their unit number in plans."""
        self._membership = membership
        at, keys = to_listen_at(coordinator.address, coordinator.everywhere), coordinator.keys
        self._sockets = ListeningSockets(at, keys.public, keys.secret, membership, rows.part_bytes)
        self._router, self._monitor = self._sockets.router, self._sockets.monitor
        self._rows = rows
        self.under_way = UnderWay(self.members, self._send_to, rescue, rows.most, here_load)
        self._queue: PollableQueue[Callable[[], object]] = PollableQueue()
        self.wake = partial(self._queue.put, lambda: None)
        self._spot_checks = SpotChecks(verify, rescue, self.wake, self._differs)
        self._by_route: dict[bytes, Member] = {}
        self.refused: dict[str, str] = {}
        """For each name, the reason why the last machine of that name was refused."""
        self.losses: list[Loss] = []
        """The losses of workers, in order of time."""
        self._seat = seat
        self.is_ending = False
        """Whether `close` was called."""
        self._beaten = 0.0
        self.changed = threading.Condition()
        """Notified when a member's state changes."""
        self._thread = threading.Thread(target=self._run, name="smoe-cluster", daemon=True)

    def begin(self) -> None:
        """Start the thread, which calls `membership` from now on."""
        self._seat.begin(self.wake, self._note_change)
        self._thread.start()

    # -- for other threads --------------------------------------------------------------------------------------------

    def submit(self, unit: int, wanted: Sequence[ExpertTask], hidden: Fetched) -> list[Future[torch.Tensor]]:
        """Send a request to a worker. Return a future for the output of each expert, as a `ComputeUnit` does."""
        futures: list[Future[torch.Tensor]] = [Future() for _ in wanted]
        if self.is_ending:
            self.forget(futures)
            return futures
        request = ExpertRequest(wanted, hidden, futures, unit)
        self._queue.put(lambda: self.under_way.begin(request))
        return futures

    def fetch(self, unit: int, keys: Sequence[ExpertKey]) -> None:
        """Ask a worker to load these experts, except those that it has, before they are requested."""
        if not self.is_ending:
            self._queue.put(lambda: self._fetch(self.members.get(unit), keys))

    def forget(self, futures: Sequence[Future[torch.Tensor]]) -> None:
        """Cancel the futures whose results no thread waits for any more."""
        for future in futures:
            future.cancel()

    def close(self) -> None:
        """Disconnect all machines, end the thread, and close the sockets. Repeated calls have no effect."""
        if self.is_ending:
            return
        self.is_ending = True
        self.wake()
        self._thread.join()
        self._spot_checks.finish(_CHECKING_SECONDS)
        self._sockets.close()
        self._queue.close()

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        poller = zmq.Poller()
        for each in (self._router, self._monitor, self._queue.fileno()):
            poller.register(each, zmq.POLLIN)
        while not self.is_ending:
            try:
                left = min(_TICK_SECONDS, self.under_way.next_due() - time.monotonic())
                poller.poll(math.ceil(1000 * max(0.0, left)))
                self._turn()
            except Exception:  # the thread must not end while requests wait
                _log.exception("the connections to workers failed; the coordinator computes the experts in flight")
        self._seat.put_out("", self._send)
        for member in self.members.values():
            if member.state is not WorkerState.OUT:
                self._send_to(member, frames.alone(FrameKind.LEAVE))
        for begin in self._queue.take():
            begin()
        self.under_way.cancel()

    def _turn(self) -> None:
        for begin in self._queue.take():
            begin()
        while self._router.poll(0):
            self._hear(self._router.recv_multipart(copy=False))
        while self._monitor.poll(0):
            self._monitor.recv_multipart()
            self._beaten = 0.0  # a connection has closed: the next beat shows whose
            self._seat.beat_soon()
        self._see_who_is_late(time.monotonic())
        self._seat.turn(time.monotonic(), self._send)
        self._spot_checks.go_on(self.under_way.needs_rescue)

    def _hear(self, parts: list[Any]) -> None:
        route, key = parts[0].bytes, user_of(parts[-1])
        member, seat = self._by_route.get(route), self._seat
        try:
            frame = frames.parse([part.buffer for part in parts[1:]])
            if seat.is_of(route, frame.kind):
                seat.receive(route, key, frame, time.monotonic(), self._send)
            elif frame.kind is FrameKind.HELLO:
                self._greeted(route, key, frames.fields_of(frame))
            elif frame.kind is FrameKind.DESCRIBE and (
                parts := self._membership.describe(key, frames.fields_of(frame))
            ):
                self._send(route, parts)
            elif member is not None and member.key == key and member.state is not WorkerState.OUT:
                self._answered(member, frame)
        except FrameError as error:
            is_draft, why = seat.has(route), f"sent an invalid message: {error}"
            _log.warning(
                "%s %s", member.name if member else "the draft model" if is_draft else "an unknown machine", why
            )
            if member is not None or is_draft:
                self._send(route, frames.talk(FrameKind.REFUSED, {"why": why}))
            if member is not None:
                self._out(member, why)
            elif is_draft:
                seat.leave(why)

    def _greeted(self, route: bytes, key: str, fields: dict[str, Any]) -> None:
        known = self._by_route.get(route)
        if known is not None and known.state is not WorkerState.OUT and known.key == key:
            return  # its WELCOME is still on the way
        found = self._membership.greeted(key, fields)
        if not isinstance(found, Member):
            if found is not None:
                self.refused[str(fields.get("name"))[:80]] = found
                self._send(route, frames.talk(FrameKind.REFUSED, {"why": found}))
            return
        for other in [each for each in self.members.values() if each.key == key and each.state is not WorkerState.OUT]:
            self._out(other, "reconnected")
        self._drop_former(found)
        found.route, found.last_seen = route, time.monotonic()
        self.members[found.unit] = self._by_route[route] = found
        self._send(route, frames.talk(FrameKind.WELCOME, self._membership.welcome(found)))
        self._try_next(found, iter(self._membership.proof(found)))

    def _drop_former(self, found: Member) -> None:
        """When a worker reconnects, delete the records of its earlier connections and add their totals to the new
        record."""
        for unit, member in list(self.members.items()):
            if member.name == found.name and member.state is WorkerState.OUT and not self.under_way.owes(member):
                found.earlier = found.earlier.plus(member.done)
                del self.members[unit]

    def _try_next(self, member: Member, proofs: Iterator[Proof]) -> None:
        """Send a new worker its next proof: a request whose correct result the coordinator knows. After the last proof
        the worker is ready. Proofs are sent one after the other, so that the worker's times can be compared."""
        proof = next(proofs, None)
        if proof is None:
            member.is_proven()
            self._became(member, WorkerState.READY)
            return
        trial = PendingProof(member, proof.expected, proofs)
        self.under_way.begin(ExpertRequest(proof.wanted, Fetched(proof.hidden), [], member.unit, trial))

    def _answered(self, member: Member, frame: Frame) -> None:
        member.last_seen = time.monotonic()
        if frame.kind is FrameKind.LEAVE:
            self._out(member, "left")
        elif frame.kind in (FrameKind.DONE, FrameKind.FAILED):
            request = self.under_way.find(frame.request, member)
            before, member.answered, member.strikes = member.answered, member.last_seen, 0
            if member.state is WorkerState.SUSPECT:
                self._became(member, WorkerState.READY)
            if request is None:
                return
            if frame.kind is FrameKind.FAILED:
                self._failed(request, member, frames.text_of(frame))
            else:
                done = frames.parse_done(frame, request.rows, *self._rows[:2])
                member.note(request.wanted, member.last_seen - request.sent, done.times, queued=request.sent < before)
                self._done(request, member, done)
                self.under_way.end(frame.request)  # last, so that after an error others get the request

    def _done(self, request: ExpertRequest, member: Member, done: frames.DoneFrame) -> None:
        if request.trial is not None:
            self._proven(request.trial, done.rows)
            return
        came = done.rows.split([len(each.tokens) for each in request.wanted])
        self._spot_checks.note(member, request, came)
        for future, rows in zip(request.futures, came, strict=True):
            resolve(future, rows)
        self._membership.answered(member, [each.key for each in request.wanted])

    def _proven(self, trial: PendingProof, rows: torch.Tensor) -> None:
        if torch.equal(rows, trial.expected):
            self._try_next(trial.member, trial.others)
            return
        far = (rows.float() - trial.expected.float()).abs().max().item()
        why = (
            f"its results differ from the coordinator's (by {far:.2g}), so the text would depend on which machine "
            "computes"
        )
        self._send(trial.member.route, frames.talk(FrameKind.REFUSED, {"why": why}))
        self._out(trial.member, why)

    def _differs(self, member: Member, key: ExpertKey, far: float) -> None:
        """Exclude an admitted worker whose result differs from the coordinator's."""
        why = f"returned a wrong result for expert {key[1]} of layer {key[0]} (off by {far:.2g})"
        self._membership.doubt(member, why)
        for each in [each for each in self.members.values() if each.key == member.key]:
            self._send_to(each, frames.talk(FrameKind.REFUSED, {"why": f"it {why}"}))
            self._out(each, why)
        member.why = why

    def _failed(self, request: ExpertRequest, member: Member, why: str) -> None:
        _log.warning("worker %s could not compute a request: %s", member.name, why)
        if request.trial is not None:
            self._out(member, why)
            return
        self.under_way.stand_in(request)

    def _fetch(self, member: Member | None, keys: Sequence[ExpertKey]) -> None:
        if member is not None and member.is_here:
            member.will_bring(keys)
            self._send_to(member, frames.fetch(keys))

    # -- members ------------------------------------------------------------------------------------------------------

    def _see_who_is_late(self, now: float) -> None:
        late = self.under_way.overdue(now)
        late |= {each.unit for each in self.members.values() if each.is_here and now - each.last_seen > _QUIET_SECONDS}
        members = [self.members[unit] for unit in sorted(late)]
        for member in members:
            if member.is_here:
                member.missed, member.strikes, member.late = member.missed + 1, member.strikes + 1, now
                self._became(member, WorkerState.SUSPECT)
        for member in members:  # no late member may replace another
            if member.state is WorkerState.PROVING:
                self._out(member, "did not finish the equality check in time")
            elif member.strikes > MOST_STRIKES:
                self._out(member, f"was late {member.strikes} times in a row")
            else:
                self.under_way.lost(member)
        if now - self._beaten > _BEAT_SECONDS:
            self._beat(now)

    def _beat(self, now: float) -> None:
        self._beaten = now
        self._membership.tick()
        for member in list(self.members.values()):
            if member.state is WorkerState.OUT:
                continue
            if member.state is not WorkerState.PROVING and now - member.last_seen > _SILENCE_SECONDS:
                self._out(member, f"sent nothing for {_SILENCE_SECONDS:g} s")
                continue
            self._send_to(member, frames.alone(FrameKind.BEAT))
            is_back = member.state is WorkerState.SUSPECT and member.last_seen > member.late
            if is_back and not self.under_way.owes(member):
                self._became(member, WorkerState.READY)  # it is alive, and its late request was lost

    def _became(self, member: Member, state: WorkerState, why: str = "") -> None:
        member.state, member.why = state, why
        _log.info("worker %s: %s%s", member.name, state.value, f" ({why})" if why else "")
        self._note_change()

    def _note_change(self) -> None:
        with self.changed:
            self.changed.notify_all()

    def _out(self, member: Member, why: str) -> None:
        if member.state is WorkerState.OUT:
            return
        if member.state is not WorkerState.PROVING:
            self.losses.append(Loss(member.name, why, time.time()))
        self._send(member.route, frames.alone(FrameKind.LEAVE))  # so that it can send HELLO again
        self._became(member, WorkerState.OUT, why)
        self._by_route.pop(member.route, None)
        self.under_way.lost(member)

    def _send_to(self, member: Member | None, parts: list[Any]) -> bool:
        if member is None or member.state is WorkerState.OUT:
            return False
        if self._send(member.route, parts):
            return True
        self._out(member, "disconnected")
        return False

    def _send(self, route: bytes, parts: list[Any]) -> bool:
        try:
            self._router.send_multipart([route, *parts], zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:  # EHOSTUNREACH: disconnected; EAGAIN: its queue is full
            member = self._by_route.get(route)
            _log.info("cannot reach %s: %s", f"worker {member.name}" if member else "an unknown machine", error)
            return False
        return True
