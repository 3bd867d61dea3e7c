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
    """One call."""

    id: str
    name: str
    arguments: str
    """A JSON object."""


class Parser(ABC):
    """Reads one text as it comes; `push` and `flush` return what is text, and the calls that are whole."""

    tokens: ClassVar[tuple[str, ...]] = ()
    """What the parser looks for. Where the tokenizer leaves one out of texts, as a special token, the caller of `push`
    writes it."""
    is_full = False
    """Whether as many calls have come as may; what follows is left out."""

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


class CallParser(Parser):
    """What the forms have in common. The text that has come and is neither shown nor read begins

    - with text, in which the next marker is looked for,
    - with what may be a call (`_is_call`),
    - or after a call (`_is_after`), with what separates it from the next one, which is not shown.
    """

    marker: ClassVar[str]
    """What begins a call."""
    head: ClassVar[re.Pattern[str]]
    """A call up to where its JSON begins; group 1, if there is one, is the name of the tool."""
    partial_head: ClassVar[re.Pattern[str]]
    """The beginnings of a `head`, as a whole."""
    end: ClassVar[str] = ""
    """What may end a call."""
    separators: ClassVar[str] = " \t\r\n"
    """Characters between calls."""
    next_marker: ClassVar[str] = ""
    """What begins a call after another, where it is not `marker`."""
    closing: ClassVar[str] = ""
    """What may end all calls."""
    id_letters: ClassVar[int] = 24
    id_prefix: ClassVar[str] = "call_"

    def __init__(self, offered: Collection[str], is_single: bool = False) -> None:
        """`offered`: the names of the tools that may be called. `is_single`: whether the first call is the last."""
        self._offered, self._is_single = frozenset(offered), is_single
        self._held = ""
        self._is_call = self._is_after = False
        self._has_called = self._has_ended = False
        """Whether a call has come; whether its `end` has."""
        self._json: JsonEnd | None = None
        self._skipped = ""
        """The separators before what may be a call."""
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
        """Go on by one part of the held text; whether there may be another."""
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
        """So many characters are no call; None: the marker, and what comes after it is looked at again."""
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
        """Whether another call follows."""
        return text.startswith(self.marker)

    def _calls_in(self, text: str, name: str | None) -> list[ToolCall]:
        """The calls that a JSON text is: the arguments of `name`, one call or a list; none where it is not."""
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
        """Those of a call, as a JSON object; None where they are something else. Raises `ValueError` for a text that
        is no JSON."""
        given = value.get("arguments", value.get("parameters"))
        if isinstance(given, str):
            given = json.loads(given, strict=False) if given.strip() else None
        if given is None:
            return "{}"
        return json.dumps(given, ensure_ascii=False, allow_nan=False) if isinstance(given, dict) else None

    def _new_id(self) -> str:
        return self.id_prefix + "".join(secrets.choice(_ALPHABET) for _ in range(self.id_letters))


class Hermes(CallParser):
    """`<tool_call>` and `</tool_call>` around each."""

    marker = "<tool_call>"
    end = "</tool_call>"
    tokens = (marker, end)
    head = re.compile(r"<tool_call>\s*(?=[{\[])")
    partial_head = re.compile(r"<tool_call>\s*")


class Mistral(CallParser):
    """A marker before each call, or before a list of them."""

    marker = "[TOOL_CALLS]"
    tokens = (marker, "[CALL_ID]", "[ARGS]")
    head = re.compile(
        r"\[TOOL_CALLS\]\s*(?:([\w.-]{1,200})\s*(?:\[CALL_ID\]\w{1,100})?(?:\[ARGS\])?\s*(?=\{)|(?=[\[{]))"
    )
    partial_head = re.compile(r"\[TOOL_CALLS\]\s*[\w.-]{0,200}\s*(?:\[[\w\[\]]{0,200})?\s*")
    id_prefix, id_letters = "", 9
    """Their templates take ids of nine characters only."""


class Llama(CallParser):
    """JSON at the beginning of a text, or after a marker."""

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
        """JSON without arguments is an answer: nothing but them marks a call."""
        return super()._arguments(value) if value.keys() & {"arguments", "parameters"} else None


def _beginnings(text: str) -> str:
    """A pattern of all beginnings of a text, itself and none of it too."""
    pattern = ""
    for letter in reversed(text):
        pattern = f"(?:{re.escape(letter)}{pattern})?"
    return pattern


def _sectioned(marker: str, begin: str, separator: str) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """`head` and `partial_head` of calls in a section that `marker` begins: `begin`, a name, `separator`, JSON."""
    section, name = rf"(?:{re.escape(marker)}\s*)?", r"[\w.:-]"
    head = rf"{section}{re.escape(begin)}\s*({name}{{1,200}})\s*{re.escape(separator)}\s*(?=\{{)"
    partial = rf"{section}(?:{_beginnings(begin)}|{re.escape(begin)}\s*{name}{{0,200}}\s*{_beginnings(separator)}\s*)"
    return re.compile(head), re.compile(partial)


class _InSection(CallParser):
    """Calls in a section whose marker may be missing; each begins with `next_marker`."""

    def _begins_call(self, text: str) -> bool:
        return text.startswith((self.marker, self.next_marker))


class Kimi(_InSection):
    """A section of calls, each with an id that is made of its name and its number."""

    marker, closing = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
    next_marker, end = "<|tool_call_begin|>", "<|tool_call_end|>"
    tokens = (marker, next_marker, "<|tool_call_argument_begin|>", end, closing)
    head, partial_head = _sectioned(marker, next_marker, "<|tool_call_argument_begin|>")

    def _calls_in(self, text: str, name: str | None) -> list[ToolCall]:
        """The calls in a text, with the model's own ids, which its template writes unchanged."""
        assert name is not None
        plain = name.removeprefix("functions.").rpartition(":")[0] or name
        return [call._replace(id=name) for call in super()._calls_in(text, plain)]


class DeepSeek(_InSection):
    """A section of calls, name and JSON."""

    marker, closing = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
    next_marker, end = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
    tokens = (marker, next_marker, "<｜tool▁sep｜>", end, closing)
    head, partial_head = _sectioned(marker, next_marker, "<｜tool▁sep｜>")


class DeepSeekR1(DeepSeek):
    """Its predecessors' form: the JSON in a block."""

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
    """The form that a chat template asks for; None: unknown."""
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
