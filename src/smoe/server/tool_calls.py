"""Calls of tools in what a model writes. Each family has a form of its own, which its chat template shows.

| form | what the model writes |
| --- | --- |
| hermes (Qwen, Hermes) | `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number, after text or none |
| mistral | `[TOOL_CALLS][{"name": ..., "arguments": {...}}]`, or `[TOOL_CALLS]name[ARGS]{...}`, any number |
| llama | `{"name": ..., "parameters": {...}}` at the beginning or after `<|python_tag|>`, several with `;` in between |
| kimi (K2) | a section of calls: `functions.name:0`, a token, `{...}`, a token after each |
| deepseek (V3.1) | a section of calls: `name`, a token, `{...}`, a token after each |
| deepseek-r1 (R1, V3) | a section of calls: `function`, a token, `name`, a fenced block of JSON, a token after each |

A call ends where its JSON ends, whatever its strings contain. It names one of the tools that were offered. What begins
like a call and is none is text, and so is all that stands before, between and after calls.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import Any, ClassVar, NamedTuple

from smoe.generation.detokenizer import overlap
from smoe.server.json_end import JsonEnd

_ALPHABET = string.ascii_letters + string.digits


class ToolCall(NamedTuple):
    """One call of a tool."""

    id: str
    name: str
    arguments: str
    """The arguments as the text of a JSON object."""


class Parser(ABC):
    """Parses one text piece by piece; `push` and `flush` return visible text and complete calls."""

    tokens: ClassVar[tuple[str, ...]] = ()
    """The markers that the parser needs. Where decoding leaves one out as a special token, the caller adds its text to
    `push`."""
    is_full = False
    """Whether the allowed number of calls is complete; later text is ignored."""

    @abstractmethod
    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        """Parse the next piece of text."""

    @abstractmethod
    def flush(self) -> tuple[str, list[ToolCall]]:
        """Parse the end of the text."""


class PlainText(Parser):
    """A parser for texts without calls."""

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        return text, []

    def flush(self) -> tuple[str, list[ToolCall]]:
        return "", []


class CallParser(Parser):
    """The common parser of all formats. The text that is received but not yet returned (`_held`) begins

    - with text, in which the parser searches the next marker,
    - with a possible call (`_is_call`),
    - or, after a call (`_is_after`), with separators before the next call, which are not returned.
    """

    marker: ClassVar[str]
    """The text that begins a call."""
    head: ClassVar[re.Pattern[str]]
    """A pattern for a call up to the beginning of its JSON; group 1, if present, is the tool's name."""
    partial_head: ClassVar[re.Pattern[str]]
    """A pattern for every incomplete beginning of `head`."""
    end: ClassVar[str] = ""
    """Text that may end a call."""
    separators: ClassVar[str] = " \t\r\n"
    """Characters that may separate calls."""
    next_marker: ClassVar[str] = ""
    """The text that begins a second call, where it differs from `marker`."""
    closing: ClassVar[str] = ""
    """Text that may end the whole section of calls."""
    id_letters: ClassVar[int] = 24
    id_prefix: ClassVar[str] = "call_"

    def __init__(self, offered: Collection[str], is_single: bool = False) -> None:
        """`offered`: the names of the tools that may be called. `is_single`: whether the first call is the last."""
        self._offered, self._is_single = frozenset(offered), is_single
        self._held = ""
        self._is_call = self._is_after = False
        self._has_called = self._has_ended = False
        """Whether a call has been parsed; whether its `end` has."""
        self._json: JsonEnd | None = None
        self._skipped = ""
        """The separators before a possible call."""
        self._shown = ""
        self._calls: list[ToolCall] = []

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        self._held += text
        return self._read(is_last=False)

    def flush(self) -> tuple[str, list[ToolCall]]:
        return self._read(is_last=True)

    def _read(self, is_last: bool) -> tuple[str, list[ToolCall]]:
        while self._step(is_last):
            pass
        shown, calls = self._shown, self._calls
        self._shown, self._calls = "", []
        return shown, calls

    def _step(self, is_last: bool) -> bool:
        """Parse one part of the held text. Return whether there may be another part to parse."""
        if self.is_full:
            self._held = ""
            return False
        if self._is_call:
            return self._read_call(is_last)
        return self._read_separators(is_last) if self._is_after else self._read_text(is_last)

    def _read_text(self, is_last: bool) -> bool:
        place = self._held.find(self.marker)
        if place >= 0:
            self._show(place)
            self._is_call = True
            return True
        self._show(len(self._held) - (0 if is_last else overlap(self._held, self.marker)))
        return False

    def _show(self, length: int) -> None:
        self._shown, self._held = self._shown + self._held[:length], self._held[length:]

    def _read_call(self, is_last: bool) -> bool:
        head = self.head.match(self._held)
        if head is None:
            if not is_last and self.partial_head.fullmatch(self._held):
                return False
            return self._is_text()
        self._json = self._json or JsonEnd(head.end())
        end = self._json.find(self._held)
        if end is None:
            return (is_last or self._json.is_broken) and self._is_text()
        calls = self._calls_in(self._held[head.end() : end], head[1] if self.head.groups else None)
        if not calls:
            return self._is_text(end)
        self._calls += calls[:1] if self._is_single else calls
        self.is_full = self._is_single
        self._held, self._json, self._skipped = self._held[end:], None, ""
        self._is_call, self._is_after, self._has_called, self._has_ended = False, True, True, not self.end
        return True

    def _is_text(self, length: int | None = None) -> bool:
        """Treat the next `length` characters as text instead of a call; None: only the marker, and parse what follows
        it again."""
        if length is None:
            length = len(self.marker) if self._held.startswith(self.marker) else 1
        self._shown += self._skipped
        self._show(length)
        self._is_call, self._json, self._skipped = False, None, ""
        return True

    def _read_separators(self, is_last: bool) -> bool:
        rest = self._held.lstrip(self.separators)
        if not self._has_ended and rest.startswith(self.end):
            self._held, self._has_ended = rest.removeprefix(self.end), True
            return True
        if self._begins_call(rest):
            self._skipped, self._held = self._held[: len(self._held) - len(rest)], rest
            self._is_call, self._is_after = True, False
            return True
        if self._has_called and self.closing and rest.startswith(self.closing):
            self._held, self._has_ended = rest.removeprefix(self.closing), True
            return True
        may_end = (not self._has_ended and self.end.startswith(rest)) or self.closing.startswith(rest)
        if not is_last and (may_end or self.marker.startswith(rest) or self.next_marker.startswith(rest)):
            return False
        self._held = self._held if rest or not self._has_called else ""
        self._is_after = False
        return True

    def _begins_call(self, text: str) -> bool:
        """Return whether `text` begins another call."""
        return text.startswith(self.marker)

    def _calls_in(self, text: str, name: str | None) -> list[ToolCall]:
        """Return the calls in a JSON text: the arguments of tool `name`, one call, or a list of calls. Empty for
        anything else."""
        try:
            value = json.loads(text, strict=False)
            if name is not None:
                value = {"name": name, "arguments": value}
            calls = [self._call(each) for each in (value if isinstance(value, list) else [value])]
        except (ValueError, RecursionError):
            return []
        return [call for call in calls if call is not None] if None not in calls else []

    def _call(self, value: Any) -> ToolCall | None:
        if not isinstance(value, dict) or not isinstance(value.get("name"), str) or value["name"] not in self._offered:
            return None
        arguments = self._arguments(value)
        return None if arguments is None else ToolCall(self._new_id(), value["name"], arguments)

    def _arguments(self, value: dict[str, Any]) -> str | None:
        """Return a call's arguments as a JSON object; None for another type. Raises `ValueError` for invalid JSON."""
        given = value.get("arguments", value.get("parameters"))
        if isinstance(given, str):
            given = json.loads(given, strict=False) if given.strip() else None
        if given is None:
            return "{}"
        return json.dumps(given, ensure_ascii=False, allow_nan=False) if isinstance(given, dict) else None

    def _new_id(self) -> str:
        return self.id_prefix + "".join(secrets.choice(_ALPHABET) for _ in range(self.id_letters))


