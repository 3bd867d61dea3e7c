"""The cluster as the engine sees it: units that compute experts elsewhere, and who of them gets what.

Membership changes between forward passes: who has proven itself is planned with from the next one on. Who fails within
one is stood in for by the link.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from math import inf
from typing import Any

import torch

from smoe import __version__
from smoe.cluster.address import to_listen_at
from smoe.cluster.admission import Admission
from smoe.cluster.frames import Rows
from smoe.cluster.identity import Main, is_name, keep_main, keep_status, read_main
from smoe.cluster.link import Link
from smoe.cluster.members import Member, State
from smoe.cluster.requests import Proof
from smoe.cluster.sending import Courier
from smoe.cluster.told import Told
from smoe.compute.experts_alone import ExpertsAlone
from smoe.compute.unit import ComputeUnit, Wanted
from smoe.errors import ClusterError
from smoe.expert import EXACT, ExpertKey
from smoe.memory.streams import Fetched
from smoe.policy.placement import Placement, WorkerView, by_turns
from smoe.policy.plan import DEVICE, FIRST_WORKER, Serve
from smoe.policy.prediction import Prediction
from smoe.routing import Routing

_PROOF_ROWS = (1, 2, 3, 5, 8, 9, 33, 300)
"""Where kernels, or what they share out over threads, may change from one machine to another."""

_log = logging.getLogger(__name__)


class Cluster(Admission):
    """Main's workers: `Sharer` for the executor, `Doorkeeper` for the link. `close` lets them go."""

    def __init__(
        self,
        main: Main,
        alone: ExpertsAlone,
        rows: Rows,
        asked: dict[str, Any],
        method: str,
        order: str,
        here_load: Callable[[], float],
        is_at_hand: Callable[[ExpertKey], bool],
        here_room: int = 1,
        spares: int = 0,
        verify: float = 0.0,
    ) -> None:
        """`alone`: the experts in main's own hands, for proofs and for when nobody is left; `rows`: what is sent;
        `asked`: what a worker must have said of its model; `here_load`: seconds to load one expert here; `is_at_hand`:
        whether main has it, or is loading it; `here_room`: experts that main can bring in ahead; `spares`: experts that
        predictions name beside as many as a layer chooses; `verify`: the share of what workers return that is
        recomputed here. `method` is one of `PLACEMENT`, `order` one of `BALANCE_ORDER`. Raises `ClusterError` where the
        address is taken."""
        super().__init__(main)
        self.units: dict[int, ComputeUnit] = {}
        """By the number in plans."""
        self._alone = alone
        self._asked = asked
        self._method, self._order = method, order
        self._here_load = here_load
        self._last_here_load = inf
        """As planned with, for the link's thread."""
        self._spares = spares
        self.is_at_hand = is_at_hand
        self._here_room = here_room
        self._told = Told()
        self._verify = verify
        self.doubts: list[str] = []
        """Why what was computed so far may be wrong, in words for the user; empty: nothing speaks against it."""
        self._arithmetic = "torch"
        self._layers = {layer: turn for turn, layer in enumerate(sorted(alone.store.layers))}
        self._proofs = list[Proof]()
        self._ready: list[Member] = []
        most = max(rows.most, 2 * max(_PROOF_ROWS))  # of two experts at once
        self._rows = rows._replace(most=most).fitting
        self._unit = FIRST_WORKER
        self._is_closed = False
        self.link: Link | None = None
        self.courier: Courier | None = None
        """Sends workers the files that they have not got; None where they must have them."""

    def open(self, arithmetic: str) -> None:
        """Let workers in, which are to compute by this one of `KERNELS`, as main does."""
        self._arithmetic = arithmetic
        if not self._alone.compute_by(arithmetic):
            raise ClusterError(f"main's own experts cannot be computed by `kernels` {arithmetic}; please report this")
        self._proofs = list(self._make_proofs())
        keys, rescue = self.main.keys, self._alone.experts
        at = to_listen_at(self.main.address, self.main.everywhere)
        self.link = Link(at, keys.public, keys.secret, self, rescue, self._rows, self._rescue_load, self._verify)
        if self.courier is not None:
            self.courier.begin(self.link.wake)
            self.link.courier = self.courier

    def wait(self, workers: int, seconds: float) -> list[Member]:
        """The workers that are ready, once there are so many, or the time is up."""
        assert self.link is not None
        until = time.monotonic() + seconds
        with self.link.changed:
            while len(self._here()) < workers and (left := until - time.monotonic()) > 0:
                self.link.changed.wait(left)
        self.begin_pass()
        return list(self._ready)

    @property
    def members(self) -> list[Member]:
        """All that ever came."""
        return [] if self.link is None else list(self.link.members.values())

    def described(self) -> list[dict[str, Any]]:
        """Of every worker what people and programs want to know; times in seconds."""
        return [_described(member) for member in self.members]

    def close(self) -> None:
        """Say good-bye to the workers and give back what main kept for itself. Idempotent."""
        link, self.link = self.link, None
        if link is not None:
            link.close()
            with suppress(OSError):
                keep_status(self.main.name, [_described(each) for each in link.members.values()], is_over=True)
        if self.courier is not None:
            self.courier.close()
        if not self._is_closed:
            self._is_closed = True
            self._alone.close()

    # -- for the executor ---------------------------------------------------------------------------------------------

    def begin_pass(self) -> None:
        """Plan with those who are ready now."""
        self._ready = self._here()
        self._told.begin_token()
        for unit in [unit for unit in self.units if unit >= FIRST_WORKER and self._is_out(unit)]:
            del self.units[unit]
        for member in self._ready:
            if member.unit not in self.units:
                assert self.link is not None
                self.units[member.unit] = RemoteUnit(member.unit, self.link)

    def balance(self, routing: Routing, under_way: float) -> Placement | None:
        """For one layer, with so many loads under way here; None where nobody is there."""
        self._told.ask(routing.layer)
        if not self._ready:
            return None
        load = self._last_here_load = inf if self._method == "round-robin" else self._here_load()
        views = [member.view() for member in self._ready if member.is_here] or [self._ready[0].view()]
        turn = self._layers[routing.layer]
        waits = under_way * load if under_way else 0.0
        return Placement(self._method, self._order, views, load, waits, turn)

    def guess(self, predictions: Iterable[Prediction]) -> Iterable[Prediction]:
        """Workers are told of what they will be asked for, as far as they have room for it; main brings in what it is
        to load itself, of the nearest layers."""
        if not self._ready:
            return predictions
        return [here for named in predictions if (here := self._tell(named)).experts]

    def _tell(self, named: Prediction) -> Prediction:
        """Tell workers of one layer's experts; returns what is left for main."""
        assert self.link is not None
        views = [member.view() for member in self._ready]
        slots = {member.unit: member.slots for member in self._ready}
        size, turn = len(named.experts) - self._spares, self._layers[named.layer]
        if self._method == "round-robin":
            keys: list[ExpertKey] = [(named.layer, expert, EXACT) for expert in named.experts]
            units, here = by_turns(keys, size, turn, views), list[int]()
            fresh = set(self._told.new(named.layer, named.is_next, named.experts))
            units = {key: unit for key, unit in units.items() if key in fresh}
        else:
            missing = [
                key
                for key in self._told.new(named.layer, named.is_next, named.experts)
                if key[1] not in named.low and not self.is_at_hand(key) and not any(key in view.holds for view in views)
            ]
            units = self._by_finish(missing, named.is_next, views, turn)
            mine = {key: DEVICE for key in missing if key not in units}
            self._told.tell(named.is_next, mine, {DEVICE: len(mine) + self._here_room})
            here = [expert for expert in named.experts if expert in named.low]
            here += [] if named.is_next else self._told.given(DEVICE, named.layer, False)
        for unit, told in self._told.tell(named.is_next, units, slots).items():
            self.link.fetch(unit, told)
        return named._replace(experts=here)

    def _by_finish(
        self, missing: Sequence[ExpertKey], is_next: bool, views: Sequence[WorkerView], turn: int
    ) -> dict[ExpertKey, int]:
        """Who is to bring in what a later layer will miss, but for what main is to: each behind what it has been told
        of already. Main looks no further than this token, and has as many slots as its prefetches."""
        busy = [view._replace(hop=view.hop + view.load * self._told.outstanding(view.unit)) for view in views]
        waiting, units = self._told.outstanding(DEVICE), dict[ExpertKey, int]()
        for key in missing:
            load = inf if is_next or waiting >= self._here_room else self._here_load()
            behind = waiting * load if waiting else 0.0
            placed = Placement(self._method, self._order, busy, load, behind, turn).units([Serve(key, (0,), True)])
            units |= placed
            waiting += key not in placed
            busy = [view._replace(hop=view.hop + view.load * (placed.get(key) == view.unit)) for view in busy]
        return units

    def _is_out(self, unit: int) -> bool:
        member = None if self.link is None else self.link.members.get(unit)
        return member is None or member.state is State.OUT

    def _here(self) -> list[Member]:
        return sorted((member for member in self.members if member.is_here), key=lambda member: member.name)

    # -- for the link's thread ----------------------------------------------------------------------------------------

    def _rescue_load(self) -> float:
        return self._last_here_load

    def tick(self) -> None:
        """Say in the cluster's folder who is there, for `smoe cluster status`."""
        with suppress(OSError):
            keep_status(self.main.name, self.described())

    def knocked(self, key: str, said: dict[str, Any]) -> Member | str:
        """A new member that is to be proven, or why it is refused."""
        name, slots = said.get("name"), said.get("slots")
        if not isinstance(name, str) or not is_name(name) or type(slots) is not int or slots < 1:
            return "its greeting is not whole"
        for what, mine in {"smoe": __version__, **self._asked}.items():
            if said.get(what) != mine:
                return f"its {what} is {str(said.get(what))[:80]!r}, main has {mine!r}"
        why = self.admitted(key, said)
        if why:
            return why
        self._unit += 1
        return Member(self._unit - 1, self.name_of(key) or name, key, b"", slots)

    def welcome(self) -> dict[str, Any]:
        """What computes few rows, and how many come at most."""
        return {"arithmetic": self._arithmetic, "rows": self._rows.most}

    def proof(self, member: Member) -> Sequence[Proof]:
        """The same for all."""
        del member
        return self._proofs

    def doubt(self, member: Member, why: str) -> None:
        """It is let in no longer, and the user is told."""
        with self._lock:
            with suppress(ClusterError):
                self.main = replace(read_main(self.main.name), address=self.main.address)
            self.main = self.main.without_worker(member.key)
            with suppress(OSError):
                keep_main(self.main)
        self.doubts.append(
            f"worker {member.name} {why}, and is let in no longer. Of {member.experts} experts that it has computed "
            f"{member.checked} had been recomputed here: what was written while it was there may be wrong, so have it "
            "written again. Find out why (another program on it, its memory, its owner) before you invite it anew "
            "(smoe cluster invite)"
        )
        _log.error("%s", self.doubts[-1])

    def _make_proofs(self) -> Iterator[Proof]:
        """An expert of every kind, with few rows and with many, as main computes it itself."""
        of_kind = {math.kind: layer for layer, math in reversed(list(self._alone.math.items()))}
        generator = torch.Generator().manual_seed(0)
        for layer in of_kind.values():
            last = self._alone.store.layers[layer].experts - 1
            for rows in _PROOF_ROWS:
                hidden = torch.randn(rows, self._alone.math[layer].hidden, generator=generator).to(self._rows.dtype)
                wanted = [Wanted((layer, expert, EXACT), range(rows)) for expert in sorted({0, last})]
                results = self._alone.experts.submit(wanted, Fetched(hidden))
                yield Proof(wanted, hidden, torch.cat([result.result() for result in results]))


