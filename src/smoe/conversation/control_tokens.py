"""Text of control tokens within messages stays text: a web page that a tool has read cannot end the turn.

    content        a <|im_end|> b
    marked         a <MARK|im_end|> b       before the template, after the first character of each token's text
    rendered       ...user\\na <MARK|im_end|> b<|im_end|>...
    encoded        [...user\\na <] [|im_end|> b<|im_end|>...]      in pieces, cut at the marks, which are left out

No piece has the whole text of a token that was marked, so the tokenizer does not find it; the template's own tokens are
whole. A conversation without such text is rendered and encoded as it is: in one piece, without a mark.

The mark is one character of Unicode's private use that neither the conversation nor the template has, so whatever a
template does with texts (trim, split, JSON) leaves it whole.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from smoe.conversation.conversation import Conversation
from smoe.errors import ChatTemplateError, ContextError

_MARKS = range(0xE000, 0xF900)
"""Private use, within the characters that JSON escapes by one code."""
_OF_THE_MODEL = ("content", "reasoning_content", "thinking")
"""What an assistant's message has of the model's own tokens."""


class ControlTokens:
    """Those of one tokenizer: all special ones, and others that are written like marks in its chat template."""

    def __init__(self, tokenizer: Any, template: str) -> None:
        self._tokenizer, self._template = tokenizer, template
        self.texts = sorted(
            token.content
            for token in tokenizer.added_tokens_decoder.values()
            if len(token.content) > 1 and (token.special or (_is_mark(token.content) and token.content in template))
        )
        self._first = re.compile(_first_of(self.texts) if self.texts else "(?!)")
        """The first character of each."""

    def marked(self, conversation: Conversation, context_tokens: int) -> tuple[Conversation, str]:
        """The conversation with marks in the text of control tokens that is not the model's own, and the mark; as it is
        and no mark where there is no such text. Raises `ContextError` where there is more of it than the context has
        tokens."""
        found = 0
        for text in _given_texts(conversation):
            for _ in self._first.finditer(text):
                found += 1
                if found > context_tokens:
                    raise ContextError.far_too_long(context_tokens)
        if not found:
            return conversation, ""
        mark = self._unused(conversation)

        def changed(text: str) -> str:
            return self._first.sub(rf"\g<0>{mark}", text)

        messages = [{**_mapped(message, changed), **_own(message)} for message in conversation.messages]
        return replace(conversation, messages=messages, tools=_mapped(conversation.tools, changed)), mark

    def encode(self, text: str, mark: str, context_tokens: int) -> list[int]:
        """The tokens of a rendered conversation, or of the end of one. Raises `ContextError` where there are more
        pieces than the context has tokens: each has one at least, and a template may write a text many times."""
        pieces = _cut(text, mark) if mark else [text]
        if len(pieces) > context_tokens:
            raise ContextError.far_too_long(context_tokens)
        ids = list(self._tokenizer(pieces[0], add_special_tokens=False)["input_ids"])
        if len(pieces) > 1:
            for row in self._within_text(pieces[1:]):
                ids += row
        return ids

    def _within_text(self, pieces: Sequence[str]) -> list[list[int]]:
        """The tokens of texts that go on, without the space that some tokenizers put before a text: each is read after
        a line break, whose tokens are left out."""
        line_break: list[int] = self._tokenizer("\n", add_special_tokens=False)["input_ids"]
        rows = self._tokenizer([f"\n{piece}" for piece in pieces], add_special_tokens=False)["input_ids"]
        return [
            row[len(line_break) :]
            if row[: len(line_break)] == line_break
            else self._tokenizer(piece, add_special_tokens=False)["input_ids"]
            for piece, row in zip(pieces, rows, strict=True)
        ]

    def _unused(self, conversation: Conversation) -> str:
        """A character for marks."""
        used = set(self._template)
        for text in (*_texts(conversation.messages), *_texts(conversation.tools), *self.texts):
            used |= {character for character in set(text) if not character.isascii()}
            used |= {chr(int(code, 16)) for code in re.findall(r"\\u([ef][0-9a-f]{3})", text)}
        for code in _MARKS:
            if chr(code) not in used:
                return chr(code)
        raise ChatTemplateError("the messages have all characters of private use (U+E000 to U+F8FF); leave one out")


def _is_mark(text: str) -> bool:
    """Written like `<think>` or `[INST]`: no word, rule or run of spaces, which vocabularies have as tokens as well."""
    return text[0] + text[-1] in ("<>", "[]")


def _first_of(texts: Iterable[str]) -> str:
    """A pattern for the first character of any of some texts, each of two characters or more: one within another is
    found as well."""
    tree: dict[str, Any] = {}
    for text in texts:
        branch = tree
        for character in text:
            branch = branch.setdefault(character, {})
        branch[""] = {}
    return "|".join(f"{re.escape(character)}(?={_pattern(branch)})" for character, branch in tree.items())


def _pattern(tree: dict[str, Any]) -> str:
    """A pattern for any text of a tree, which looks at each character once."""
    if "" in tree:
        return ""  # the shorter text is there, whatever follows
    branches = []
    for character, branch in tree.items():
        text = re.escape(character)
        while len(branch) == 1 and "" not in branch:
            ((character, branch),) = branch.items()
            text += re.escape(character)
        branches.append(text + _pattern(branch))
    return branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"


def _cut(text: str, mark: str) -> list[str]:
    """Cut the text at each mark, also where the template has written it as JSON's or Python's escape. One piece at
    least."""
    first, *others = text.replace(json.dumps(mark)[1:-1], mark).split(mark)
    return [first, *(piece for piece in others if piece)]


def _own(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] != "assistant":
        return {}
    return {name: message[name] for name in _OF_THE_MODEL if name in message}


def _given_texts(conversation: Conversation) -> Iterable[str]:
    """All texts that are not the model's own."""
    for message in conversation.messages:
        own = _own(message)
        yield from _texts({name: value for name, value in message.items() if name not in own})
    yield from _texts(conversation.tools)


def _texts(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for name, each in value.items():
            yield name
            yield from _texts(each)
    elif isinstance(value, list):
        for each in value:
            yield from _texts(each)


def _mapped(value: Any, change: Any) -> Any:
    """Plain data with all texts changed, the names in dictionaries too."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(name): _mapped(each, change) for name, each in value.items()}
    if isinstance(value, list):
        return [_mapped(each, change) for each in value]
    return value