class Hermes(CallParser):
    """Calls between `<tool_call>` and `</tool_call>`."""

    marker = "<tool_call>"
    end = "</tool_call>"
    tokens = (marker, end)
    head = re.compile(r"<tool_call>\s*(?=[{\[])")
    partial_head = re.compile(r"<tool_call>\s*")


class Mistral(CallParser):
    """Calls after a marker: one marker before each call, or before a list of calls."""

    marker = "[TOOL_CALLS]"
    tokens = (marker, "[CALL_ID]", "[ARGS]")
    head = re.compile(
        r"\[TOOL_CALLS\]\s*(?:([\w.-]{1,200})\s*(?:\[CALL_ID\]\w{1,100})?(?:\[ARGS\])?\s*(?=\{)|(?=[\[{]))"
    )
    partial_head = re.compile(r"\[TOOL_CALLS\]\s*[\w.-]{0,200}\s*(?:\[[\w\[\]]{0,200})?\s*")
    id_prefix, id_letters = "", 9
    """Mistral's chat templates accept only ids of nine characters."""


class Llama(CallParser):
    """Calls as JSON at the beginning of a text, or after a marker."""

    marker = "<|python_tag|>"
    tokens = (marker,)
    head = re.compile(r"(?:<\|python_tag\|>)?\s*(?=\{)")
    partial_head = re.compile(r"<\|python_tag\|>\s*")
    separators = "; \t\r\n"

    def __init__(self, offered: Collection[str], is_single: bool = False) -> None:
        super().__init__(offered, is_single)
        self._is_after = self._has_ended = True

    def _begins_call(self, text: str) -> bool:
        return text.startswith((self.marker, "{"))

    def _arguments(self, value: dict[str, Any]) -> str | None:
        """Return None for JSON without arguments, which is an answer: only the arguments identify a call."""
        return super()._arguments(value) if value.keys() & {"arguments", "parameters"} else None


