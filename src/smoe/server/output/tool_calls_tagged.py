"""The syntaxes of tool calls in which each argument is between marks, as in XML."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import regex

from smoe.server.output.output_reader import OutputReader, Steps
from smoe.server.output.parameters import (
    alternatives,
    arguments_of,
    fixed_texts,
    is_text,
    parameters_of,
    part_of,
    pattern_of,
    properties_of,
    resolved,
    standing_alone,
    types_of,
    value_of,
)
from smoe.server.output.rules import Rules
from smoe.server.output.tool_calls_json import NAME, CallSyntax

_QUOTE = "<![CDATA["
_DEEPEST = 8
"""The maximum number of levels of elements that the grammar describes; deeper elements may be any text."""


@dataclass(frozen=True)
class Tagged(CallSyntax):
    """Tool calls in which the function's name and each argument are between marks, as in
    `<function=name><parameter=key>value</parameter></function>`."""

    head: str
    """A regular expression for the text before the first argument, in which NAME stands for the name. It begins with
    one of `marks`."""
    key: str
    """A regular expression for the text before a value, in which KEY stands for the argument's name. Its optional group
    `is_text` states whether the value is a string."""
    close: str
    """The mark that ends a value."""
    end: str
    """A regular expression for the end of the arguments."""
    marks: tuple[str, ...]  # type: ignore[misc]
    written: tuple[str, str, str]
    """The texts of the grammar before the arguments, before a value, and after the arguments.

    {name} stands for the function's name, {key} for the argument's name, {kind} for the JSON type of its value,
    {is_text} for whether that is a string.
    """
    tail: str = ""
    """A regular expression for the text that may follow `end`."""
    after: str = ""
    """The text after `close` in the grammar."""
    trims: bool = False
    """Whether a line break on either side of a value is removed."""
    may_quote: bool = False
    """Whether a value may be in a CDATA section."""

    def read(self, reader: OutputReader) -> Steps[bool]:
        found = yield from reader.match(regex.compile(self.head.replace("NAME", f"(?P<name>{NAME})")))
        if found is None or found["name"] not in reader.tools:
            return False
        reader.take(found.end())
        reader.call(found["name"])
        yield from self._read_arguments(reader, properties_of(reader.tools[found["name"]]))
        reader.end_call()
        if not reader.is_full:
            yield from reader.tail(regex.compile(rf"(?:\s*{self.end})?{self.tail}"))
        return True

    def _read_arguments(self, reader: OutputReader, schemas: Mapping[str, Any]) -> Steps[None]:
        key = self.key.replace("KEY", "(?P<key>.{1,200}?)")
        pattern, separator = regex.compile(rf"\s*(?:{key}|(?P<end>{self.end}))", regex.S), "{"
        while found := (yield from reader.match(pattern)):
            reader.take(found.end())
            if found["end"] is not None:
                break
            reader.arguments(f"{separator}{json.dumps(found['key'], ensure_ascii=False)}: ")
            separator = ", "
            if not (yield from self._read_value(reader, found, schemas.get(found["key"], {}))):
                return
        reader.arguments("}" if separator == ", " else "{}")

    def _read_value(self, reader: OutputReader, found: regex.Match[str], schema: Any) -> Steps[bool]:
        """Consume an argument's value and the mark after it. Return False if the mark is missing. Strings are passed on
        while they are generated, other values when they are complete."""
        groups = found.groupdict()
        close = self.close
        if self.may_quote and (yield from reader.begins_with((_QUOTE,))):
            reader.take(len(_QUOTE))
            close = f"]]>{close}"
        if self.trims:
            while not reader.rest and not reader.is_over:
                yield
            reader.take(reader.rest.startswith("\n"))
        if groups["is_text"] in ("true", "string") if groups.get("is_text") else is_text(schema):
            reader.arguments('"')
            has_ended = yield from self._until(reader, close, lambda text: reader.arguments(_escaped(text)))
            reader.arguments('"' if has_ended else "")
            return has_ended
        text: list[str] = []
        has_ended = yield from self._until(reader, close, text.append)
        if has_ended:
            value = value_of("".join(text), {} if groups.get("is_text") else schema)
            reader.arguments(json.dumps(value, ensure_ascii=False))
        return has_ended

    def _until(self, reader: OutputReader, close: str, show: Callable[[str], None]) -> Steps[bool]:
        """Pass the text of an argument's value to the function `show`, and consume the mark `close` after it. Return
        False if the mark is missing."""
        mark = yield from reader.until((f"\n{close}", close) if self.trims else (close,), show)
        reader.take(len(mark or ""))
        return mark is not None

    def rules(self, rules: Rules, function: Mapping[str, Any]) -> str:
        parameters = parameters_of(function)
        begin, before, end = (text.replace("{name}", function["name"]) for text in self.written)
        arguments = [
            (self._argument(rules, before.replace("{key}", key), schema, parameters), must)
            for key, schema, must in arguments_of(parameters)
        ]
        return rules.add(rules.text(begin), rules.in_sequence(arguments, ""), rules.text(end))

    def _argument(self, rules: Rules, before: str, schema: Mapping[str, Any], root: Mapping[str, Any]) -> str:
        kinds = types_of(schema)
        kind = "string" if "string" in kinds else min(kinds, default="object").replace("integer", "number")
        before = before.replace("{kind}", kind).replace("{is_text}", json.dumps("string" in kinds))
        return rules.add(rules.text(before), self._value(rules, schema, root), rules.text(self.after))

    def _value(self, rules: Rules, schema: Mapping[str, Any], root: Mapping[str, Any]) -> str:
        """Add a grammar rule that matches an argument's value and the mark after it. Return the rule's name."""
        space = "\n" if self.trims else ""
        if texts := fixed_texts(schema):
            return rules.add(rules.any_of([rules.text(space + text + space + self.close) for text in texts]))
        if "string" in types_of(schema):
            return rules.add(rules.text(space), rules.any_text(space + self.close, pattern_of(schema)))
        return rules.add(rules.text(space), rules.json(standing_alone(schema, root)), rules.text(space + self.close))


@dataclass(frozen=True)
class Nested(CallSyntax):
    """Tool calls whose arguments are XML elements, which may contain elements. The text `space` stands before every
    mark."""

    space: str
    begin: str
    end: str

    @property
    def marks(self) -> tuple[str, ...]:  # type: ignore[override]
        return (self.space + self.begin, f'{self.space}<invoke name="')

    def read(self, reader: OutputReader) -> Steps[bool]:
        space = regex.escape(self.space)
        head = rf'(?:{space}{regex.escape(self.begin)}\s*)?{space}<invoke name="(?P<name>{NAME})">'
        found = yield from reader.match(regex.compile(head))
        if found is None or found["name"] not in reader.tools:
            return False
        reader.take(found.end())
        reader.call(found["name"])
        schemas, separator = properties_of(reader.tools[found["name"]]), "{"
        while key := (yield from reader.match(regex.compile(rf"\s*{space}<(?P<key>[\w.-]+)>"))):
            reader.take(key.end())
            text = yield from self._inside(reader, key["key"])
            if text is None:
                return True
            value = self._value_of(text, schemas.get(key["key"], {}), reader.tools[found["name"]])
            reader.arguments(f"{separator}{json.dumps({key['key']: value}, ensure_ascii=False)[1:-1]}")
            separator = ", "
        reader.arguments("}" if separator == ", " else "{}")
        reader.end_call()
        if not reader.is_full:
            yield from reader.tail(regex.compile(rf"(?:\s*{space}</invoke>)?(?:\s*{space}{regex.escape(self.end)})?"))
        return True

    def _inside(self, reader: OutputReader, key: str) -> Steps[str | None]:
        """Consume an element's content and end mark, and return the content; None if the end mark is missing."""
        taken, depth, marks = [""], 1, (f"{self.space}<{key}>", f"{self.space}</{key}>")
        while depth:
            mark = yield from reader.until(marks, taken.append)
            if mark is None:
                return None
            depth += 1 if mark == marks[0] else -1
            reader.take(len(mark))
            taken.append(mark if depth else "")
        return "".join(taken)

    def _value_of(self, text: str, schema: Any, root: Mapping[str, Any]) -> Any:
        """Return the JSON value of an element whose content is `text`, according to the element's schema."""
        schema = resolved(schema, root)
        kinds = types_of(schema)
        if not text.strip() and kinds and kinds <= {"array", "object", "null"}:
            return [] if "array" in kinds else {}
        if (kinds and not kinds & {"array", "object"}) or not text.lstrip().startswith(f"{self.space}<"):
            return value_of(text, schema)
        space = regex.escape(self.space)
        found = list(regex.finditer(rf"{space}<(?P<key>[\w.-]+)>(?P<inside>.*?){space}</(?P=key)>", text, regex.S))
        if {each["key"] for each in found} == {"item"} and (not kinds or "array" in kinds):
            inner = part_of(schema, "items")
            return [self._value_of(each["inside"], inner, root) for each in found]
        inner = part_of(schema, "properties")
        return {each["key"]: self._value_of(each["inside"], inner.get(each["key"], {}), root) for each in found}

    def rules(self, rules: Rules, function: Mapping[str, Any]) -> str:
        parameters = parameters_of(function)
        begin = f'{self.space}{self.begin}\n{self.space}<invoke name="{function["name"]}">'
        return rules.add(
            rules.text(begin),
            self._elements(rules, parameters, parameters, _DEEPEST),
            rules.text(f"{self.space}</invoke>\n{self.space}{self.end}"),
        )

    def _elements(self, rules: Rules, schema: Mapping[str, Any], root: Mapping[str, Any], deepest: int) -> str:
        wanted = [
            (rules.add(rules.text(f"{self.space}<{key}>"), self._element(rules, key, inner, root, deepest)), must)
            for key, inner, must in arguments_of(schema, root)
        ]
        return rules.in_sequence(wanted, "")

    def _element(self, rules: Rules, key: str, schema: Mapping[str, Any], root: Mapping[str, Any], deepest: int) -> str:
        """Add a grammar rule that matches an element's content and its end mark. Return the rule's name."""
        close = f"{self.space}</{key}>"
        if texts := fixed_texts(schema):
            return rules.any_of([rules.text(text + close) for text in texts])
        if others := alternatives(schema):
            return rules.any_of([self._element(rules, key, resolved(each, root), root, deepest) for each in others])
        kinds = types_of(schema)
        if "string" in kinds or not deepest:
            return rules.any_text(close, pattern_of(schema))
        if kinds == {"object"}:
            return rules.add(self._elements(rules, schema, root, deepest - 1), rules.text(close))
        if kinds == {"array"}:
            inner = self._element(rules, "item", resolved(schema.get("items"), root), root, deepest - 1)
            item = rules.add(rules.text(f"{self.space}<item>"), inner)
            return rules.add(f"{item}*", rules.text(close))
        return rules.add(rules.json(standing_alone(schema, root)), rules.text(close))


def _escaped(text: str) -> str:
    """Return a text with the escapes of a JSON string, without quotation marks."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
