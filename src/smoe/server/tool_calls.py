"""Calls of tools in what a model writes. Each family has a form of its own, which its chat template shows.

| form | what the model writes |
| --- | --- |
| hermes (Qwen, Hermes) | `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number, after text or none |
| mistral | `[TOOL_CALLS][{"name": ..., "arguments": {...}}]`, or `[TOOL_CALLS]name[ARGS]{...}`, any number |
| llama | `{"name": ..., "parameters": {...}}`, the whole text, several with `;` in between |

What is begun like a call and turns out to be none is text.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from abc import ABC, abstractmethod
from typing import Any, ClassVar, NamedTuple

from smoe.generation.detokenizer import overlap

_ALPHABET = string.ascii_letters + string.digits


class ToolCall(NamedTuple):
    """One call."""

    id: str
    name: str
    arguments: str
    """JSON."""


class Parser(ABC):
    """Reads one text as it comes; `push` and `flush` return what is text, and the calls that are whole."""

    marker: ClassVar[str] = ""
    """What begins a call."""
    tokens: ClassVar[tuple[str, ...]] = ()
    """What is looked for; where texts leave it out, as a special token, whoever pushes writes it."""

    def __init__(self) -> None:
        self._held = ""

    @abstractmethod
    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        """Some more."""

    @abstractmethod
    def flush(self) -> tuple[str, list[ToolCall]]:
        """That was all."""


class PlainText(Parser):
    """No calls."""

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        return text, []

    def flush(self) -> tuple[str, list[ToolCall]]:
        return "", []


class Hermes(Parser):
    """`<tool_call>` and `</tool_call>` around each."""

    marker = "<tool_call>"
    tokens = ("<tool_call>", "</tool_call>")
    _end = "</tool_call>"

    def __init__(self) -> None:
        super().__init__()
        self._has_called = False

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        self._held += text
        shown, calls = "", list[ToolCall]()
        while (begin := self._held.find(self.marker)) >= 0:
            shown += self._show(self._held[:begin])
            self._held = self._held[begin:]
            end = self._held.find(self._end)
            if end < 0:
                return shown, calls
            found = _calls_in(self._held[len(self.marker) : end])
            rest = end + len(self._end)
            shown += "" if found else self._held[:rest]
            self._held = self._held[rest:]
            self._has_called |= bool(found)
            calls += found
        keep = overlap(self._held, self.marker)
        shown += self._show(self._held[: len(self._held) - keep])
        self._held = self._held[len(self._held) - keep :]
        return shown, calls

    def _show(self, text: str) -> str:
        """After a call, space is what separates it from the next one."""
        return "" if self._has_called and not text.strip() else text

    def flush(self) -> tuple[str, list[ToolCall]]:
        """A call whose end is missing is one nevertheless, where it is whole."""
        held, self._held = self._held, ""
        if held.startswith(self.marker) and (calls := _calls_in(held[len(self.marker) :])):
            return "", calls
        return self._show(held), []


class Mistral(Parser):
    """Everything after the marker."""

    marker = "[TOOL_CALLS]"
    tokens = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")
    _named = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*(?=\{)")

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        self._held += text
        begin = self._held.find(self.marker)
        cut = begin if begin >= 0 else len(self._held) - overlap(self._held, self.marker)
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown, []

    def flush(self) -> tuple[str, list[ToolCall]]:
        held, self._held = self._held, ""
        if not held.startswith(self.marker):
            return held, []
        calls = list[ToolCall]()
        for part in filter(str.strip, held.split(self.marker)):
            named = self._named.match(part)
            calls += _call_named(named[1], part[named.end() :]) if named else _calls_in(part)
        calls = [call._replace(id=_letters(9)) for call in calls]  # their templates take ids of nine characters only
        return ("", calls) if calls else (held, [])


class Llama(Parser):
    """A text that is JSON as a whole."""

    marker = "<|python_tag|>"
    tokens = ("<|python_tag|>",)

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        self._held += text
        begin = self._held.lstrip()
        if not begin or begin.startswith(("{", self.marker)) or self.marker.startswith(begin):
            return "", []
        shown, self._held = self._held, ""
        self.push = lambda text: (text, [])  # type: ignore[method-assign]  # text from here on
        return shown, []

    def flush(self) -> tuple[str, list[ToolCall]]:
        held, self._held = self._held, ""
        calls = list[ToolCall]()
        for part in _objects_of(held.strip().removeprefix(self.marker)):
            calls += _calls_in(part)
        return ("", calls) if calls else (held, [])


PARSERS: dict[str, type[Parser]] = {"hermes": Hermes, "mistral": Mistral, "llama": Llama}


def form_of(template: str) -> str | None:
    """Whose form a chat template asks for; None where nobody here knows."""
    if "<tool_call>" in template and "<function=" not in template and "<arg_key>" not in template:
        return "hermes"
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<|python_tag|>" in template or ('"parameters"' in template and "ipython" in template):
        return "llama"
    return None


def _calls_in(text: str) -> list[ToolCall]:
    """The calls that a JSON text is: one, or a list of them; none where it is something else."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return []
    calls = [_call(each) for each in (value if isinstance(value, list) else [value])]
    return [call for call in calls if call is not None] if None not in calls else []


def _call(value: Any) -> ToolCall | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    given = value.get("arguments", value.get("parameters", {}))
    arguments = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
    return ToolCall("call_" + _letters(24), value["name"], arguments)


def _call_named(name: str, arguments: str) -> list[ToolCall]:
    try:
        return [ToolCall("", name, json.dumps(json.loads(arguments), ensure_ascii=False))]
    except (ValueError, RecursionError):
        return []


def _objects_of(text: str) -> list[str]:
    """JSON objects with `;` in between, each as it is written; the text itself where they are none."""
    decoder, found, place = json.JSONDecoder(), list[str](), 0
    while place < len(text):
        try:
            _, end = decoder.raw_decode(text, place)
        except (ValueError, RecursionError):
            return [text]
        found.append(text[place:end])
        place = end
        while place < len(text) and text[place] in "; \n":
            place += 1
    return found


def _letters(count: int) -> str:
    return "".join(secrets.choice(_ALPHABET) for _ in range(count))
