"""Reads the text that a model writes, as it comes: from pieces of any length to reasoning, answer and calls of tools.

A format (`families.py`) is a generator over an `OutputReader`: it takes text from `rest`, adds parts, and yields where
it needs more text than has come. So the parts are the same wherever a text is cut into pieces.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

import regex

from smoe.generation.detokenizer import overlap

_T = TypeVar("_T")
Steps = Generator[None, None, _T]
"""Each `yield` waits for more text."""
ReadsFrom = Callable[["OutputReader"], Steps[None]]
"""A format, as it reads one text."""
_ALPHABET = string.ascii_letters + string.digits
_DEEPEST = 64
"""Brackets within each other: a client sends calls back, and a request has no more levels than 100."""
_OUTSIDE = re.compile(r'[^"{}\[\]]*')
_IN_STRING = re.compile(r'[^"\\\x00-\x1f]*(?:\\[^\x00-\x1f][^"\\\x00-\x1f]*)*')


class Part(NamedTuple):
    """What a text gains."""

    kind: Literal["reasoning", "answer", "call", "arguments"]
    text: str
    """Of a call the tool's name; its arguments follow as parts of their own, and are a JSON object together."""
    id: str = ""
    """Of a call."""


class OutputReader:
    """Reads one text. `push` and `flush` return the parts that have become whole."""

    def __init__(
        self,
        reads: ReadsFrom,
        tools: Mapping[str, Mapping[str, Any]] | None = None,
        *,
        is_single: bool = False,
        calls_only: bool = False,
        hidden: Collection[str] = (),
    ) -> None:
        """`tools`: the parameters of each tool that may be called, by its name. `is_single`: whether the first call is
        the last. `calls_only`: whether a grammar allows nothing but calls, so that other text is a call that was cut
        off. `hidden`: special tokens, which are in no answer."""
        self.tools, self._is_single, self._hidden = dict(tools or {}), is_single, frozenset(hidden)
        self._calls_only = calls_only
        self.rest, self.is_over = "", False
        """The text that has come and is in no part yet; whether no more comes."""
        self.is_full = False
        """Whether as many calls have come as may; what follows is left out."""
        self.is_reasoning = False
        self.calls = 0
        self._parts: list[Part] = []
        self._reading: Steps[None] | None = reads(self)
        self._read()

    def push(self, text: str) -> list[Part]:
        """Some more text."""
        self.rest += text
        return self._read()

    def flush(self) -> list[Part]:
        """Return the text is over."""
        self.is_over = True
        return self._read()

    def _read(self) -> list[Part]:
        if self._reading is not None and next(self._reading, self) is self:
            self._reading = None
        if self._reading is None:
            if not self.is_full:
                self.answer(self.rest)
            self.rest = ""
        parts, self._parts = self._parts, []
        return parts

    # -- what formats write -------------------------------------------------------------------------------------------

    def answer(self, text: str) -> None:
        """Add to the answer."""
        self._add("answer", "" if self._calls_only or text in self._hidden else text)

    def reasoning(self, text: str) -> None:
        """Add to the reasoning."""
        self._add("reasoning", "" if text in self._hidden else text)

    def call(self, name: str, id: str | None = None) -> None:
        """Begin a call of a tool that is offered. `id`: the model's own."""
        self.calls += 1
        self._parts.append(Part("call", name, id or "call_" + _random(24)))

    def arguments(self, text: str) -> None:
        """Add to the arguments of the last call."""
        self._add("arguments", text)

    def end_call(self) -> None:
        """Return the last call is whole."""
        self.is_full = self._is_single

    def _add(self, kind: Literal["reasoning", "answer", "arguments"], text: str) -> None:
        if text and self._parts and self._parts[-1].kind == kind:
            self._parts[-1] = Part(kind, self._parts[-1].text + text)
        elif text:
            self._parts.append(Part(kind, text))

    # -- what formats read --------------------------------------------------------------------------------------------

    def take(self, length: int) -> str:
        """Take that much of `rest`."""
        taken, self.rest = self.rest[:length], self.rest[length:]
        return taken

    def until(self, marks: Sequence[str], show: Callable[[str], None], *, strips: bool = False) -> Steps[str | None]:
        """Show text up to the first of some marks, and return that mark, which is not taken; None: the text is over.
        `strips`: without the blanks before the mark, which stay in `rest`, or before the end."""
        looked_for = sorted({*marks, *self._hidden}, key=len, reverse=True)
        search = re.compile("|".join(map(re.escape, looked_for)) or "(?!)")
        while True:
            found, end = search.search(self.rest), len(self.rest)
            if found is not None:
                end = found.start()
                if self._may_be_longer(self.rest[end:], found[0], looked_for):
                    found = None
            elif not self.is_over:
                end -= max((overlap(self.rest, mark) for mark in looked_for), default=0)
            show(self.take(len(self.rest[:end].rstrip()) if strips else end))
            if found is not None:
                if found[0] in marks:
                    return found[0]
                self.rest = self.rest.replace(found[0], "", 1)  # a special token
            elif self.is_over:
                self.rest = ""
                return None
            else:
                yield

    def _may_be_longer(self, text: str, mark: str, marks: Sequence[str]) -> bool:
        """Return whether a text that begins with a mark may become one that begins with a longer mark."""
        return not self.is_over and any(each.startswith(text) for each in marks if len(each) > len(text) >= len(mark))

    def blanks(self, characters: str = " \t\r\n") -> Steps[str]:
        """Take blanks up to what is none, or to the end."""
        while True:
            found = self.rest[: len(self.rest) - len(self.rest.lstrip(characters))]
            if len(found) < len(self.rest) or self.is_over:
                return self.take(len(found))
            yield

    def begins_with(self, marks: Sequence[str]) -> Steps[str | None]:
        """Return the mark that `rest` begins with; nothing is taken."""
        while True:
            found = next((mark for mark in marks if self.rest.startswith(mark)), None)
            if found is not None or self.is_over or not any(mark.startswith(self.rest) for mark in marks):
                return found
            yield

    def match(self, pattern: regex.Pattern[str], begin: int = 0) -> Steps[regex.Match[str] | None]:
        """Return what `rest` has of a pattern at a place; nothing is taken."""
        while True:
            found = pattern.match(self.rest, begin, partial=not self.is_over)
            if found is None or not found.partial:
                return found
            yield

    def tail(self, pattern: regex.Pattern[str]) -> Steps[None]:
        """Take a pattern of which any part may be missing, as far as it is there."""
        while not self.is_over and pattern.fullmatch(self.rest, partial=True):
            yield
        found = pattern.fullmatch(self.rest, partial=True) or pattern.match(self.rest)  # it may be cut off
        self.take(found.end() if found is not None else 0)

    def json_value(self, begin: int) -> Steps[str | None]:
        """Return a JSON object or list that begins at a place of `rest`; nothing is taken. None where it does not
        end."""
        value, place = JsonText(), begin
        while True:
            place += len(value.take(self.rest[place:]).raw)
            if value.is_over or self.is_over:
                return None if value.is_broken or not value.is_over else self.rest[begin:place]
            yield

    def json_arguments(self) -> Steps[None]:
        """Take a JSON object as the last call's arguments, as it comes."""
        value = JsonText()
        while True:
            taken = value.take(self.rest)
            self.take(len(taken.raw))
            self.arguments(taken.valid)
            if value.is_over or self.is_over:
                return
            yield


