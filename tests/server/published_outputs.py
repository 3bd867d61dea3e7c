"""What llama.cpp's chat tests publish: texts of models, and what is to be read in them.

`cases(folder)` reads `tests/test-chat.cpp` of a source archive: of each `tst.test("...")...run()` the template, the
text, and the content, reasoning and calls that are expected. The file is C++; of its expressions only those are read
that cases are made of: strings, lists, the named messages and the functions that make such.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_TOKEN = re.compile(
    r"""(?P<raw>R"(?P<fence>[^()\\\s"]*)\((?P<inside>.*?)\)(?P=fence)")|(?P<text>"(?:[^"\\]|\\.)*")"""
    r"""|(?P<name>[A-Za-z_]\w*(?:::\w+)*)|(?P<number>-?\d+)|(?P<blank>\s+|//[^\n]*|/\*.*?\*/)|(?P<sign>.)""",
    re.S,
)
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|.)", re.S)
_PLAIN = {"n": "\n", "t": "\t", "r": "\r", "0": "\0"}
_TESTER = re.compile(r"auto (?P<name>tst\d?) *= peg_tester\((?P<path>\"[^\"]*\"|\w+)")
_TOOL = re.compile(r"static common_chat_tool (\w+)(?=\s*\{)")
_TEXT = re.compile(r"^ *(?:static )?const std::string (\w+)\s*=", re.M)
_PATHS = re.compile(r"for \(const (?:auto|char) [&*] (?P<name>\w+) :\s*(?P<list>\{|std::vector<std::string>\{)")


@dataclass(frozen=True)
class Call:
    name: str
    arguments: str


@dataclass(frozen=True)
class Tool:
    name: str
    description: str
    parameters: str

    @property
    def for_chat(self) -> dict[str, Any]:
        """As chat completions have it."""
        function = {"name": self.name, "description": self.description, "parameters": json.loads(self.parameters)}
        return {"type": "function", "function": function}


@dataclass(frozen=True)
class Expected:
    content: str = ""
    reasoning: str = ""
    calls: tuple[Call, ...] = ()


@dataclass(frozen=True)
class Case:
    template: str
    """The file's path in the archive."""
    line: int
    text: str
    expected: Expected
    options: dict[str, Any] = field(default_factory=dict)
    """What else the case sets, by llama.cpp's names: tools, enable_thinking, is_partial ..."""


class UnreadError(ValueError):
    """An expression of another kind."""


def _unescaped(text: str) -> str:
    def one(found: re.Match[str]) -> str:
        code = found[1]
        return chr(int(code[1:], 16)) if code[0] in "xu" and len(code) > 1 else _PLAIN.get(code, code)

    return _ESCAPE.sub(one, text)


class _Reader:
    """Reads expressions from one place of the source on."""

    def __init__(self, source: str, place: int, names: dict[str, Any]) -> None:
        self._source, self.place, self._names = source, place, names
        self._ahead: re.Match[str] | None = None

    def _peek(self) -> re.Match[str]:
        while self._ahead is None:
            found = _TOKEN.match(self._source, self.place)
            if found is None:
                raise UnreadError("the end of the file")
            if found.lastgroup == "blank":
                self.place = found.end()
            else:
                self._ahead = found
        return self._ahead

    def _next(self) -> re.Match[str]:
        found = self._peek()
        self._ahead, self.place = None, found.end()
        return found

    def take(self, sign: str) -> bool:
        if self._peek()[0] == sign:
            self._next()
            return True
        return False

    def items(self, end: str) -> list[Any]:
        """Expressions up to `end`, the opening bracket having been read."""
        found: list[Any] = []
        while not self.take(end):
            if self.take("."):  # a field by its name
                self._next()
                self.take("=")
            found.append(self.value())
            self.take(",")
        return found

    def value(self) -> Any:
        found = self._part()
        while self.take("+"):
            found = found + self._part()
        return found

    def _part(self) -> Any:
        token = self._next()
        if token["sign"] == "{":
            return self.items("}")
        if token["number"]:
            return int(token[0])
        if token["name"]:
            return self._named(token[0])
        text = self._text(token)
        while (more := self._peek())["raw"] or more["text"]:
            text += self._text(self._next())
        return text

    def _text(self, token: re.Match[str]) -> str:
        if token["raw"]:
            return token["inside"]
        if not token["text"]:
            raise UnreadError(token[0])
        return _unescaped(token["text"][1:-1])

    def _named(self, name: str) -> Any:
        if self.take("("):
            given = self.items(")")
            if name == "std::string":
                return given[0]
            if name not in _FUNCTIONS:
                raise UnreadError(name)
            return _FUNCTIONS[name](*given)
        if self.take("{"):
            self.items("}")
        return self._names.get(name, name)


