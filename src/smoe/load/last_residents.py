"""Stores which experts were in memory when a run of a model ended, so that the next run loads these first while it
computes no text (`Engine.fill_when_idle`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smoe.errors import EngineStateError
from smoe.runtime.engine import Engine
from smoe.user_cache import StoredValue


@dataclass(frozen=True)
class LastResidents(StoredValue):
    """The experts that were in memory when the last run of a model ended."""

    kind = "residents"

    experts: tuple[tuple[int, int], ...]
    """(layer, expert), with each layer's experts spread over the whole list."""

    @classmethod
    def of_fields(cls, fields: dict[str, Any]) -> LastResidents:
        pairs = (pair.split(":") for pair in str(fields["experts"]).split())
        return cls(tuple((int(layer), int(expert)) for layer, expert in pairs))

    def fields(self) -> dict[str, Any]:
        """Return the experts as one line of text. As a JSON array, each number would take a line."""
        return {"experts": " ".join(f"{layer}:{expert}" for layer, expert in self.experts)}


@contextmanager
def filling_when_idle(place: Path, engine: Engine) -> Iterator[None]:
    """Fill free slots during the `with` block whenever no text is computed: first with the experts that were in memory
    when the last run of the model at `place` ended. Then store those that are in memory, unless all experts fit.
    Experts that were stored before follow them, so that a short run forgets none."""
    stored = LastResidents.stored(place)
    known = () if stored is None else stored.experts
    engine.fill_when_idle(known)
    try:
        yield
    finally:
        if engine.is_on_this_cpu and not engine.ledger.holds_all:
            with suppress(OSError, EngineStateError):  # the next run then fills its slots in another order
                LastResidents(tuple(dict.fromkeys([*engine.residents(), *known]))).store(place)
