"""The formats of model output: reasoning, answer and tool calls. The chat template determines the format.

    <think>I look it up.</think>Wait.<tool_call>{"name": "warmth", "arguments": {"city": "Oslo"}}</tool_call>
    reasoning                   answer call

A call within reasoning counts as a call only if the reasoning does not end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import regex

from smoe.server.output.output_reader import OutputReader, ReadsFrom, Steps
from smoe.server.output.rules import Rules
from smoe.server.output.tool_calls_json import CallSyntax

At = Literal["beginning", "reasoning", "within reasoning", "answer"]
"""The position in the output's structure at which a prompt ends: before any output, before reasoning, within reasoning,
or within an answer."""
IN_REASONING: tuple[At, ...] = ("reasoning", "within reasoning")


class Marks(NamedTuple):
    """The two strings that stand before and after a part of the output, such as `<think>` and `</think>` around
    reasoning."""

    begin: str
    end: str


@dataclass(frozen=True)
class OutputFormat:
    """The output format of most models: reasoning, then an answer that may contain tool calls."""

    reasoning: Marks | None = None
    calls: CallSyntax | None = None
    left_out: tuple[str, ...] = ()
    """The marks around answers; the marks are removed."""
    opening: str = ""
    """A string at the start of an answer that is removed."""
    reasons_again: bool = False
    """Whether the model may write reasoning again after an answer."""
    answered: str = ""
    """The text before an answer, such as the rest of a message's header."""

    def reads(self, at: At, has_tools: bool) -> ReadsFrom:
        """Return the generator function that parses one text in this format."""
        calls = self.calls if has_tools else None

        def read(reader: OutputReader) -> Steps[None]:
            if self.reasoning is not None and at != "answer":
                yield from self._read_reasoning(reader, calls, at)
            yield from self._read_answer(reader, calls)

        return read

    @property
    def texts(self) -> str:
        """All strings that have a meaning in this format, joined to one string."""
        return "\n".join([*(self.reasoning or ()), *self.left_out, "" if self.calls is None else self.calls.texts])

    @property
    def reasons(self) -> bool:
        """Whether the model may write reasoning."""
        return self.reasoning is not None

    @property
    def has_calls(self) -> bool:
        """Whether the syntax of the model's tool calls is known."""
        return self.calls is not None

    def place_of(self, prompt: str) -> At:
        """Return the position in the output's structure at which a prompt ends. `prompt`: the last characters of the
        prompt."""
        is_reasoning = self.reasoning is not None and prompt.rstrip().endswith(self.reasoning.begin)
        return "reasoning" if is_reasoning else "beginning"

    def place_within(self, text: str) -> At:
        """Return the position in the output's structure at which `text`, an answer to be continued, ends."""
        if self.reasoning is None or text.rfind(self.reasoning.begin) <= text.rfind(self.reasoning.end):
            return "answer"
        return "within reasoning"

    def ways_out(self, tools: Sequence[str]) -> list[str]:
        """Return the texts by which reasoning can end: up to the beginning of an answer, or of a call of one of
        `tools`. Empty if the format has no marks around reasoning."""
        return [] if self.reasoning is None else [self.reasoning.end]

    def before_enforced(self, at: At, *, is_call: bool) -> str:
        """Return the text between a prompt that ends at `at` and an answer that must match a grammar: the model writes
        no reasoning before it. `is_call`: whether the grammar is one of those with calls."""
        return self.reasoning.end if self.reasoning is not None and at in IN_REASONING else ""

    def must_call(self, rules: Rules, functions: Sequence[Mapping[str, Any]]) -> str:
        """Return a grammar that allows only a tool call of one of the functions."""
        return rules.lark(self._calls_of(rules, functions))

    def can_call_or_json(self, schema: Mapping[str, Any]) -> bool:
        """Return whether `call_or_json` works: a call must differ from JSON of the schema in its first character,
        because a grammar's lexer does not go back."""
        first = "{" if schema.get("type") == "object" else "{["
        return self.calls is not None and not any(self.calls.begins(character) for character in first)

    def call_or_json(self, rules: Rules, functions: Sequence[Mapping[str, Any]], schema: Mapping[str, Any]) -> str:
        """Return a grammar that allows a tool call of one of the functions, or an answer in JSON of a schema."""
        return rules.lark([*self._calls_of(rules, functions), rules.add(rules.text(self.answered), rules.json(schema))])

    def text_or_calls(self, rules: Rules, functions: Sequence[Mapping[str, Any]], ends: Sequence[int]) -> str | None:
        """Return a grammar of any text that may contain calls of the functions, each after the token by which calls
        begin in this format. None if calls begin with no token of their own. `ends`: the model's end tokens."""
        calls = self._calls_of(rules, functions)
        begins = {token for call in calls if (token := rules.first_token(call)) is not None}
        if not begins or not all(rules.first_token(call) in begins for call in calls):
            return None
        excluded = ",".join(map(str, sorted({*begins, *ends})))
        text = rules.add(f"<[^{excluded}]>*")
        again = rules.add(rules.any_of(calls), text)
        return rules.lark([rules.add(text, f"{again}*")])

    def _calls_of(self, rules: Rules, functions: Sequence[Mapping[str, Any]]) -> list[str]:
        """Add the rules of a call of each function, and return their names."""
        assert self.calls is not None, "a format without calls has no grammar of them"
        return [self.calls.rules(rules, function) for function in functions]

    def _read_reasoning(self, reader: OutputReader, calls: CallSyntax | None, at: At) -> Steps[None]:
        assert self.reasoning is not None, "this is called for formats with reasoning"
        if at == "beginning" and not (yield from self._begins_reasoning(reader)):
            return
        reader.begin_reasoning()
        if at != "within reasoning":
            yield from reader.blanks()
        end = self.reasoning.end
        marks = (end, *(calls.marks if calls is not None else ()))
        while (mark := (yield from reader.until(marks, reader.reasoning, strips=True))) not in (end, None):
            while end not in reader.rest and not reader.is_over:
                yield
            if end in reader.rest:
                marks = (end,)
            elif (yield from self._ends_by_call(reader, calls)):
                break
        reader.end_reasoning()
        if mark == end:
            yield from reader.blanks()
            reader.take(len(end))
            yield from reader.blanks()

    def _ends_by_call(self, reader: OutputReader, calls: CallSyntax | None) -> Steps[bool]:
        """Consume tool calls within reasoning that has no end mark. Without calls, the call's mark is added to the
        reasoning as text."""
        blank = yield from reader.blanks()
        if calls is not None and (yield from calls.read(reader)):
            return True
        reader.reasoning(blank + reader.take(1))
        return False

    def _begins_reasoning(self, reader: OutputReader) -> Steps[bool]:
        """Consume the mark that begins reasoning and the white space before it. Return whether there was such a
        mark."""
        assert self.reasoning is not None, "this is called for formats with reasoning"
        pattern = rf"\s*(?:(?P<begin>{regex.escape(self.reasoning.begin)})|(?P<end>{regex.escape(self.reasoning.end)}))"
        found = yield from reader.match(regex.compile(pattern))
        if found is None or not found[0]:
            return False
        reader.take(found.end() if found["begin"] else found.start("end"))
        return True

    def _read_answer(self, reader: OutputReader, calls: CallSyntax | None) -> Steps[None]:
        again = (self.reasoning.begin, self.reasoning.end) if self.reasons_again and self.reasoning else ()
        marks = (*again, *self.left_out, *(calls.marks if calls is not None else ()))
        if self.opening and (yield from reader.begins_with((self.opening,))):
            reader.take(len(self.opening))
        is_first = True
        while not reader.is_full:
            if calls is not None and (is_first or reader.calls):
                yield from self._read_calls(reader, calls, is_first)
            is_first = False
            mark = None if reader.is_full else (yield from reader.until(marks, reader.answer))
            if mark is None:
                return
            if again and mark == again[0]:
                yield from self._read_reasoning(reader, calls, "beginning")
            elif mark in again or mark in self.left_out:
                reader.take(len(mark))
            elif calls is not None and not (yield from self._read_calls(reader, calls, False)):
                reader.answer(reader.take(len(mark)))

    def _read_calls(self, reader: OutputReader, calls: CallSyntax, is_first: bool) -> Steps[bool]:
        """Consume successive tool calls and the white space around them. Return whether there were any calls."""
        blank, found = (yield from reader.blanks(calls.separators)) if is_first else "", False
        while not reader.is_full:
            mark = yield from reader.begins_with(calls.marks)
            is_call = mark is not None or ((is_first or found) and calls.begins(reader.rest))
            if not is_call or not (yield from calls.read(reader)):
                break
            found = True
            blank = yield from reader.blanks(calls.separators)
        if not reader.is_full and (reader.rest or not found):
            reader.answer(blank)
        return found


