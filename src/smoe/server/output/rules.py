"""Grammars of texts that must be a call of a tool, in the format of the model's family.

    start: r_1 | r_3
    r_0: %json {...}
    r_1: <[151657]> "\\n{\\"name\\": \\"warmth\\", \\"arguments\\": " r_0 "}\\n" <[151658]>
    ...

Texts of the format that are tokens of the tokenizer are these tokens, by their numbers.

The parameters of each tool are a schema of their own: a reference within them (`#`, `#/$defs/City`) means what it means
there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from smoe.server.grammar import COMPACT, schema_text
from smoe.server.output.parameters import parameters_of


class Rules:
    """The rules of one grammar, in llguidance's own form."""

    def __init__(self, own: Mapping[str, int]) -> None:
        """`own`: tokens of the tokenizer that stand for texts of the format."""
        self._own = dict(own)
        self._find = re.compile("|".join(map(re.escape, sorted(own, key=len, reverse=True))) or "(?!)")
        self._lines: list[str] = []

    def lark(self, starts: Sequence[str]) -> str:
        """Return the grammar of one of some rules."""
        return "\n".join([f"start: {' | '.join(starts)}", *self._lines]) + "\n"

    def add(self, *parts: str, options: str = "") -> str:
        """Return a rule: its parts one after the other. Returns its name."""
        name = f"r_{len(self._lines)}"
        self._lines.append(f"{name}{options}: {' '.join(part for part in parts if part) or _literal('')}")
        return name

    def any_of(self, parts: Sequence[str]) -> str:
        """Return a rule: one of some parts."""
        return self.add(" | ".join(parts))

    def text(self, text: str) -> str:
        """Return a text, as a part of a rule: tokens of the format by their numbers."""
        parts, place = [], 0
        for found in self._find.finditer(text):
            parts += [_literal(text[place : found.start()])] if found.start() > place else []
            parts.append(f"<[{self._own[found[0]]}]>")
            place = found.end()
        return " ".join(parts + ([_literal(text[place:])] if place < len(text) else []))

    def json(self, schema: Mapping[str, Any]) -> str:
        """Return a rule: JSON of a schema. Raises an `ApiError` for one that is too long."""
        return self.add(f"%json {schema_text({**schema, 'x-guidance': COMPACT}, 'tools')}")

    def parameters(self, function: Mapping[str, Any]) -> str:
        """Return a rule: the arguments of a function as JSON. Raises an `ApiError` where they are no object."""
        return self.json(parameters_of(function))

    def any_text(self, close: str, pattern: str = "(?s:.*)") -> str:
        """Return a rule: any text up to one that closes it, that one included."""
        if self._find.search(close):
            return self.add(f"/{pattern}/", self.text(close))
        return self.add(f"/{pattern}/", options=f"[suffix={_literal(close)}]")

    def in_sequence(self, wanted: Sequence[tuple[str, bool]], separator: str) -> str:
        """Return a rule: parts in their order, each with whether it must be there, and a separator between two.

        Each part has two rules, for what follows where nothing has come before it, and where something has."""
        first, later = _literal(""), _literal("")
        for part, must in reversed(wanted):
            after = self.add(self.text(separator) if separator else "", part, later)
            begin = self.add(part, later)
            first, later = (begin, after) if must else (self.any_of([begin, first]), self.any_of([after, later]))
        return first


def _literal(text: str) -> str:
    """Return a text as a grammar writes it."""
    return json.dumps(text, ensure_ascii=False)
