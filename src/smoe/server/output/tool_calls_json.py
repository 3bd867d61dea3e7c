"""The syntaxes of tool calls with JSON arguments, and the base class of all syntaxes.

| syntax | what a model writes |
| --- | --- |
| `JsonCalls` | `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, or a list of such objects |
| `NamedJson` | `[TOOL_CALLS]name[ARGS]{...}` |
| `Tagged` (`tool_calls_tagged.py`) | `<function=name><parameter=key>value</parameter></function>` |
| `Nested` (`tool_calls_tagged.py`) | `<invoke name="name"><key><item>value</item></key></invoke>` |
| `Pythonic` (`tool_calls_literal.py`) | `[name(key="value")]` |
| `Braced` (`tool_calls_literal.py`) | `call:name{key:<|"|>value<|"|>}` |

A call must name a tool of the request; other text that begins like a call is part of the answer. After the name and the
beginning of the arguments, the text is a call, whatever follows: its arguments are what the model writes.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import regex

from smoe.server.output.output_reader import OutputReader, Steps
from smoe.server.output.rules import Rules

NAME = r"[\w./-]{1,200}"
"""A pattern of function names."""
_LONG = regex.compile(
    r'\{\s*(?:"(?:id|tool_call_id|type)"\s*:\s*"[^"\\]{0,100}"\s*,\s*)*"(?:name|tool_name)"\s*:\s*'
    r'"(?P<name>[^"\\]{1,200})"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_SHORT = regex.compile(r'\{\s*"(?P<name>[^"\\]{1,200})"\s*:\s*(?=\{)')
_REST_OF_OBJECT = regex.compile(r'(?:\s*,\s*"\w{1,40}"\s*:\s*"[^"\\]{0,100}")*\s*\}')
_BETWEEN = regex.compile(r"\s*(?:[,;]\s*)?(?=\{)")


class CallSyntax(ABC):
    """The syntax in which a model family writes tool calls. It parses calls in the output, and makes the grammar for
    required calls."""

    marks: tuple[str, ...]
    """The strings that begin a call anywhere in a text."""
    separators: ClassVar[str] = " \t\r\n"
    """The characters between calls, which are not part of the answer."""

    @property
    def texts(self) -> str:
        """All strings that have a meaning in this syntax, and possibly others, joined to one string."""
        return "\n".join(str(getattr(self, each.name)) for each in fields(self)).replace("\\", "")  # type: ignore

    @abstractmethod
    def read(self, reader: OutputReader) -> Steps[bool]:
        """Consume the tool calls at the start of `reader.rest`. Return False, and consume nothing, if there are
        none."""

    def begins(self, text: str) -> bool:
        """Return whether this text may begin a tool call without a mark, at the start of an answer or after a call."""
        return False

    @abstractmethod
    def rules(self, rules: Rules, function: Mapping[str, Any]) -> str:
        """Add grammar rules for a tool call of `function`. Return the name of the first rule."""


@dataclass(frozen=True)
class JsonCalls(CallSyntax):
    """Tool calls that are JSON objects: one object, several in succession, or a list."""

    begin: str
    end: str = ""
    name_key: str = "name"
    arguments_key: str = "arguments"
    is_listed: bool = False
    """Whether the model writes calls within a list, also a single call."""
    space: str = ""
    """The white space on either side of a call, as the model writes it."""
    is_bare: bool = False
    """Whether a model may write a call without the mark `begin`."""
    is_short: bool = False
    """Whether a model writes a call as `{"name": {...}}`."""
    separators: str = " \t\r\n"  # type: ignore[misc]

    @property
    def marks(self) -> tuple[str, ...]:  # type: ignore[override]
        return (self.begin,)

    def begins(self, text: str) -> bool:
        return self.is_bare and text.startswith("{")

    def read(self, reader: OutputReader) -> Steps[bool]:
        head = yield from reader.match(self._head)
        if head is None or not (yield from self._read_object(reader, head.end())):
            return False
        while not reader.is_full:
            yield from reader.tail(_BETWEEN)
            if not reader.rest.startswith("{") or not (yield from self._read_object(reader, 0)):
                break
        if not reader.is_full:
            yield from reader.tail(self._tail)
        return True

    def _read_object(self, reader: OutputReader, begin: int) -> Steps[bool]:
        """Consume the JSON object at index `begin` of `reader.rest` if it is a tool call. Return whether it was a
        call."""
        found = yield from reader.match(_SHORT if self.is_short else _LONG, begin)
        if found is None or found["name"] not in reader.tools:
            return (yield from self._read_whole(reader, begin))
        reader.take(found.end())
        reader.call(found["name"])
        yield from reader.json_arguments()
        reader.end_call()
        if not reader.is_full:
            yield from reader.tail(_REST_OF_OBJECT)
        return True

    def _read_whole(self, reader: OutputReader, begin: int) -> Steps[bool]:
        """Consume a complete JSON object that is a tool call in an unusual form: keys in another order, arguments as a
        string, or no arguments. Return whether it was a call."""
        text = yield from reader.json_value(begin)
        try:
            value = json.loads(text or "", strict=False)
            name, arguments = self._call_of(value)
        except (ValueError, RecursionError):
            return False
        if name not in reader.tools:
            return False
        reader.take(begin + len(text or ""))
        reader.call(name)
        reader.arguments(json.dumps(arguments, ensure_ascii=False))
        reader.end_call()
        return True

    def _call_of(self, value: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Return (function name, arguments) of a tool call. Raises `ValueError` if the object is not a call."""
        inner = value.get("function")
        if isinstance(inner, dict):
            value = inner
        keys = [key for key in ("arguments", "parameters") if key in value]
        if self.is_bare and not keys:
            raise ValueError("a JSON object without arguments is an answer, not a tool call")
        given = value[keys[0]] if keys else None
        if isinstance(given, str):
            given = json.loads(given, strict=False) if given.strip() else None
        if not isinstance(given, dict) and given is not None:
            raise ValueError("arguments are an object")
        json.dumps(given, allow_nan=False)
        name = value.get("name", value.get("tool_name"))
        return (name if isinstance(name, str) else None), given or {}

    @property
    def _head(self) -> regex.Pattern[str]:
        begin = f"(?:{regex.escape(self.begin)})" + ("?" if self.is_bare else "")
        return regex.compile(rf"{begin}\s*\[?\s*(?=\{{)")

    @property
    def _tail(self) -> regex.Pattern[str]:
        end = self.end.strip()
        return regex.compile(r"(?:\s*\])?" + (rf"(?:\s*{regex.escape(end)})?" if end else ""))

    def rules(self, rules: Rules, function: Mapping[str, Any]) -> str:
        name = json.dumps(function["name"], ensure_ascii=False)
        head = f"{{{name}: " if self.is_short else f'{{"{self.name_key}": {name}, "{self.arguments_key}": '
        begin, end = ("[", "]") if self.is_listed else ("", "")
        first = "" if self.is_bare else self.begin
        return rules.add(
            rules.text(first + self.space + begin + head),
            rules.parameters(function),
            rules.text("}" + end + self.space + self.end),
        )


