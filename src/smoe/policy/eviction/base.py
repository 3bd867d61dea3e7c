"""The interface of eviction policies. `tests/policy/contract.py` tests every policy against it.

A policy receives events in the order in which they happen, and answers two queries. A *copy* is an expert in one
format.

* `insert(copy)`, `remove(copy)`: a copy enters or leaves the cache slots. No copy is inserted or removed twice in
  succession. `residents()` are the copies that were inserted and not removed.
* `observe(routing)`: a layer's router has chosen. This is called once for each layer and step, before the plan is
  executed, whether or not the experts are resident. Statistics change only here.
* `worth(copy)`: a number that is higher the sooner or more often a copy will be needed, resident or not. A prefill uses
  it to decide which copies stay. It has no side effects. It agrees with `victims`, which begins with the residents of
  least worth. A policy without information about other copies returns 0 for all; then nothing is replaced.
* `victims(count, shield)`: the `count` residents to evict, least valuable first. It has no side effects. It returns
  fewer only if fewer residents are outside the shield. It returns nothing in the shield, and nothing twice. Ties break
  by (layer, expert).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from smoe.expert import EXACT, ExpertKey
from smoe.policy.eviction.policies import PolicySettings
from smoe.routing import Routing

if TYPE_CHECKING:
    from smoe.policy.eviction.learned import NextUse


@dataclass(frozen=True)
class EvictionSettings(PolicySettings):
    """The settings of `EngineConfig` and the learned parameters that define an eviction policy."""

    name: str
    pools: str = "global"
    next_use: NextUse | None = None
    """The parameters of the policy `learned` for this model; None if they were not trained."""
    future: Iterable[Routing] = ()
    """For a replay: all routings that the policy will observe, in order."""


class Eviction(ABC):
    """An eviction policy: ranks the residents of one device's cache by how soon or how often they will be needed."""

    name: str
    """The name in reports. A class that neither declares nor inherits a name has its class name."""
    needs_scores: ClassVar[bool] = False
    """Whether `observe` needs the router's scores of all experts."""
    is_orderless: ClassVar[bool] = False
    """Whether the ranking depends only on the routers' choices, not on the order of loads."""
    settings: ClassVar[tuple[str, ...]] = ()
    """The names of the fields of `EvictionSettings` that the policy uses, other than `name` and `pools`."""
    learned: ClassVar[str] = ""
    """MODULE:CLASS of the value (`load/learned_file.py`) that must be learned for the model before this is used; empty
    if there is none."""
    only_replayed: ClassVar[str] = ""
    """Why the policy can be used in replays only, as in "needs the future"; empty if it can serve live requests."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if not hasattr(cls, "name"):
            cls.name = cls.__name__

    @classmethod
    def of_settings(cls, settings: EvictionSettings) -> Eviction:
        """Return a new policy with these settings. The constructor gets those that the class names in its attribute
        `settings`, by name."""
        return cls(**{name: getattr(settings, name) for name in cls.settings})

    @property
    def rule(self) -> str:
        """The name of the rule that ranks the residents at present, for reports."""
        return self.name

    @abstractmethod
    def insert(self, key: ExpertKey) -> None:
        """Record that the copy `key` is in a cache slot from now on."""

    @abstractmethod
    def remove(self, key: ExpertKey) -> None:
        """Record that the copy `key` is no longer in a cache slot."""

    @abstractmethod
    def residents(self) -> set[ExpertKey]:
        """Return the copies that were inserted and not removed. After an interrupt they may differ from the slot
        table."""

    @abstractmethod
    def observe(self, routing: Routing) -> None:
        """Update the statistics with the routing of one layer in one step."""

    @abstractmethod
    def victims(self, count: int, shield: Container[ExpertKey]) -> list[ExpertKey]:
        """Return at most `count` residents outside `shield`, least valuable first."""

    def of(self, form: int) -> Eviction:
        """Return the policy for copies of the format `form`, if each format has its own slots."""
        del form
        return self

    def of_layer(self, layer: int) -> Eviction:
        """Return the policy for copies of a layer, if layers have slots of different sizes."""
        del layer
        return self

    def worth(self, key: ExpertKey) -> float:
        """Return a number that is higher the sooner `key` will be needed, resident or not; only the order of the
        numbers matters."""
        return 0.0


def used_copies(routing: Routing) -> list[ExpertKey]:
    """Return the exact copies that one layer uses in one step, ascending. Padding is left out."""
    layer, experts = routing.layer, routing.experts
    used = {expert for row in routing.top_k_index for expert in row if expert != experts}
    return [(layer, expert, EXACT) for expert in sorted(used)]
