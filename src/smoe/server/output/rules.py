"""Builds grammars that allow only a tool call, in the format of the model's family.

    start: r_1 | r_3
    r_0: %json {...}
    r_1: <[151657]> "\\n{\\"name\\": \\"warmth\\", \\"arguments\\": " r_0 "}\\n" <[151658]>
    ...

Marks of the format that are single tokens are written as token ids.

Each tool's parameters are a schema of their own, so a reference (`#`, `#/$defs/City`) is resolved within that schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from smoe.server.grammar import COMPACT, schema_text
from smoe.server.output.parameters import parameters_of


class Rules:
    """The rules of one grammar, in the syntax of llguidance. Each method that adds a rule returns the rule's name."""

    def __init__(self, own: Mapping[str, int]) -> None:
        """`own`: {text: token id} of the tokens that are marks of the output format."""
        self._own = dict(own)
        self._find = re.compile("|".join(map(re.escape, sorted(own, key=len, reverse=True))) or "(?!)")
        self._lines: list[str] = []

    def lark(self, starts: Sequence[str]) -> str:
        """Return the grammar whose start is any one of the rules `starts`."""
        return "\n".join([f"start: {' | '.join(starts)}", *self._lines]) + "\n"

    def add(self, *parts: str, options: str = "") -> str:
        """Add a rule that matches the given parts in order. Return the rule's name."""
        name = f"r_{len(self._lines)}"
        self._lines.append(f"{name}{options}: {' '.join(part for part in parts if part) or _literal('')}")
        return name

    def first_token(self, name: str) -> int | None:
        """Return the id of the mark with which the texts of a rule begin; None if they begin with other text."""
        first = self._lines[int(name.removeprefix("r_"))].partition(": ")[2].partition(" ")[0]
        if first.startswith("r_"):
            return self.first_token(first)
        found = re.fullmatch(r"<\[(\d+)\]>", first)
        return None if found is None else int(found[1])

    def any_of(self, parts: Sequence[str]) -> str:
        """Add a rule that matches any one of the given parts. Return the rule's name."""
        return self.add(" | ".join(parts))

    def text(self, text: str) -> str:
        """Return the grammar's notation of a text, in which marks of the output format are token ids."""
        parts, place = [], 0
        for found in self._find.finditer(text):
            parts += [_literal(text[place : found.start()])] if found.start() > place else []
            parts.append(f"<[{self._own[found[0]]}]>")
            place = found.end()
        return " ".join(parts + ([_literal(text[place:])] if place < len(text) else []))

    def json(self, schema: Mapping[str, Any]) -> str:
        """Add a rule that matches JSON of a schema, and return its name. Raises an `ApiError` if the schema is too
        long."""
        return self.add(f"%json {schema_text({**schema, 'x-guidance': COMPACT}, 'tools')}")

    def parameters(self, function: Mapping[str, Any]) -> str:
        """Add a rule that matches a function's arguments as JSON, and return its name. Raises an `ApiError` if they are
        not an object."""
        return self.json(parameters_of(function))

    def any_text(self, close: str, pattern: str = "(?s:.*)") -> str:
        """Add a rule that matches any text of the regular expression `pattern`, followed by the mark `close`. Return
        the rule's name."""
        if self._find.search(close):
            return self.add(f"/{pattern}/", self.text(close))
        return self.add(f"/{pattern}/", options=f"[suffix={_literal(close)}]")

    def in_sequence(self, wanted: Sequence[tuple[str, bool]], separator: str) -> str:
        """Add a rule that matches parts in order, of which some may be left out. Return its name. `wanted`: (part,
        whether it is required); `separator` is between two parts.

        For each part there are two rules for the rest of the sequence: one if no part precedes, one if a part does.
        """
        first, later = _literal(""), _literal("")
        for part, must in reversed(wanted):
            after = self.add(self.text(separator) if separator else "", part, later)
            begin = self.add(part, later)
            first, later = (begin, after) if must else (self.any_of([begin, first]), self.any_of([after, later]))
        return first


def _literal(text: str) -> str:
    """Return a string literal of the grammar."""
    return json.dumps(text, ensure_ascii=False)
