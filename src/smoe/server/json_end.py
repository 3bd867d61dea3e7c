"""Where a JSON object or list ends, in a text that grows: every character is looked at once."""

from __future__ import annotations

import re

_OUTSIDE = re.compile(r"[ \t\r\n0-9truefalsnE.,:+-]*")
"""What may stand between brackets and strings: space, numbers, `true`, `false`, `null`, separators."""
_IN_STRING = re.compile(r'[^"\\]*(?:\\.[^"\\]*)*', re.DOTALL)
_DEEPEST = 100
"""The deepest nesting: as deep as the body of a request may be: a client sends back what it was given."""


class JsonEnd:
    """Finds the end of one value that begins with a bracket."""

    def __init__(self, begin: int) -> None:
        """`begin`: where the value begins."""
        self._place = begin
        """All before it has been looked at."""
        self._open = ""
        """The brackets that are open."""
        self._is_in_string = False
        self.is_broken = False
        """Whether no JSON begins like this, whatever comes."""

    def find(self, text: str) -> int | None:
        """The place after the value's last character; None where it has not come. `text`: all of it so far."""
        while not self.is_broken:
            pattern = _IN_STRING if self._is_in_string else _OUTSIDE
            found = pattern.match(text, self._place)
            self._place = self._place if found is None else found.end()
            if self._place == len(text) or (self._is_in_string and text[self._place] == "\\"):
                return None  # at the end, or before an escape of which half is there
            self._take(text[self._place])
            self._place += 1
            if not self._open and not self.is_broken:
                return self._place
        return None

    def _take(self, character: str) -> None:
        """A quotation mark or a bracket; anything else breaks the value."""
        if character == '"' and self._open:
            self._is_in_string = not self._is_in_string
        elif character in "{[" and len(self._open) < _DEEPEST:
            self._open += character
        elif self._open and self._open[-1] + character in ("{}", "[]"):
            self._open = self._open[:-1]
        else:
            self.is_broken = True
