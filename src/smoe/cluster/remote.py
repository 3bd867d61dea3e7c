"""The cluster as the engine uses it: compute units on other machines, and the placement of experts on these units.

Membership changes between forward passes: a worker that has passed its proofs is used from the next pass on. Within a
pass, the link replaces a worker that fails.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from itertools import chain
from math import inf
from typing import Any, NamedTuple

import torch

from smoe import __version__
from smoe.cluster import frames
from smoe.cluster.admission import Admission
from smoe.cluster.describing import Describer, LightWorker
from smoe.cluster.draft_session import Seat
from smoe.cluster.frames import FrameKind, RowFormat
from smoe.cluster.link import ClusterLink
from smoe.cluster.members import Member, WorkerState
from smoe.cluster.requests import Proof
from smoe.cluster.stored_identity import Coordinator, is_name, keep_status
from smoe.compute.experts_alone import ExpertsAlone
from smoe.compute.unit import ComputeUnit, ExpertTask
from smoe.errors import ClusterError
from smoe.expert import EXACT, ExpertKey
from smoe.memory.streams import Fetched
from smoe.policy.ahead import AheadSchedule, Here, TokenLayer
from smoe.policy.placement import Placement, WorkerView
from smoe.policy.plan import FIRST_WORKER
from smoe.policy.prediction import Prediction
from smoe.routing import Routing

_PROOF_ROWS = (1, 2, 3, 5, 8, 9, 33, 300)
"""The numbers of rows in proofs, the tests of a new worker. For each of them the kernels, or the division of work among
threads, may differ between machines."""

_log = logging.getLogger(__name__)


class Services(NamedTuple):
    """What the coordinator does for other machines besides sending requests."""

    describer: Describer
    """Describes the experts for workers without torch."""
    seat: Seat
    """The connection of a draft model on another machine."""


class Cluster:
    """The coordinator's workers. The executor uses this class as its `Sharer`, the link as its `Membership`. `close`
    disconnects the workers."""

    def __init__(
        self,
        admission: Admission,
        services: Services,
        alone: ExpertsAlone,
        arithmetic: str,
        units: Mapping[int, ComputeUnit],
        rows: RowFormat,
        asked: dict[str, Any],
        method: str,
        order: str,
        here: Here,
        spares: int = 0,
        verify: float = 0.0,
    ) -> None:
        """Accept workers from now on, which compute with the kernels `arithmetic` (one of `KERNELS`), as the
        coordinator does.

        `alone`: the coordinator's own experts, for making proofs and for the time without workers. `units`: the compute
        units of this machine. `rows`: the format of rows in messages. `asked`: fields that must match a worker's model.
        `spares`: the number of predicted experts beyond a layer's top-k. `verify`: the fraction of results that is
        recomputed. `method`: one of `PLACEMENT`; `order`: one of `BALANCE_ORDER`. Raises `ClusterError` if the address
        is in use."""
        self._admission = admission
        self._describer, self._seat = services.describer, services.seat
        self.units = dict(units)
        """The units by their numbers in plans."""
        self._alone = alone
        self._asked = asked
        self._rule = Placement(method, order, (), inf, 0.0, 0)
        self._here = here
        self._last_here_load = inf
        """The seconds of a load on the coordinator that the last plan assumed. The link's thread reads this value."""
        turns = {layer: turn for turn, layer in enumerate(sorted(alone.store.layers))}
        own = here._replace(load=self._seconds_here)
        self._ahead = AheadSchedule(
            method, turns, spares, own, self._costs_later, self._fetch, time.perf_counter, threading.Lock()
        )
        self.doubts: list[str] = []
        """Reasons why text generated so far may be wrong, for the user; empty: there are none."""
        self._arithmetic = arithmetic
        self._ready: list[Member] = []
        most = max(rows.most, 2 * max(_PROOF_ROWS))  # two experts in each proof
        self._rows = rows._replace(most=most).fitting
        self._unit = FIRST_WORKER
        _compute_by(alone, arithmetic)
        self._proofs = list(self._make_proofs())
        self.link = ClusterLink(
            admission.coordinator,
            self,
            services.seat,
            alone.experts,
            self._rows,
            lambda: self._last_here_load,
            verify,
        )
        self.link.begin()

    def wait(self, workers: int, seconds: float) -> list[Member]:
        """Wait for `workers` ready workers, and a draft model if one is used, at most `seconds`. Return the ready
        workers."""
        until = time.monotonic() + seconds
        with self.link.changed:
            while self._is_waiting(workers) and (left := until - time.monotonic()) > 0:
                self.link.changed.wait(left)
        self.begin_pass(0)
        return list(self._ready)

    @property
    def coordinator(self) -> Coordinator:
        """The current record of the cluster."""
        return self._admission.coordinator

    @property
    def members(self) -> list[Member]:
        """All workers that ever connected."""
        return list(self.link.members.values())

    @property
    def refused(self) -> dict[str, str]:
        """For each machine that was not admitted, its name and the reason."""
        return self.link.refused | {member.name: member.why for member in self.members if member.why}

    def lost(self) -> list[dict[str, Any]]:
        """Return the workers that were connected and are lost: for each its name, the reason and the time (Unix
        time)."""
        return [each._asdict() for each in self.link.losses]

    def described(self) -> list[dict[str, Any]]:
        """Return the state of every worker, for `smoe cluster status` and the summary of a run. Times are in
        seconds."""
        return [_described(member) for member in self.members]

    @property
    def draft(self) -> dict[str, Any] | None:
        """The state of a draft model on another machine; None where none has connected."""
        return self._seat.described()

    def close(self) -> None:
        """Disconnect the workers and free the coordinator's own slots. Repeated calls have no effect."""
        if self.link.is_ending:
            return
        draft = self.draft
        self.link.close()
        with suppress(OSError):
            keep_status(self.coordinator.name, self.described(), draft, is_over=True)
        self._describer.close()
        self._alone.close()

    # -- for the executor ---------------------------------------------------------------------------------------------

    def begin_pass(self, position: int) -> None:
        """Fix which workers the next pass uses: those that are ready now."""
        self._ready = self._here_now()
        for unit in [unit for unit in self.units if unit >= FIRST_WORKER and self._is_out(unit)]:
            del self.units[unit]
        for member in self._ready:
            if member.unit not in self.units:
                self.units[member.unit] = RemoteUnit(member.unit, self.link)
        self._ahead.begin(position, self._views, {member.unit: member.slots for member in self._ready})

    def balance(self, routing: Routing, under_way: float) -> Placement | None:
        """Return the rule and the present numbers by which the missing experts of one layer are assigned to machines.
        None if there are no workers. `under_way`: the number of loads in flight on the coordinator."""
        self._ahead.asked(routing.layer, set(chain.from_iterable(routing.top_k_index)))
        if not self._ready:
            return None
        load = self._last_here_load = self._seconds_here()
        return self._rule._replace(
            workers=self._views() or [self._ready[0].view()],
            here_load=load,
            here_under_way=under_way * load if under_way else 0.0,
            turn=self._ahead.turn(self._ahead.place(routing.layer, False)),
            here_costs_later=self._costs_later(),
        )

    def guess(self, predictions: Iterable[Prediction]) -> Iterable[Prediction]:
        """Send predicted experts to workers that have free slots for them. Return the predictions that the coordinator
        should load itself."""
        if not self._ready:
            return predictions
        named = list(predictions)
        self._ahead.expect({self._ahead.place(each.layer, each.is_next): _own(each) for each in named})
        found = [] if self._rule.method == "round-robin" else [self._left(each) for each in named if not each.is_next]
        return [here for here in found if here.experts]

    def _left(self, named: Prediction) -> Prediction:
        """Return the prediction reduced to the experts that the coordinator should load itself."""
        here = self._ahead.here(named.layer)
        return named._replace(experts=[expert for expert in named.experts if expert in named.low or expert in here])

    def expect(self, position: int, named: Prediction) -> None:
        """Send the experts of one prediction to workers at once, as `guess` does. Any thread may call this."""
        self._ahead.expect({TokenLayer(position, named.layer): _own(named)})

    def withdraw(self, position: int) -> None:
        """Drop predictions for this position and for later positions, because the text has changed from there on. Any
        thread may call this."""
        self._ahead.withdraw(position)

    def _is_waiting(self, workers: int) -> bool:
        return len(self._here_now()) < workers or self._seat.may_come

    def _fetch(self, unit: int, keys: list[ExpertKey]) -> None:
        self.link.fetch(unit, keys)

    def _views(self) -> list[WorkerView]:
        """Return, for each available worker in the order of the names, the numbers from which plans are made."""
        return [member.view() for member in self._ready if member.is_here]

    def _seconds_here(self) -> float:
        return inf if self._rule.method == "round-robin" else self._here.load()

    def _costs_later(self) -> float:
        """Return how many seconds a load on the coordinator costs in addition to its duration. An expert that is used
        again saves a later load, and workers use their experts again more or less often than the coordinator."""
        uses, loads = sum(member.uses for member in self._ready), [each.load for each in self._ready if each.load]
        if not uses or not loads:
            return 0.0
        share = max(0.0, 1.0 - sum(member.brought for member in self._ready) / uses)
        return (share - self._here.retained()) * sum(loads) / len(loads)

    def _is_out(self, unit: int) -> bool:
        member = self.link.members.get(unit)
        return member is None or member.state is WorkerState.OUT

    def _here_now(self) -> list[Member]:
        return sorted((member for member in self.members if member.is_here), key=lambda member: member.name)

    # -- for the link's thread ----------------------------------------------------------------------------------------

    def may_connect(self, key: str) -> bool:
        """Return whether a machine with this key may connect."""
        return self._admission.may_connect(key)

    def tick(self) -> None:
        """Store the members' state in the cluster's folder, for `smoe cluster status`."""
        with suppress(OSError):
            keep_status(self.coordinator.name, self.described(), self.draft)

    def answered(self, member: Member, keys: Iterable[ExpertKey]) -> None:
        """Record that a worker has computed these experts, so that their slots can be used for predicted experts."""
        self._ahead.answered(member.unit, keys)

    def greeted(self, key: str, fields: dict[str, Any]) -> Member | str | None:
        """Process a worker's HELLO message. Return the new member, or the reason why the worker is refused. None if
        this is not known yet."""
        name, slots = fields.get("name"), fields.get("slots")
        if not isinstance(name, str) or not is_name(name) or type(slots) is not int or slots < 1:
            return "its first message is incomplete"
        why = self._unfit(fields) or self._admission.admitted(key, fields)
        if why:
            return why
        most_rows = inf
        if fields.get("torch") is False:
            found = self._without_torch()
            if not isinstance(found, LightWorker):
                return found
            most_rows = found.most_rows
        self._admission.note_role(key, is_draft=False)
        self._unit += 1
        return Member(self._unit - 1, self._admission.name_of(key) or name, key, b"", slots, most_rows=most_rows)

    def welcome(self, member: Member) -> dict[str, Any]:
        """Return the content of a new worker's WELCOME message: the kernels for few rows, and the largest number of
        rows of a request."""
        found = None if member.most_rows == inf else self._describer.found
        arithmetic = self._arithmetic if found is None else found.arithmetic
        return {"arithmetic": arithmetic, "rows": self._rows.most}

    def _unfit(self, fields: dict[str, Any]) -> str:
        """Return a sentence that says how a worker's model or version differs from the coordinator's; an empty text if
        they are equal."""
        for what, mine in {"smoe": __version__, **self._asked}.items():
            if fields.get(what) != mine:
                return f"its {what} is {str(fields.get(what))[:80]!r}, the coordinator has {mine!r}"
        return ""

    def describe(self, key: str, fields: dict[str, Any]) -> list[Any]:
        """Return the reply to a worker without torch that requests a description of the experts. Empty: the worker must
        ask again later."""
        why = self._unfit(fields) or self._admission.admitted(key, fields)
        found = why or self._without_torch()
        if isinstance(found, str):
            return frames.talk(FrameKind.REFUSED, {"why": found})
        return [] if found is None else self._describer.parts

    def _without_torch(self) -> LightWorker | str | None:
        """Return the description and limits for workers without torch, or the reason why such workers cannot be used.
        None if this is not known yet."""
        self._describer.begin()
        return self._describer.found or self._describer.why or None

    def proof(self, member: Member) -> Sequence[Proof]:
        """Return the proofs for a member: requests whose correct results are known. All members get the same proofs,
        except that a proof with more rows than the member computes is left out."""
        return [each for each in self._proofs if each.hidden.shape[0] <= member.most_rows]

    def doubt(self, member: Member, why: str) -> None:
        """Exclude a member permanently, and warn the user."""
        self._admission.exclude(member.key)
        done = member.done
        self.doubts.append(
            f"worker {member.name} {why}, and is no longer admitted. It computed {done.experts} experts, of which "
            f"{done.checked} were recomputed here: text generated with it may be wrong, so generate it again. Find "
            "the cause (another program on that machine, its memory, its owner) before you invite it again (smoe "
            "cluster invite)"
        )
        _log.error("%s", self.doubts[-1])

    def _make_proofs(self) -> Iterator[Proof]:
        """Yield the proofs for new workers: the first and the last expert of one layer of every kind, with few and with
        many rows, and the results that the coordinator itself has computed."""
        of_kind = {math.kind: layer for layer, math in reversed(list(self._alone.math.items()))}
        generator = torch.Generator().manual_seed(0)
        for layer in of_kind.values():
            last = self._alone.store.layers[layer].experts - 1
            for rows in _PROOF_ROWS:
                hidden = torch.randn(rows, self._alone.math[layer].hidden, generator=generator).to(self._rows.dtype)
                wanted = [ExpertTask((layer, expert, EXACT), range(rows)) for expert in sorted({0, last})]
                results = self._alone.experts.submit(wanted, Fetched(hidden))
                yield Proof(wanted, hidden, torch.cat([result.result() for result in results]))


