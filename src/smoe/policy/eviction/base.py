"""The contract that every eviction policy keeps and `tests/policy/contract.py` checks.

A policy hears three things, in the order in which they happen, and answers two questions.

* `insert(copy)`, `remove(copy)`: a copy became or ceased to be a cache resident. Never twice in a row. `residents()`
  are those that came and did not leave.
* `observe(routing)`: the router of a layer has spoken. Called once for each layer and step, before the plan is
  carried out, whether or not the experts are resident. The only place where statistics change.
* `worth(copy)`: how much a copy will be missed, resident or not, for a prefill that asks whether what passes through
  should stay. Pure, and in agreement with `victims`, which begins with the residents of least worth. A policy that
  knows nothing of copies that are not resident leaves it at 0 for all: then nothing is replaced.
* `victims(count, shield)`: which `count` residents to forget, best first. Pure: asking changes nothing. All or
  nothing is not required: fewer come back only when fewer residents lie outside the shield. Nothing in the shield
  is ever returned, nothing twice. Ties break by (layer, expert).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container

from smoe.expert import ExpertKey
from smoe.routing import Routing


class Eviction(ABC):
    """Ranks the cache residents of one device by how little they will be missed."""

    name: str

    @property
    def rule(self) -> str:
        """What ranks the residents at present, for the reader."""
        return self.name

    @abstractmethod
    def insert(self, key: ExpertKey) -> None:
        """`key` is a cache resident from now on."""

    @abstractmethod
    def remove(self, key: ExpertKey) -> None:
        """`key` is no longer a cache resident."""

    @abstractmethod
    def residents(self) -> set[ExpertKey]:
        """What was inserted and not removed; after an interrupt the slot table may know better."""

    @abstractmethod
    def observe(self, routing: Routing) -> None:
        """Learn from the routing of one layer in one step."""

    @abstractmethod
    def victims(self, count: int, shield: Container[ExpertKey]) -> list[ExpertKey]:
        """At most `count` residents outside `shield`, least valuable first."""

    def of(self, form: int) -> Eviction:
        """What ranks the copies of one format, where those of others lie in slots of their own."""
        del form
        return self

    def of_layer(self, layer: int) -> Eviction:
        """What ranks the copies of a layer's experts, where those of others lie in slots of another size."""
        del layer
        return self

    def worth(self, key: ExpertKey) -> float:
        """How much `key` will be missed, whether or not it is resident; only the order counts."""
        return 0.0


def used_copies(routing: Routing, precision: int = 0) -> list[ExpertKey]:
    """The copies that one step of one layer uses, ascending, padding left out."""
    layer, experts = routing.layer, routing.experts
    used = {expert for row in routing.top_k_index for expert in row if expert != experts}
    return [(layer, expert, precision) for expert in sorted(used)]
