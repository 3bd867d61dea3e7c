"""What the server does with the format of each published chat template: `python -m tests.server.format_matrix FOLDER`
prints a table of it, which `docs/output-formats.md` contains. FOLDER is a source tree of llama.cpp.

The calls are those that the template itself writes when a conversation contains them, so the template is the oracle.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import AddedToken

from smoe.conversation.chat_template import ChatTemplate
from smoe.conversation.conversation import Conversation, Ending
from smoe.errors import ChatTemplateError
from smoe.server.grammar import Grammars
from smoe.server.output.families import format_of
from smoe.server.output.output_format import At, OutputFormat
from smoe.server.output.output_reader import OutputReader
from smoe.server.output.rules import Rules
from tests.toy import END, ascii_tokenizer

CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 9}}, "required": ["city"]}
DAY = {"type": "object", "properties": {"day": {"type": "integer"}}, "required": ["day"]}
TOOLS = {"weather": CITY, "season": DAY}
OFFERED = [
    {"type": "function", "function": {"name": name, "description": f"The {name}", "parameters": parameters}}
    for name, parameters in TOOLS.items()
]
CALLS: list[tuple[str, dict[str, Any]]] = [("weather", {"city": "Oslo"}), ("season", {"day": 7})]
QUESTION = {"role": "user", "content": "Hi there"}
THOUGHT, SAID = "I look.", "Done."
COLUMNS = ("template renders", "call parsed", "several calls", "reasoning", "cut anywhere", "enforced")
MARKS = (
    "｜DSML｜",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
)
"""The marks that are no ASCII, and so must be tokens of their own in the toy's vocabulary."""
Cell = bool | None
"""None: the format has no such thing."""


class Read(NamedTuple):
    reasoning: str
    answer: str
    calls: list[tuple[str, Any]]


class Template:
    """A published chat template, and the format that the server finds in it."""

    def __init__(self, path: Path) -> None:
        self.name = path.stem
        tokenizer = ascii_tokenizer(path.read_text(encoding="utf8"))
        tokenizer.bos_token = "<s>"
        self._template = ChatTemplate(tokenizer)
        self.form: OutputFormat = format_of(self._template.source)

    def close(self) -> None:
        self._template.close()

    @property
    def takes_tools(self) -> bool:
        try:
            return "weather" in self._template.write(Conversation([QUESTION], OFFERED))
        except ChatTemplateError:
            return False

    def cells(self) -> list[Cell]:
        """The row of the table, by `COLUMNS`."""
        one, two = self._calls_as_written(1), self._calls_as_written(2)
        texts = [*(each for each in (one, two) if each is not None), *self._with_reasoning()]
        return [
            self._renders(),
            None if one is None else self._read(*one).calls == CALLS[:1],
            None if two is None else self._read(*two).calls == CALLS,
            all(self._read(*each)[:2] == (THOUGHT, SAID) for each in self._with_reasoning())
            if self.form.reasons
            else None,
            all(self._read(text, at) == self._read(text, at, pieces) for text, at in texts for pieces in _cuts(text)),
            self._is_enforced() if self.form.has_calls else False,
        ]

    def _renders(self) -> bool:
        """Whether the template writes tools, a call, and its result."""
        result = {"role": "tool", "tool_call_id": "call_0", "name": "weather", "content": "Sunny"}
        try:
            written = self._template.write(Conversation([QUESTION, _calling(1), result], OFFERED))
        except ChatTemplateError:
            return False
        return "Sunny" in written

    def _calls_as_written(self, count: int) -> tuple[str, At] | None:
        """What the template writes for calls after a prompt, and the place at which the prompt ends. None if it does
        not write so many calls."""
        try:
            prompt = self._template.write(Conversation([QUESTION], OFFERED))
            ending = Ending(add_generation_prompt=False)
            whole = self._template.write(Conversation([QUESTION, _calling(count)], OFFERED), ending=ending)
        except ChatTemplateError:
            return None
        same = _same_at_the_beginning(prompt, whole)
        mark = whole.rfind("<", 0, same)
        if ">" not in whole[mark:same]:  # "<think>" and "<tool_call>" begin with the same letters
            same = mark
        writes = CALLS[count - 1][0] in whole[same:]
        return (whole[same:], self.form.place_of(prompt[:same])) if writes else None

    def _with_reasoning(self) -> list[tuple[str, At]]:
        """Reasoning and an answer, as a model writes them after a prompt."""
        if self.form.reasoning is None:
            return []
        texts = [f"{THOUGHT}{way}{SAID}" for way in self.form.ways_out([])]
        begun = [] if type(self.form) is not OutputFormat else [(text, "reasoning") for text in texts]
        return [*((self.form.reasoning.begin + text, "beginning") for text in texts), *begun]

    def _read(self, text: str, at: At, pieces: Sequence[str] = ()) -> Read:
        reader = OutputReader(self.form.reads(at, True), TOOLS)
        found = {"reasoning": "", "answer": ""}
        calls: list[tuple[str, str]] = []
        for part in [*(part for piece in pieces or [text] for part in reader.push(piece)), *reader.flush()]:
            if part.kind == "call":
                calls.append((part.text, ""))
            elif part.kind == "arguments":
                calls[-1] = calls[-1][0], calls[-1][1] + part.text
            else:
                found[part.kind] += part.text
        return Read(
            found["reasoning"].strip(), found["answer"].strip(), [(name, _parsed(text)) for name, text in calls]
        )

    def _is_enforced(self) -> bool:
        """Whether random texts of the grammar of a required call are calls, with arguments of the schema's types."""
        marks = [mark for mark in MARKS if mark in self.form.texts]
        tokenizer = ascii_tokenizer(added=[AddedToken(mark, special=False) for mark in marks])
        choose, end = random.Random(7), tokenizer.convert_tokens_to_ids(END)
        own = {mark: tokenizer.convert_tokens_to_ids(mark) for mark in marks}
        rules = self.form.must_call(Rules(own), [tool["function"] for tool in OFFERED])
        first = Grammars(tokenizer, len(tokenizer), [end]).of_lark(rules, "tools")
        for _ in range(3):
            grammar, ids = first.another(), list[int]()
            while not ids or ids[-1] != end:
                logits = torch.zeros(len(tokenizer))
                grammar.narrow(logits)
                ids.append(choose.choice((~torch.isinf(logits)).nonzero()[:, 0].tolist()))
                grammar.take(ids[-1])
                if len(ids) > 3000:
                    return False
            calls = self._read(tokenizer.decode(ids[:-1], skip_special_tokens=False), "beginning").calls
            if len(calls) != 1 or not _matches(*calls[0]):
                return False
        return True


