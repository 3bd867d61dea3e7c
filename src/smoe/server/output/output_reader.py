"""Parses a model's output while it is generated, into reasoning, answer and tool calls.

A format (`output_format.py`) is a generator over an `OutputReader`: it consumes text from `rest`, adds parts, and
yields when it needs more text. So the parts (reasoning, answer, tool calls) do not depend on how the text is divided
when it arrives.
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
"""A parser as a generator: at each `yield` it waits for more text."""
ReadsFrom = Callable[["OutputReader"], Steps[None]]
"""A format's generator function, which parses one text."""
_ALPHABET = string.ascii_letters + string.digits
_DEEPEST = 64
"""The largest number of nested brackets. Clients send calls back in requests, which may have 100 levels."""
_OUTSIDE = re.compile(r'[^"{}\[\]]*')
_IN_STRING = re.compile(r'[^"\\\x00-\x1f]*(?:\\[^\x00-\x1f][^"\\\x00-\x1f]*)*')


class Part(NamedTuple):
    """A piece of the model's output of one kind: reasoning, answer, the beginning of a tool call, or arguments of a
    call."""

    kind: Literal["reasoning", "answer", "call", "arguments"]
    text: str
    """The text; for a call, the tool's name. The `arguments` parts that follow a call are together one JSON object."""
    id: str = ""
    """The id of a tool call; empty for other parts."""


class OutputReader:
    """Parses one generated text. `push` and `flush` return the parts (reasoning, answer, tool calls) that are new."""

    def __init__(
        self,
        reads: ReadsFrom,
        tools: Mapping[str, Mapping[str, Any]] | None = None,
        *,
        is_single: bool = False,
        calls_only: bool = False,
        hidden: Collection[str] = (),
    ) -> None:
        """`tools`: the parameters' schema of each tool that may be called, by name. `is_single`: end with the first
        call. `calls_only`: a grammar allows only calls, so that other text must be a truncated call, and is dropped.
        `hidden`: special tokens, which are removed."""
        self.tools, self._is_single, self._hidden = dict(tools or {}), is_single, frozenset(hidden)
        self._calls_only = calls_only
        self.rest, self.is_over = "", False
        """The text that is not yet in any part, and whether the text has ended."""
        self.is_full = False
        """Whether the permitted number of calls has been read; later text is dropped."""
        self.is_reasoning = False
        self.calls = 0
        self._parts: list[Part] = []
        self._reading: Steps[None] | None = reads(self)
        self._read()

    def push(self, text: str) -> list[Part]:
        """Add text to parse. Return the new parts of the output."""
        self.rest += text
        return self._read()

    def flush(self) -> list[Part]:
        """End the text. Return the last parts of the output."""
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
        """Add `text` to the answer."""
        self._add("answer", "" if self._calls_only or text in self._hidden else text)

    def reasoning(self, text: str) -> None:
        """Add `text` to the reasoning."""
        self._add("reasoning", "" if text in self._hidden else text)

    def begin_reasoning(self) -> None:
        """Record that the next text is reasoning."""
        self.is_reasoning = True

    def end_reasoning(self) -> None:
        """Record that the next text is no reasoning."""
        self.is_reasoning = False

    def call(self, name: str, id: str | None = None) -> None:
        """Begin a call of the tool `name`. `id`: the id that the model wrote; None: a random id."""
        self.calls += 1
        self._parts.append(Part("call", name, id or "call_" + _random(24)))

    def arguments(self, text: str) -> None:
        """Add `text` to the arguments of the last tool call."""
        self._add("arguments", text)

    def end_call(self) -> None:
        """End the last tool call; no more arguments follow."""
        self.is_full = self._is_single

    def _add(self, kind: Literal["reasoning", "answer", "arguments"], text: str) -> None:
        if text and self._parts and self._parts[-1].kind == kind:
            self._parts[-1] = Part(kind, self._parts[-1].text + text)
        elif text:
            self._parts.append(Part(kind, text))

    # -- what formats read --------------------------------------------------------------------------------------------

    def take(self, length: int) -> str:
        """Remove the first `length` characters of the text `rest`, and return them."""
        taken, self.rest = self.rest[:length], self.rest[length:]
        return taken

    def until(self, marks: Sequence[str], show: Callable[[str], None], *, strips: bool = False) -> Steps[str | None]:
        """Pass the text before the first of `marks` to the function `show`. Return this mark, which stays in `rest`;
        None if the text ends before any mark.

        `strips`: white space before the mark is not passed on.
        """
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
        """Return whether more text could turn `mark`, with which `text` begins, into a longer mark."""
        return not self.is_over and any(each.startswith(text) for each in marks if len(each) > len(text) >= len(mark))

    def blanks(self, characters: str = " \t\r\n") -> Steps[str]:
        """Consume and return white space, up to the first other character or the end of the text. Waits for text if
        necessary."""
        while True:
            found = self.rest[: len(self.rest) - len(self.rest.lstrip(characters))]
            if len(found) < len(self.rest) or self.is_over:
                return self.take(len(found))
            yield

    def begins_with(self, marks: Sequence[str]) -> Steps[str | None]:
        """Return that one of `marks` with which `rest` begins, without consuming it; None if there is none."""
        while True:
            found = next((mark for mark in marks if self.rest.startswith(mark)), None)
            if found is not None or self.is_over or not any(mark.startswith(self.rest) for mark in marks):
                return found
            yield

    def match(self, pattern: regex.Pattern[str], begin: int = 0) -> Steps[regex.Match[str] | None]:
        """Return the match of the pattern at index `begin` of `rest`, without consuming text; None without a match.
        Waits for more text if the match may become longer."""
        while True:
            found = pattern.match(self.rest, begin, partial=not self.is_over)
            if found is None or not found.partial:
                return found
            yield

    def tail(self, pattern: regex.Pattern[str]) -> Steps[None]:
        """Consume the longest beginning of `rest` that matches the pattern or the start of the pattern."""
        while not self.is_over and pattern.fullmatch(self.rest, partial=True):
            yield
        found = pattern.fullmatch(self.rest, partial=True) or pattern.match(self.rest)  # it may be cut off
        self.take(found.end() if found is not None else 0)

    def json_value(self, begin: int) -> Steps[str | None]:
        """Return the JSON object or list at index `begin` of `rest`, without consuming it; None if it is incomplete or
        invalid."""
        value, place = JsonText(), begin
        while True:
            place += len(value.take(self.rest[place:]).raw)
            if value.is_over or self.is_over:
                return None if value.is_broken or not value.is_over else self.rest[begin:place]
            yield

    def json_arguments(self) -> Steps[None]:
        """Consume a JSON object as the arguments of the last tool call. The arguments are passed on while they are
        generated."""
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
    """The text as the model wrote it."""
    valid: str
    """The same text with control characters escaped in strings, since some models write them unescaped."""


class JsonText:
    """Finds the end of one JSON object or list in a text that arrives in pieces."""

    def __init__(self) -> None:
        self._open = ""
        """The brackets that are open, outermost first."""
        self._is_in_string = False
        self.is_over = self.is_broken = False
        """(whether the value has ended, whether it ended because the text is not valid JSON)."""

    def take(self, text: str) -> Taken:
        """Return the beginning of `text` that belongs to the JSON value. Half an escape sequence is left for the next
        call."""
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
        """Process one structural character of the JSON text. Return its valid form, or an empty string if it is
        invalid."""
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
    """Parse a text that has neither reasoning nor tool calls: all of the text is the answer."""
    yield from reader.until((), reader.answer)


def _random(letters: int) -> str:
    return "".join(secrets.choice(_ALPHABET) for _ in range(letters))