class Taken(NamedTuple):
    raw: str
    """The text as it is."""
    valid: str
    """The same text; control characters in strings, which some models write, are escaped."""


class JsonText:
    """Finds the end of one JSON object or list in a text that comes in pieces."""

    def __init__(self) -> None:
        self._open = ""
        """The brackets that are open."""
        self._is_in_string = False
        self.is_over = self.is_broken = False
        """Whether the value has ended; whether it has because no JSON goes on like this."""

    def take(self, text: str) -> Taken:
        """As much of a text as belongs to the value; an escape of which half has come waits."""
        place, valid = 0, []
        while place < len(text) and not self.is_over:
            found = (_IN_STRING if self._is_in_string else _OUTSIDE).match(text, place)
            assert found is not None, "both patterns match nothing"
            valid.append(found[0])
            place = found.end()
            if place == len(text) or text[place:] == "\\":
                break
            valid.append(self._taken(text[place]))
            place += not self.is_broken
        return Taken(text[:place], "".join(valid))

    def _taken(self, character: str) -> str:
        """One character that counts; nothing where it breaks the value."""
        if self._is_in_string:
            self._is_in_string = character != '"'
            return character if character in '"\\' else json.dumps(character)[1:-1]
        if character == '"' and self._open:
            self._is_in_string = True
        elif character in "{[" and len(self._open) < _DEEPEST:
            self._open += character
        elif self._open and self._open[-1] + character in ("{}", "[]"):
            self._open = self._open[:-1]
            self.is_over = not self._open
        else:
            self.is_over = self.is_broken = True
            return ""
        return character


def plain_text(reader: OutputReader) -> Steps[None]:
    """Return a text without reasoning and calls."""
    yield from reader.until((), reader.answer)


def _random(letters: int) -> str:
    return "".join(secrets.choice(_ALPHABET) for _ in range(letters))
