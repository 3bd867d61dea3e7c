"""Rounds in a file, a line each, so that a comparison that was stopped goes on where it was."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.peers.conditions import Ceilings, CpuUse
from bench.peers.neighbour import Neighbour
from bench.peers.rounds import Case, Round
from bench.peers.worker import Measurement


class KeptRounds:
    """The rounds of one comparison: those in the file, and those that are added."""

    def __init__(self, file: Path | None, what: Mapping[str, object]) -> None:
        """`what` is measured, in words and numbers: a file with rounds of something else is refused. None: no file."""
        self._file = file
        self._found: dict[tuple[str, Case, int], Round] = {}
        first = json.dumps(what)
        if file is None:
            return
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(first + "\n", encoding="utf-8")
        head, *lines = whole_lines(file) or ["nothing"]
        if head != first:
            raise SystemExit(f"{file} holds rounds of {head}, not of {first}: name another file, or remove it")
        for line in lines:
            self._remember(round_from(json.loads(line)))

    def get(self, engine: str, case: Case, pair: int) -> Round | None:
        """The round, if it has been measured."""
        return self._found.get((engine, case, pair))

    def add(self, round_: Round) -> None:
        """Keep a round that has just been measured."""
        self._remember(round_)
        if self._file is not None:
            with self._file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(round_)) + "\n")

    def _remember(self, round_: Round) -> None:
        self._found[round_.engine, round_.case, round_.pair] = round_


def whole_lines(file: Path) -> list[str]:
    """The lines of `file`; one that was cut short at its end is removed from it."""
    text = file.read_text(encoding="utf-8")
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        file.write_text(whole, encoding="utf-8")
    return whole.splitlines()


def round_from(stored: Mapping[str, Any]) -> Round:
    """The round that `asdict` made `stored` of."""
    measurement = stored["measurement"]
    return Round(
        **{
            **stored,
            "case": _case_from(stored["case"]),
            "measurement": None if measurement is None else Measurement(**measurement),
            "ceilings": Ceilings(**stored["ceilings"]),
            "cpu": CpuUse(**stored["cpu"]),
        }
    )


def _case_from(stored: Mapping[str, Any]) -> Case:
    """The case that `asdict` made `stored` of. Until 2026-11-30 a neighbour was `true` or `false`."""
    old: dict[object, Neighbour] = {False: "no", True: "yes"}
    return Case(**{**stored, "neighbour": old.get(stored["neighbour"], stored["neighbour"])})