@dataclass(frozen=True)
class NamedJson(CallSyntax):
    """Tool calls that consist of the function's name, a separator and a JSON object of arguments."""

    head: str
    """A regular expression for the text before the object, in which NAME stands for the name. It begins with one of
    `marks`."""
    tail: str
    """A regular expression for the text that may follow the object."""
    marks: tuple[str, ...]  # type: ignore[misc]
    written: tuple[str, str]
    """The texts before and after the JSON object in the grammar; {name} stands for the function's name."""
    bare: str = ""
    """A regular expression for the start of a call without a mark; empty if every call has a mark."""
    keeps_id: bool = False
    """Whether the call gets the id that the model wrote (the group `id` of `head`)."""

    def begins(self, text: str) -> bool:
        return bool(self.bare) and regex.match(self.bare, text, partial=True) is not None

    def read(self, reader: OutputReader) -> Steps[bool]:
        pattern = regex.compile(self.head.replace("NAME", f"(?P<name>{NAME})") + r"\s*(?=\{)")
        found = yield from reader.match(pattern)
        if found is None or found["name"] not in reader.tools:
            return False
        reader.take(found.end())
        reader.call(found["name"], found["id"] if self.keeps_id else None)
        yield from reader.json_arguments()
        reader.end_call()
        if not reader.is_full:
            yield from reader.tail(regex.compile(self.tail))
        return True

    def rules(self, rules: Rules, function: Mapping[str, Any]) -> str:
        begin, end = (text.replace("{name}", function["name"]) for text in self.written)
        return rules.add(rules.text(begin), rules.parameters(function), rules.text(end))