class RemoteUnit:
    """One worker, as a `ComputeUnit` of the engine."""

    def __init__(self, unit: int, link: ClusterLink) -> None:
        self.busy_seconds = 0.0
        """Always 0, because the worker's time is not this machine's."""
        self._unit = unit
        self._link = link
        self._under_way: set[Future[torch.Tensor]] = set()

    def submit(self, wanted: Sequence[ExpertTask], hidden: Fetched) -> list[Future[torch.Tensor]]:
        """Send a request to the worker. If the worker fails, other workers get the request, and the coordinator
        last."""
        futures = self._link.submit(self._unit, wanted, hidden)
        self._under_way.update(futures)
        for future in futures:
            future.add_done_callback(self._under_way.discard)
        return futures

    def measured(self) -> Iterator[tuple[float, int]]:
        """Return no measurements: the times of each worker are in its record (`Member`)."""
        return iter(())

    def drain(self) -> None:
        """Drop the requests in flight, and later their results."""
        self._link.forget(list(self._under_way))

    def reset(self) -> None:
        """Drop the requests in flight."""
        self.drain()

    def close(self) -> None:
        """Drop the requests in flight; the connections belong to the cluster."""
        self.drain()


def _own(named: Prediction) -> list[int]:
    """Return the predicted experts except those predicted as low-precision copies, which only the coordinator has."""
    return [expert for expert in named.experts if expert not in named.low]


def _described(member: Member) -> dict[str, Any]:
    return {
        "name": member.name,
        "state": member.state.value,
        "why": member.why,
        "slots": member.slots,
        "experts_computed": member.done.experts,
        "experts_recomputed": member.done.checked,
        "requests": member.done.requests,
        "deadlines_missed": member.done.missed,
        "seconds_per_load": member.load,
        "seconds_per_expert": member.expert,
        "seconds_there_and_back": member.hop,
    }


def _compute_by(alone: ExpertsAlone, arithmetic: str) -> None:
    """Let the coordinator's own experts be computed with the kernels `arithmetic`. Raise `ClusterError` if they cannot
    be."""
    if not alone.compute_by(arithmetic):
        raise ClusterError(
            f"the coordinator's own experts cannot be computed by `kernels={arithmetic}`; this is a bug in smoe, "
            "please report it"
        )
