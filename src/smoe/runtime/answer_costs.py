"""Measures what each resolution of a miss costs at present, in seconds: to load the full or the low-precision copy of
the expert, or to compute the expert on the CPU of a machine with a device.

A load costs the copy's bytes times the seconds per byte of recent loads. Loads are disk reads or, on a device with
memory of its own, copies over the link to it, such as PCIe. If a CPU computes experts in parallel with the device, the
measurements of the balancer, which divides the experts between the two, are used for loads and for the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from smoe.compute.host_experts import Balancer
from smoe.expert import EXACT, LOW
from smoe.memory.link import Link
from smoe.memory.reading_threads import Transfers
from smoe.policy.answering import Answered, Answering
from smoe.policy.answers import AnswerCosts
from smoe.policy.residency import SlotTable
from smoe.routing import Routing

FIRST_BYTES_PER_SECOND = 1e9
"""The assumed read rate until something has been read."""
_RECENT = 0.1
"""The weight of the last measurement in a decaying mean."""


class LoadRate:
    """A decaying mean of the seconds per byte of recent loads."""

    def __init__(self, transfers: Transfers, link: Link | None) -> None:
        self._transfers = transfers
        self._link = link
        self._seconds_per_byte = 1.0 / FIRST_BYTES_PER_SECOND
        self._bytes, self._busy = transfers.bytes_read, transfers.busy_seconds
        if link is None and self._bytes and self._busy:  # from the loads of the tests at start
            self._seconds_per_byte = self._busy / self._bytes

    def seconds_per_byte(self) -> float:
        """Return the decaying mean after adding the loads that have ended since the last call."""
        for seconds, nbytes in self._measured():
            self._seconds_per_byte += _RECENT * (seconds / nbytes - self._seconds_per_byte)
        return self._seconds_per_byte

    def _measured(self) -> Iterator[tuple[float, int]]:
        """Yield (seconds, bytes) of the loads that have ended since the last call."""
        if self._link is not None:
            yield from self._link.measured()
            return
        transfers = self._transfers
        nbytes, busy = transfers.bytes_read - self._bytes, transfers.busy_seconds - self._busy
        if nbytes < 0 or (nbytes > 0 and busy > 0):  # below 0: the counters were reset
            self._bytes, self._busy = transfers.bytes_read, transfers.busy_seconds
            if nbytes > 0:
                yield busy, nbytes


class Answerer:
    """Chooses how the misses of each decode step are resolved (load, compute, replace or drop an expert), from the
    currently measured costs."""

    def __init__(
        self,
        make: Callable[[], Answering],
        slot_bytes: Mapping[int, Mapping[int, int]],
        loads: LoadRate,
        balancer: Balancer | None,
    ) -> None:
        """`make`: a function that returns an `Answering` whose quality budget is unspent. `slot_bytes`: the bytes of
        one slot, by format and then by layer. `balancer`: measures loads and the CPU; None if no CPU computes in
        parallel with a device."""
        self._make = make
        self._slot_bytes = slot_bytes
        self._loads = loads
        self._balancer = balancer
        self.answering = make()

    def reset(self) -> None:
        self.answering = self._make()

    def answer(self, routing: Routing, table: SlotTable, running: float) -> Answered:
        """Return the resolution of each of one layer's misses. `running`: the number of loads in flight for which a new
        load would wait."""
        return self.answering.answer(routing, table, self._costs(routing.layer, running))

    def _costs(self, layer: int, running: float) -> AnswerCosts:
        own = self._slot_bytes[EXACT][layer]
        low = self._slot_bytes[LOW][layer] / own if LOW in self._slot_bytes else None
        if self._balancer is None:
            high, host = own * self._loads.seconds_per_byte(), None
        else:
            costs = self._balancer.costs(running)
            high, host = costs.load, costs.host
        return AnswerCosts(high, None if low is None else low * high, host, running * high)
