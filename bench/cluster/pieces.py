"""What a forecast is made of, measured apart: main's part of a layer, a worker's load, expert and way, a link's hops.

On clusters of one worker, with nothing between the machines, decoding another part of the text than the cells do; links
by messages that are echoed. Of what is foretold nothing goes into a forecast.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bench.cluster.hops import hop_seconds
from bench.cluster.network import LINKS, Network
from smoe.simulator.cluster_forecast import MeasuredCoordinator, MeasuredWorker, Port

UNSHAPED = "unshaped"
MOST_MACHINES = 8
"""That a hop is measured to; the other is to one."""
_SMALL = 64
"""Bytes of a message that is nearly none."""


@dataclass(frozen=True)
class Hops:
    """Of one link: there and back, seconds."""

    one: float
    most: float
    """To all of `MOST_MACHINES` at once."""

    @property
    def message(self) -> float:
        """For which main sends, or takes in, one more."""
        return max(0.0, (self.most - self.one) / (MOST_MACHINES - 1))


@dataclass(frozen=True)
class Pieces:
    """Seconds."""

    layer: float
    """Main's part: from an answer until the next layer's rows are being sent."""
    expert: float
    """At a worker, handing it from thread to thread included."""
    way: float
    """All else between being sent and coming back, to one worker with nothing between."""
    load: float
    """At a worker."""
    own_load: float
    """At main."""
    draft_layer: float = 0.0
    """Beside main, where a draft runs there."""

    @classmethod
    def of(
        cls, resident: Mapping[str, Any], loading: Mapping[str, Any], alone: Mapping[str, Any], layers: int
    ) -> Pieces:
        """`resident`: what `decode` has found of one worker with all experts, perhaps with a draft on main that has
        nothing to do with it, `loading`: of one with few of them, `alone`: of main without any."""
        waits, (loader,) = resident["waits"], loading["workers"]
        there, between = waits["loads there"] + waits["computing there"], waits["between"]
        token = sum(resident["seconds"]) / len(resident["seconds"])
        expert, layer = there / resident["at_workers"], (token - there - between) / layers
        load, own_load = loader["seconds_per_load"], alone["seconds_per_own_load"]
        return cls(layer, expert, between / layers, load, own_load, resident["seconds_per_draft_layer"] or 0.0)


def hops(link: str, tokens: int = 20) -> Hops:
    """Measure a link of `LINKS`."""
    with Network(MOST_MACHINES + 1, LINKS[link]) as network:
        one, most = (hop_seconds(network, count, _SMALL, tokens) for count in (1, MOST_MACHINES))
    return Hops(one, most)


def main_of(pieces: Pieces, hops: Hops, slots: int) -> MeasuredCoordinator:
    """As a forecast takes it."""
    return MeasuredCoordinator(pieces.layer, hops.message, pieces.own_load, pieces.expert, slots)


def worker_of(pieces: Pieces, hops: Hops, unshaped: Hops, slots: int, loads: bool) -> MeasuredWorker:
    """The same behind another link; `loads`: whether any are to be made."""
    way = pieces.way + hops.one - unshaped.one - 2 * hops.message
    return MeasuredWorker(pieces.load if loads else 0.0, pieces.expert, max(0.0, way), slots)


def port_of(link: str, row_bytes: int) -> Port:
    """Of a link of `LINKS`."""
    return Port(LINKS[link].bits_per_second / 8, row_bytes)
