"""Finds where a JSON object or list ends in a growing text. Each character is scanned once."""

from __future__ import annotations

import re

_OUTSIDE = re.compile(r"[ \t\r\n0-9truefalsnE.,:+-]*")
"""What may stand between brackets and strings: space, numbers, `true`, `false`, `null`, separators."""
_IN_STRING = re.compile(r'[^"\\]*(?:\\.[^"\\]*)*', re.DOTALL)
_DEEPEST = 100
"""The deepest nesting, as deep as a request's body may be: a client sends back the calls that it received."""


class JsonEnd:
    """Finds the end of one JSON object or list."""

    def __init__(self, begin: int) -> None:
        """`begin`: the position of the opening bracket."""
        self._place = begin
        """Everything before this position has been scanned."""
        self._open = ""
        """The brackets that are open."""
        self._is_in_string = False
        self.is_broken = False
        """Whether the text cannot become valid JSON."""

    def find(self, text: str) -> int | None:
        """Return the position after the value's last character; None if the value is incomplete. `text`: all text so
        far."""
        while not self.is_broken:
            pattern = _IN_STRING if self._is_in_string else _OUTSIDE
            found = pattern.match(text, self._place)
            self._place = self._place if found is None else found.end()
            if self._place == len(text) or (self._is_in_string and text[self._place] == "\\"):
                return None  # at the end, or before an incomplete escape
            self._take(text[self._place])
            self._place += 1
            if not self._open and not self.is_broken:
                return self._place
        return None

    def _take(self, character: str) -> None:
        """Process a quotation mark or a bracket; any other character makes the value invalid."""
        if character == '"' and self._open:
            self._is_in_string = not self._is_in_string
        elif character in "{[" and len(self._open) < _DEEPEST:
            self._open += character
        elif self._open and self._open[-1] + character in ("{}", "[]"):
            self._open = self._open[:-1]
        else:
            self.is_broken = True
