"""The syntaxes of tool calls whose arguments are literals, of Python or of a model family's own notation."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import regex

from smoe.server.output.output_reader import OutputReader, Steps
from smoe.server.output.parameters import (
    alternatives,
    arguments_of,
    fixed_texts,
    parameters_of,
    pattern_of,
    resolved,
    standing_alone,
    types_of,
    value_of,
)
from smoe.server.output.rules import Rules
from smoe.server.output.tool_calls_json import NAME, CallSyntax

_DEEPEST = 8
"""The maximum number of levels of objects that the grammar describes; deeper objects may be any text."""
_PYTHON_CALL = regex.compile(
    r"""\s*[\w.]{1,200}"""
    r"""(?P<group>[(\[{](?:[^()\[\]{}"']++|"(?:[^"\\]++|\\.)*+"|'(?:[^'\\]++|\\.)*+'|(?&group))*+[)\]}])""",
    regex.S,
)


@dataclass(frozen=True)
class Pythonic(CallSyntax):
    """Tool calls as a list in Python's syntax, `[name(key="value"), ...]`; `true`, `false` and `null` are accepted as
    values."""

    begin: str = ""
    end: str = ""

    @property
    def marks(self) -> tuple[str, ...]:  # type: ignore[override]
        return (self.begin,) if self.begin else ()

    def begins(self, text: str) -> bool:
        return not self.begin and regex.match(r"\[\s*[\w.]+\(", text, partial=True) is not None

    def read(self, reader: OutputReader) -> Steps[bool]:
        head = yield from reader.match(regex.compile(rf"{regex.escape(self.begin)}\s*\["))
        if head is None or not (yield from self._read_call(reader, head.end())):
            return False
        while not reader.is_full:
            yield from reader.tail(regex.compile(r"\s*,\s*"))
            if not (yield from self._read_call(reader, 0)):
                break
        if not reader.is_full:
            end = rf"(?:\s*{regex.escape(self.end)})?" if self.end else ""
            yield from reader.tail(regex.compile(r"(?:\s*\])?" + end))
        return True

    def _read_call(self, reader: OutputReader, begin: int) -> Steps[bool]:
        """Consume the tool call at index `begin` of `reader.rest`. Return whether there was a call."""
        found = yield from reader.match(_PYTHON_CALL, begin)
        try:
            call = ast.parse(found[0].strip(), mode="eval").body if found is not None else None
            if not isinstance(call, ast.Call) or call.args:
                return False
            name = ast.unparse(call.func)
            given = {keyword.arg or "": _python_value(keyword.value) for keyword in call.keywords}
            arguments = json.dumps(given, ensure_ascii=False, allow_nan=False)
        except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
            return False
        if name not in reader.tools or found is None:
            return False
        reader.take(found.end())
        reader.call(name)
        reader.arguments(arguments)
        reader.end_call()
        return True

    def rules(self, rules: Rules, function: Mapping[str, Any]) -> str:
        parameters = parameters_of(function)
        arguments = [
            (rules.add(rules.text(f"{key}="), rules.json(standing_alone(schema, parameters))), must)
            for key, schema, must in arguments_of(parameters)
        ]
        begin, end = f"{self.begin}[{function['name']}(", f")]{self.end}"
        return rules.add(rules.text(begin), rules.in_sequence(arguments, ", "), rules.text(end))


def _python_value(node: ast.expr) -> Any:
    """Return the value of a Python literal, given as a syntax tree. The names `true`, `false` and `null` are
    accepted."""
    match node:
        case ast.Name(id="true" | "false" | "null" as name):
            return json.loads(name)
        case ast.List(elts=each) | ast.Tuple(elts=each):
            return [_python_value(one) for one in each]
        case ast.Dict(keys=keys, values=values):
            pairs = [(key, value) for key, value in zip(keys, values, strict=True) if key is not None]
            return {str(_python_value(key)): _python_value(value) for key, value in pairs}
    return ast.literal_eval(node)


@dataclass(frozen=True)
class Braced(CallSyntax):
    """Tool calls `call:name{key:<|"|>value<|"|>}`: the function's name and an object of arguments in braces. Keys have
    no quotation marks. Strings are enclosed in the mark `quote`, here `<|"|>`."""

    begin: str
    end: str
    quote: str

    @property
    def marks(self) -> tuple[str, ...]:  # type: ignore[override]
        return (self.begin,)

    def read(self, reader: OutputReader) -> Steps[bool]:
        found = yield from reader.match(regex.compile(rf"{regex.escape(self.begin)}\s*(?P<name>{NAME})\s*(?=\{{)"))
        if found is None or found["name"] not in reader.tools:
            return False
        pattern, begin = self._object, found.end()
        value = yield from reader.match(pattern, begin)
        if value is None:
            return False
        reader.take(value.end())
        reader.call(found["name"])
        reader.arguments(json.dumps(_BracedText(value[0], self.quote).value(), ensure_ascii=False))
        reader.end_call()
        if not reader.is_full:
            yield from reader.tail(regex.compile(rf"(?:\s*{regex.escape(self.end)})?"))
        return True

    @property
    def _object(self) -> regex.Pattern[str]:
        quote = regex.escape(self.quote)
        text = rf"{quote}.*?{quote}"
        return regex.compile(rf"(?P<group>\{{(?:{text}|(?&group)|(?!{quote})[^{{}}])*+\}})", regex.S)

    def rules(self, rules: Rules, function: Mapping[str, Any]) -> str:
        parameters = parameters_of(function)
        return rules.add(
            rules.text(f"{self.begin}{function['name']}"),
            self._object_rule(rules, parameters, parameters, _DEEPEST),
            rules.text(self.end),
        )

    def _object_rule(self, rules: Rules, schema: Mapping[str, Any], root: Mapping[str, Any], deepest: int) -> str:
        wanted = [
            (rules.add(rules.text(f"{key}:"), self._value(rules, inner, root, deepest)), must)
            for key, inner, must in arguments_of(schema, root)
        ]
        return rules.add(rules.text("{"), rules.in_sequence(wanted, ","), rules.text("}"))

    def _value(self, rules: Rules, schema: Mapping[str, Any], root: Mapping[str, Any], deepest: int) -> str:
        if texts := fixed_texts(schema):
            return rules.any_of([rules.text(f"{self.quote}{text}{self.quote}") for text in texts])
        if others := alternatives(schema):
            return rules.any_of([self._value(rules, resolved(each, root), root, deepest) for each in others])
        kinds = types_of(schema)
        if kinds == {"object"} and deepest:
            return self._object_rule(rules, schema, root, deepest - 1)
        if kinds == {"array"} and deepest:
            item = self._value(rules, resolved(schema.get("items"), root), root, deepest - 1)
            more = rules.add(rules.text(","), item)
            return rules.add(rules.text("["), f"({item} {more}*)?", rules.text("]"))
        if kinds and kinds <= {"integer", "number", "boolean", "null"}:
            return rules.json(schema)
        return rules.add(rules.text(self.quote), rules.any_text(self.quote, pattern_of(schema)))


class _BracedText:
    """A parser of one complete object of arguments in the notation of `Braced`, such as `{key:<|"|>value<|"|>}`."""

    def __init__(self, text: str, quote: str) -> None:
        self._text, self._quote, self._place = text, quote, 0

    def value(self) -> Any:
        """Parse and return the value at the current position of the text."""
        self._skip()
        if self._takes("{"):
            return dict(self._items("}", self._pair))
        if self._takes("["):
            return list(self._items("]", self.value))
        if self._takes(self._quote):
            return self._up_to(self._quote)
        return value_of(self._plain(",}]"), {})

    def _pair(self) -> tuple[str, Any]:
        self._skip()
        key = self._up_to(self._quote) if self._takes(self._quote) else self._plain(":").strip()
        self._skip()
        self._takes(":")
        return key, self.value()

    def _items(self, end: str, one: Callable[[], Any]) -> Iterator[Any]:
        self._skip()
        while self._place < len(self._text) and not self._takes(end):
            yield one()
            self._skip()
            self._takes(",")
            self._skip()

    def _skip(self) -> None:
        while self._text[self._place : self._place + 1].isspace():
            self._place += 1

    def _takes(self, text: str) -> bool:
        found = self._text.startswith(text, self._place)
        self._place += len(text) if found else 0
        return found

    def _up_to(self, end: str) -> str:
        place = self._text.find(end, self._place)
        place = len(self._text) if place < 0 else place
        text, self._place = self._text[self._place : place], place + len(end)
        return text

    def _plain(self, ends: str) -> str:
        begin = self._place
        while self._place < len(self._text) and self._text[self._place] not in ends:
            self._place += 1
        self._place += begin == self._place  # a character that belongs nowhere
        return self._text[begin : self._place]