def _simple(content: str = "", reasoning: str = "", name: str = "", arguments: str = "", _id: str = "") -> Expected:
    return Expected(content, reasoning, (Call(name, arguments),) if name else ())


_FUNCTIONS: dict[str, Any] = {
    "simple_assist_msg": _simple,
    "message_with_tool_calls": lambda name, arguments: _simple("", "", name, arguments),
    "message_with_tool_calls_and_reasoning": lambda name, arguments, reasoning: _simple("", reasoning, name, arguments),
    "message_with_reasoning_content_and_multiple_tool_calls": lambda reasoning, content, calls: Expected(
        content, reasoning, tuple(Call(*call) for call in calls)
    ),
    "message_with_content_and_tool_call": lambda content, name, arguments: _simple(content, "", name, arguments),
    "message_with_reasoning_and_tool_call": lambda reasoning, name, arguments: _simple("", reasoning, name, arguments),
}


def cases(folder: Path) -> tuple[list[Case], list[str]]:
    """All cases of an archive, and of those that could not be read the line and why."""
    source = (folder / "tests" / "test-chat.cpp").read_text(encoding="utf8")
    names: dict[str, Any] = {"true": True, "false": False}
    for found in _TOOL.finditer(source):
        names[found[1]] = Tool(*_Reader(source, found.end(), names).value()[:3])
    for found in _TEXT.finditer(source):
        with suppress(UnreadError):
            names[found[1]] = _Reader(source, found.end(), names).value()
    for found in re.finditer(r"^ *(?:static |const )*(?:auto|common_chat_msg) (\w+)\s*=", source, re.M):
        with suppress(UnreadError):  # others than cases have some of their own
            value = _Reader(source, found.end(), names).value()
            if isinstance(value, Expected):
                names[found[1]] = value
    read: list[Case] = []
    unread: list[str] = []
    for paths, place in _tests(source, names):
        line = source.count("\n", 0, place) + 1
        try:
            text, expected, options = _chain(_Reader(source, place, names))
        except UnreadError as error:
            unread.append(f"{line}: {error}")
            continue
        read += [Case(path, line, text, expected, options) for path in paths]
    return read, unread


def _tests(source: str, names: dict[str, Any]) -> Iterator[tuple[list[str], int]]:
    """Of every `tst.test(`, the templates that it is run with, and the place of its arguments."""
    lists: dict[str, list[str]] = {}
    for found in _PATHS.finditer(source):
        values = _Reader(source, found.end(), names).items("}")
        lists.setdefault(found["name"], []).extend(value for value in values if isinstance(value, str))
    lists["template_path"] = lists.pop("tmpl", [])
    testers: dict[str, list[str]] = {}
    for found in re.finditer(_TESTER.pattern + r"|(?P<of>tst\d?)\.test\(", source):
        if found["of"]:
            yield testers.get(found["of"], []), found.end()
        else:
            path = found["path"]
            testers[found["name"]] = [path.strip('"')] if path.startswith('"') else lists.get(path, [])


def _chain(reader: _Reader) -> tuple[str, Expected, dict[str, Any]]:
    """The arguments of `test`, then `.name(...)` up to `.run()`."""
    (text,) = reader.items(")")
    expected, options = Expected(), {}
    while reader.take("."):
        name = reader._next()[0]
        if not reader.take("("):
            raise UnreadError(name)
        given = reader.items(")")
        if name == "run":
            break
        if name == "expect":
            expected = given[0]
        elif name == "expect_content":
            expected = Expected(given[0], expected.reasoning, expected.calls)
        elif name == "expect_reasoning":
            expected = Expected(expected.content, given[0], expected.calls)
        elif name == "expect_tool_calls":
            calls = tuple(Call(call[0], call[1]) for call in given[0])
            expected = Expected(expected.content, expected.reasoning, calls)
        else:
            options[name] = given[0] if given else True
    if not isinstance(text, str) or not isinstance(expected, Expected):
        raise UnreadError(f"{text!r:.40} {expected!r:.40}")
    return text, expected, options