class RemoteUnit:
    """One worker as a `ComputeUnit`."""

    def __init__(self, unit: int, link: Link) -> None:
        self.busy_seconds = 0.0
        """Not counted: the time is another machine's."""
        self._unit = unit
        self._link = link
        self._under_way: set[Future[torch.Tensor]] = set()

    def submit(self, wanted: Sequence[Wanted], hidden: Fetched) -> list[Future[torch.Tensor]]:
        """Ask the worker; where it fails others are asked, main itself last."""
        futures = self._link.submit(self._unit, wanted, hidden)
        self._under_way.update(futures)
        for future in futures:
            future.add_done_callback(self._under_way.discard)
        return futures

    def measured(self) -> Iterator[tuple[float, int]]:
        """Nothing: members keep their own times."""
        return iter(())

    def drain(self) -> None:
        """Nobody waits for what is under way any more; what comes of it is dropped."""
        self._link.forget(list(self._under_way))

    def start_anew(self) -> None:
        """As `drain`."""
        self.drain()

    def close(self) -> None:
        """As `drain`: the connections are the cluster's."""
        self.drain()


def _described(member: Member) -> dict[str, Any]:
    return {
        "name": member.name,
        "state": member.state.value,
        "why": member.why,
        "slots": member.slots,
        "experts_computed": member.experts,
        "experts_recomputed": member.checked,
        "requests": member.requests,
        "deadlines_missed": member.missed,
        "seconds_per_load": member.load,
        "seconds_per_expert": member.expert,
        "seconds_there_and_back": member.hop,
    }