def _same_at_the_beginning(one: str, other: str) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((number for number, (a, b) in pairs if a != b), min(len(one), len(other)))


def _calling(count: int) -> dict[str, Any]:
    calls = [
        {"id": f"call_{n}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for n, (name, arguments) in enumerate(CALLS[:count])
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _parsed(arguments: str) -> Any:
    try:
        return json.loads(arguments or "{}")
    except ValueError:
        return arguments


def _matches(name: str, arguments: Any) -> bool:
    if not isinstance(arguments, dict):
        return False
    return isinstance(arguments.get("city"), str) if name == "weather" else isinstance(arguments.get("day"), int)


def _cuts(text: str) -> Iterable[list[str]]:
    """The text in single characters, and in two pieces for every place between them."""
    yield list(text)
    for place, _ in pairwise(range(len(text))):
        yield [text[: place + 1], text[place + 1 :]]


def table(folder: Path) -> str:
    """The table of all templates that take tools, in Markdown."""
    rows = []
    for path in sorted((folder / "models" / "templates").glob("*.jinja"), key=lambda path: path.stem.lower()):
        template = Template(path)
        try:
            if template.takes_tools:
                marks = ("yes" if cell else "-" if cell is None else "**no**" for cell in template.cells())
                rows.append(f"| {template.name} | {' | '.join(marks)} |")
        finally:
            template.close()
    head = f"| published template | {' | '.join(COLUMNS)} |"
    return "\n".join([head, "| --- " * (len(COLUMNS) + 1) + "|", *rows]) + "\n"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="a source tree of llama.cpp")
    folder = parser.parse_args().folder
    if not any((folder / "models" / "templates").glob("*.jinja")):
        parser.error(f"{folder / 'models' / 'templates'} has no templates (*.jinja); give a source tree of llama.cpp")
    print(table(folder), end="")


if __name__ == "__main__":
    main()