@dataclass(frozen=True)
class Channels(OutputFormat):
    """The output format of messages, each with a header that names the recipient: the user, a tool, or the model
    itself.

    <|channel|>analysis<|message|>I look it up.<|end|><|start|>assistant to=functions.warmth<|message|>{...}<|call|>
    header             mark       body         end     header
    """

    mark: str = "<|message|>"
    """The mark at the end of a header."""
    ends: tuple[str, ...] = ()
    """The marks that end a message."""
    header: regex.Pattern[str] = field(default=regex.compile(""))
    """A regular expression that finds the recipient in a header: a tool (group `tool`), the model (`reasoning`), or the
    user."""
    begins: tuple[str, ...] = ()
    """The marks with which a header begins."""
    author: str = "<|start|>assistant"
    """The beginning of the header of a message that the model writes. Prompts end with it."""
    written: tuple[str, str] = ("", "")
    """The rest of the header of a call, and the text after the call's arguments; {name} stands for the function's
    name."""

    @property
    def reasons(self) -> bool:
        return True

    @property
    def has_calls(self) -> bool:
        return True

    @property
    def texts(self) -> str:
        return "\n".join([super().texts, self.mark, *self.ends, *self.begins, self.answered, *self.written])

    def reads(self, at: At, has_tools: bool) -> ReadsFrom:
        def read(reader: OutputReader) -> Steps[None]:
            if at == "beginning":
                yield from reader.blanks("\n")
                if (yield from reader.begins_with(self.begins)) is None:
                    yield from reader.until(self.begins, reader.answer)  # a text without headers
            elif (yield from self._read_body(reader, "", at != "answer")) is None:
                return
            while not reader.is_full and (yield from self._read_message(reader)) is not None:
                pass

        return read

    def place_of(self, prompt: str) -> At:
        return "beginning"

    def place_within(self, text: str) -> At:
        return "answer"

    def ways_out(self, tools: Sequence[str]) -> list[str]:
        headers = [self.answered, *(self.written[0].replace("{name}", name) for name in tools)]
        return [f"{end}{self.author}{header}" for end in super().ways_out(tools) for header in headers]

    def before_enforced(self, at: At, *, is_call: bool) -> str:
        return self.answered if at == "beginning" and not is_call else ""

    def _read_message(self, reader: OutputReader) -> Steps[str | None]:
        """Consume the header and the body of one message. Return the mark that ended the body, or None at the end of
        the text."""
        header: list[str] = []
        if (yield from reader.until((self.mark,), header.append)) is None:
            return None
        reader.take(len(self.mark))
        found = self.header.search("".join(header))
        groups = found.groupdict() if found is not None else {}
        return (yield from self._read_body(reader, groups.get("tool") or "", bool(groups.get("reasoning"))))

    def _read_body(self, reader: OutputReader, tool: str, is_reasoning: bool) -> Steps[str | None]:
        """Consume a message's body and the mark after it. Return the mark."""
        if tool in reader.tools and (yield from self._read_call(reader, tool)) and reader.is_full:
            return None
        if is_reasoning and not tool:
            reader.begin_reasoning()
        show = (lambda text: None) if tool else reader.reasoning if is_reasoning else reader.answer
        mark = yield from reader.until(self.ends, show, strips=reader.is_reasoning)
        reader.end_reasoning()
        if mark is not None and mark not in self.begins:
            yield from reader.blanks()
            reader.take(len(mark))
        return mark

    def _read_call(self, reader: OutputReader, tool: str) -> Steps[bool]:
        """Consume a message's body as a call of `tool`. Return whether the body was a call."""
        yield from reader.blanks()
        if self.calls is not None:
            mark = yield from reader.begins_with(self.calls.marks)
            return mark is not None and (yield from self.calls.read(reader))
        reader.call(tool)
        yield from reader.json_arguments()
        reader.end_call()
        return True

    def can_call_or_json(self, schema: Mapping[str, Any]) -> bool:
        return True

    def text_or_calls(self, rules: Rules, functions: Sequence[Mapping[str, Any]], ends: Sequence[int]) -> str | None:
        return None  # every message begins with the same token

    def _calls_of(self, rules: Rules, functions: Sequence[Mapping[str, Any]]) -> list[str]:
        starts = []
        for function in functions:
            begin, end = (text.replace("{name}", function["name"]) for text in self.written)
            call = self.calls.rules(rules, function) if self.calls is not None else rules.parameters(function)
            starts.append(rules.add(rules.text(begin), call, rules.text(end)))
        return starts
