"""A Ray of one process: actors are objects whose methods run on threads, and whose process can be made to die.

What goes to an actor and comes from it is pickled, as with Ray. Every call of it is counted, and what passed is kept.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, InvalidStateError, ThreadPoolExecutor, wait
from contextlib import suppress
from types import ModuleType
from typing import Any

import pytest


class RayError(Exception):
    """Of everything that Ray raises."""


class RayActorError(RayError):
    """The actor's process has died."""


class ActorDiedError(RayActorError):
    """For ever."""


class RayTaskError(RayError):
    """The actor raised something."""


class Actor:
    """A handle, and the object itself: `one`."""

    def __init__(self, ray: StandIn, kind: type, arguments: Sequence[Any]) -> None:
        self.ray, self.kind = ray, kind
        self.arguments = ray.pickled(arguments)
        self.lives = 0
        self.is_dead = False
        self.open: set[Future[Any]] = set()
        self.live()

    def live(self) -> None:
        self.lives += 1
        self.one = self.kind(*pickle.loads(self.arguments))
        self.threads = ThreadPoolExecutor(2)

    def dies(self, is_for_ever: bool = False) -> None:
        """The process; Ray starts another one at once, or says that it cannot."""
        before, self.open = self.open, set()
        for future in before:
            future.set_exception((ActorDiedError if is_for_ever else RayActorError)("the process died"))
        self.one.end()
        self.live()

    def __getattr__(self, name: str) -> Method:
        return Method(self, name)


class Method:
    """Of an actor."""

    def __init__(self, actor: Actor, name: str) -> None:
        self.actor, self.name = actor, name

    def options(self, **_: Any) -> Method:
        return self

    def remote(self, *arguments: Any) -> Future[Any]:
        actor = self.actor
        actor.ray.calls += 1
        future: Future[Any] = Future()
        actor.open.add(future)
        method, given = getattr(actor.one, self.name), pickle.loads(actor.ray.pickled(arguments))

        def run() -> None:
            with suppress(InvalidStateError):  # the process has died meanwhile
                try:
                    future.set_result(pickle.loads(actor.ray.pickled(method(*given))))
                except InvalidStateError:
                    raise
                except Exception as error:
                    future.set_exception(RayTaskError(f"traceback\n{type(error).__name__}: {error}"))
            actor.open.discard(future)

        actor.threads.submit(run)
        return future


class Kind:
    """What `ray.remote` makes of a class."""

    def __init__(self, ray: StandIn, kind: type) -> None:
        self.ray, self.kind = ray, kind

    def options(self, **given: Any) -> Kind:
        self.ray.asked.append(given)
        return self

    def remote(self, *arguments: Any) -> Actor:
        self.ray.calls += 1
        self.ray.actors.append(Actor(self.ray, self.kind, arguments))
        return self.ray.actors[-1]


class Group:
    """Places, all of which there are if there are CPUs enough."""

    def __init__(self, ray: StandIn, bundles: Sequence[Any], strategy: str) -> None:
        self.ray, self.bundles, self.strategy = ray, bundles, strategy

    def wait(self, timeout_seconds: float) -> bool:
        return len(self.bundles) <= self.ray.available_resources()["CPU"]


class StandIn(ModuleType):
    """The module `ray`."""

    def __init__(self, nodes: Sequence[str] = ("10.0.0.1",), cpus: int = 4) -> None:
        super().__init__("ray")
        self.addresses, self.cpus = nodes, cpus
        self.calls = 0
        self.passed: list[bytes] = []
        """All that went through Ray, pickled."""
        self.asked: list[dict[str, Any]] = []
        self.actors: list[Actor] = []
        self.joined: dict[str, Any] | None = None
        self.groups: list[Group] = []
        self.exceptions = ModuleType("ray.exceptions")
        self.exceptions.__dict__.update(
            RayError=RayError, RayActorError=RayActorError, ActorDiedError=ActorDiedError, RayTaskError=RayTaskError
        )
        self.util = ModuleType("ray.util")
        self.util.__dict__.update(
            get_node_ip_address=lambda: "10.0.0.1",
            placement_group=self.group,
            remove_placement_group=self.groups.remove,
        )

    def installed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        strategies = ModuleType("ray.util.scheduling_strategies")
        strategies.__dict__["PlacementGroupSchedulingStrategy"] = lambda group, placement_group_bundle_index: group
        modules = (self, self.exceptions, self.util, strategies)
        for module in modules:
            monkeypatch.setitem(sys.modules, module.__name__, module)

    def pickled(self, value: Any) -> bytes:
        self.passed.append(pickle.dumps(value))
        return self.passed[-1]

    def group(self, bundles: Sequence[Any], strategy: str) -> Group:
        self.groups.append(Group(self, bundles, strategy))
        return self.groups[-1]

    def init(self, **given: Any) -> None:
        self.calls += 1
        self.joined = given

    def shutdown(self) -> None:
        self.joined = None

    def nodes(self) -> list[dict[str, Any]]:
        return [{"Alive": True, "NodeManagerAddress": each, "Resources": {"CPU": self.cpus}} for each in self.addresses]

    def available_resources(self) -> dict[str, float]:
        return {"CPU": float(self.cpus * len(self.addresses))}

    def remote(self, kind: type) -> Kind:
        return Kind(self, kind)

    def get(self, future: Future[Any]) -> Any:
        self.calls += 1
        return future.result(30)

    def wait(self, futures: Sequence[Future[Any]], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        self.calls += 1
        until = FIRST_COMPLETED if num_returns == 1 else "ALL_COMPLETED"
        done, others = wait(futures, timeout, until)
        return list(done), list(others)

    def kill(self, actor: Actor, no_restart: bool) -> None:
        self.calls += 1
        assert no_restart
        actor.is_dead = True
        actor.one.end()
        actor.threads.shutdown()
