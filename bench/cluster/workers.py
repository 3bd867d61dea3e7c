"""A cluster's main and workers as users start them, each in a namespace of its own.

Workers join by an invitation (`smoe cluster join LINE MODEL`), and again by the cluster's name after a restart. The
coordinator is machine 0; worker n is machine n.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.cluster.acting import Dials, Times, act, lie_when_told
from bench.cluster.child import Child, ChildError
from bench.cluster.network import Network, address
from smoe import cli
from smoe.cluster.stored_identity import invitation, new_coordinator, read_coordinator, store_coordinator

NAME = "bench"
_CONFIGURATION = "XDG_CONFIG_HOME"
_OWN_CLASSES = ("num_experts", "num_local_experts")


@dataclass(frozen=True)
class Shape:
    """What the benchmark must know of a model beforehand."""

    folder: Path
    layers: int
    experts: int
    """Of a layer."""
    chosen: int
    expert_bytes: int
    row_bytes: int = 0
    """Of a hidden state."""

    @classmethod
    def of(cls, folder: Path) -> Shape:
        """From its config.json: experts of three matrices in as many bytes a number as it says."""
        said = json.loads((folder / "config.json").read_text())
        inner = said.get("moe_intermediate_size", said["intermediate_size"])
        experts = next(said[name] for name in _OWN_CLASSES if name in said)
        each = {"float32": 4}.get(said["dtype"], 2)
        expert_bytes = 3 * each * said["hidden_size"] * inner
        row_bytes = each * said["hidden_size"]
        return cls(folder, said["num_hidden_layers"], experts, said["num_experts_per_tok"], expert_bytes, row_bytes)

    @property
    def all_experts(self) -> int:
        return self.layers * self.experts

    def described(self) -> dict[str, Any]:
        return asdict(self) | {"folder": self.folder.name}


class Workers:
    """The workers of one cluster; a context manager, which ends them."""

    def __init__(
        self,
        network: Network,
        folder: Path,
        shape: Shape,
        times: Times,
        slots: int,
        count: int,
        has_draft: bool = False,
    ) -> None:
        """Each with so many experts in memory; after the last one a draft, as fast as it goes."""
        self._network, self._folder = network, folder
        self._shape, self._times = shape, times
        self._slots = slots
        self._drafts = [count + 1] if has_draft else []
        self.dials = {n: Dials() for n in range(1, count + 1)}
        self.running: dict[int, Child] = {}
        """By the number of the machine."""

    def __enter__(self) -> Workers:
        with _configured(self._folder / "main"):
            store_coordinator(new_coordinator(NAME, address(0)))
        try:
            for n in self.dials:
                self._start(n, self._invite())
            for n in self._drafts:
                self._start_draft(n, self._invite())
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for child in self.running.values():
            child.kill()

    def main(self, work: Callable[[Child], None]) -> Child:
        """A process on the main machine, of whose cluster these are the workers."""

        def begin(child: Child) -> None:
            self._network.enter(0)
            os.environ[_CONFIGURATION] = str(self._folder / "main")
            work(child)

        return Child("main", begin, self._folder / "main.log")

    def hear(self, main: Child, seconds: float) -> Any:
        """What main says; raises `ChildError` with what all of them have printed where it does not."""
        try:
            return main.hear(seconds)
        except ChildError as error:
            said = "\n".join(f"{child}: {child.last_words()}" for child in self.running.values())
            raise ChildError(f"{error}\n{said}") from None

    def restart(self, n: int) -> None:
        """Start a worker again that has ended."""
        self.running[n].kill()
        self._start(n, NAME)

    def _invite(self) -> str:
        with _configured(self._folder / "main"):
            expecting, line = invitation(read_coordinator(NAME))
            store_coordinator(expecting)
        return line

    def _start(self, n: int, invited: str) -> None:
        self.dials[n].reset()

        def as_acted() -> None:
            act(self._times, self.dials[n])
            lie_when_told(self.dials[n])

        self._join(n, f"w{n}", [invited, str(self._shape.folder), "--slots", str(self._slots)], as_acted)

    def _start_draft(self, n: int, invited: str) -> None:
        self._join(n, "draft", [invited, str(self._shape.folder), "--draft"], lambda: None)

    def _join(self, n: int, name: str, given: list[str], prepare: Callable[[], None]) -> None:
        def begin(_: Child) -> None:
            self._network.enter(n)
            os.environ[_CONFIGURATION] = str(self._folder / name)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            prepare()
            sys.argv = ["smoe", "cluster", "join", *given, "--worker", name, "--threads", "1"]
            cli.main()

        self.running[n] = Child(name, begin, self._folder / f"{name}.log")


@contextmanager
def _configured(folder: Path) -> Iterator[None]:
    before = os.environ.get(_CONFIGURATION)
    os.environ[_CONFIGURATION] = str(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ[_CONFIGURATION]
        else:
            os.environ[_CONFIGURATION] = before