def _beginnings(text: str) -> str:
    """Return a pattern for every prefix of `text`, including the whole and the empty one."""
    pattern = ""
    for letter in reversed(text):
        pattern = f"(?:{re.escape(letter)}{pattern})?"
    return pattern


def _sectioned(marker: str, begin: str, separator: str) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Return `head` and `partial_head` for calls in a section: the section's `marker` (optional), `begin`, a name,
    `separator`, JSON."""
    section, name = rf"(?:{re.escape(marker)}\s*)?", r"[\w.:-]"
    head = rf"{section}{re.escape(begin)}\s*({name}{{1,200}})\s*{re.escape(separator)}\s*(?=\{{)"
    partial = rf"{section}(?:{_beginnings(begin)}|{re.escape(begin)}\s*{name}{{0,200}}\s*{_beginnings(separator)}\s*)"
    return re.compile(head), re.compile(partial)


class _InSection(CallParser):
    """Calls in a section whose marker may be missing; each call begins with `next_marker`."""

    def _begins_call(self, text: str) -> bool:
        return text.startswith((self.marker, self.next_marker))


class Kimi(_InSection):
    """A section of calls, each with an id that consists of its name and number."""

    marker, closing = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
    next_marker, end = "<|tool_call_begin|>", "<|tool_call_end|>"
    tokens = (marker, next_marker, "<|tool_call_argument_begin|>", end, closing)
    head, partial_head = _sectioned(marker, next_marker, "<|tool_call_argument_begin|>")

    def _calls_in(self, text: str, name: str | None) -> list[ToolCall]:
        """Return the calls in a text, with the model's own ids, which its chat template writes unchanged."""
        assert name is not None
        plain = name.removeprefix("functions.").rpartition(":")[0] or name
        return [call._replace(id=name) for call in super()._calls_in(text, plain)]


class DeepSeek(_InSection):
    """A section of calls, each a name and JSON."""

    marker, closing = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
    next_marker, end = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
    tokens = (marker, next_marker, "<｜tool▁sep｜>", end, closing)
    head, partial_head = _sectioned(marker, next_marker, "<｜tool▁sep｜>")


class DeepSeekR1(DeepSeek):
    """The format of R1 and V3, with the JSON in a fenced block."""

    end = "```<｜tool▁call▁end｜>"
    head, partial_head = _sectioned(DeepSeek.marker, f"{DeepSeek.next_marker}function<｜tool▁sep｜>", "```json")


PARSERS: dict[str, type[CallParser]] = {
    "hermes": Hermes,
    "mistral": Mistral,
    "llama": Llama,
    "kimi": Kimi,
    "deepseek": DeepSeek,
    "deepseek-r1": DeepSeekR1,
}


def form_of(template: str) -> str | None:
    """Return the format of tool calls that a chat template uses; None for an unknown format."""
    if Kimi.marker in template and "<|tool_call_argument_begin|>" in template:
        return "kimi"
    if DeepSeek.marker in template and "<｜tool▁sep｜>" in template:
        return "deepseek-r1" if "```json" in template else "deepseek"
    if "<tool_call>" in template and "<function=" not in template and "<arg_key>" not in template:
        return "hermes"
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<|python_tag|>" in template or ('"parameters"' in template and "ipython" in template):
        return "llama"
    return None
