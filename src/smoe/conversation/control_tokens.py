r"""Prevents the text of a control token in a message from becoming that token, so that, for example, a web page that a
tool has read cannot end the turn.

    content        a <|im_end|> b
    marked         a <MARK|im_end|> b       before the template: a mark after the first character of each token's text
    rendered       ...user\na <MARK|im_end|> b<|im_end|>...
    encoded        [...user\na <] [|im_end|> b<|im_end|>...]      in pieces, cut at the marks, which are removed

No piece contains the whole text of a marked token, so the tokenizer does not find the token. Tokens that the template
writes itself are not marked. A conversation without the text of any control token is rendered and encoded unchanged: in
one piece, without a mark.

The mark is a private-use character of Unicode that occurs neither in the conversation nor in the template. Operations
of templates on text (trim, split, JSON) do not change the mark.
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
"""The private-use characters, each of which JSON can write as one escape sequence."""
_OF_THE_MODEL = ("content", "reasoning_content", "thinking")
"""The fields of an assistant's message that the model has written, so that control tokens in them are its own."""


class ControlTokens:
    """The control tokens of one tokenizer: all special tokens, and other added tokens that look like tags in its chat
    template."""

    def __init__(self, tokenizer: Any, template: str) -> None:
        self._tokenizer, self._template = tokenizer, template
        self.texts = sorted(
            token.content
            for token in tokenizer.added_tokens_decoder.values()
            if len(token.content) > 1 and (token.special or (_is_mark(token.content) and token.content in template))
        )
        self._first = re.compile(_first_of(self.texts) if self.texts else "(?!)")
        """A pattern for the first character of each control token."""

    def marked(self, conversation: Conversation, context_tokens: int) -> tuple[Conversation, str]:
        """Return (the conversation with a mark in the text of each control token, the mark). Texts that the model has
        written are not marked. The mark is empty if the conversation has no text of a control token. Raise
        `ContextError` if there would be more than `context_tokens` marks."""
        found = 0
        for text in _given_texts(conversation):
            for _ in self._first.finditer(text):
                found += 1
                if found > context_tokens:
                    raise ContextError.far_too_long(context_tokens, f"more than {context_tokens}")
        if not found:
            return conversation, ""
        mark = self._unused(conversation)

        def changed(text: str) -> str:
            return self._first.sub(rf"\g<0>{mark}", text)

        messages = [{**_mapped(message, changed), **_own(message)} for message in conversation.messages]
        return replace(conversation, messages=messages, tools=_mapped(conversation.tools, changed)), mark

    def encode(self, text: str, mark: str, context_tokens: int) -> list[int]:
        """Return the tokens of a rendered conversation, or of its end. Raise `ContextError` if there are more than
        `context_tokens` pieces: each has at least one token, and a template may repeat a text."""
        pieces = _cut(text, mark) if mark else [text]
        if len(pieces) > context_tokens:
            raise ContextError.far_too_long(context_tokens, f"more than {context_tokens}")
        ids = list(self._tokenizer(pieces[0], add_special_tokens=False)["input_ids"])
        if len(pieces) > 1:
            for row in self._within_text(pieces[1:]):
                ids += row
        return ids

    def _within_text(self, pieces: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each piece of text, without the space that some tokenizers add at the beginning of a
        text. Each piece is tokenized after a line break, and the line break's tokens are removed."""
        line_break: list[int] = self._tokenizer("\n", add_special_tokens=False)["input_ids"]
        rows = self._tokenizer([f"\n{piece}" for piece in pieces], add_special_tokens=False)["input_ids"]
        return [
            row[len(line_break) :]
            if row[: len(line_break)] == line_break
            else self._tokenizer(piece, add_special_tokens=False)["input_ids"]
            for piece, row in zip(pieces, rows, strict=True)
        ]

    def _unused(self, conversation: Conversation) -> str:
        """Return a private-use character that occurs neither in the conversation nor in the template. Raise
        `ChatTemplateError` if all occur."""
        used = set(self._template)
        for text in (*_texts(conversation.messages), *_texts(conversation.tools), *self.texts):
            used |= {character for character in set(text) if not character.isascii()}
            used |= {chr(int(code, 16)) for code in re.findall(r"\\u([ef][0-9a-f]{3})", text)}
        for code in _MARKS:
            if chr(code) not in used:
                return chr(code)
        raise ChatTemplateError(
            "the messages contain all private-use characters of Unicode (U+E000 to U+F8FF), and smoe needs an "
            "unused one; remove one of these characters from the messages"
        )


def _is_mark(text: str) -> bool:
    """Return whether a token looks like a tag, such as `<think>` or `[INST]`. Added tokens can also be words or runs of
    spaces."""
    return text[0] + text[-1] in ("<>", "[]")


def _first_of(texts: Iterable[str]) -> str:
    """Return a regular expression that matches the first character of each occurrence of any of `texts`, even if
    occurrences overlap. Each text must have two characters or more."""
    tree: dict[str, Any] = {}
    for text in texts:
        branch = tree
        for character in text:
            branch = branch.setdefault(character, {})
        branch[""] = {}
    return "|".join(f"{re.escape(character)}(?={_pattern(branch)})" for character, branch in tree.items())


def _pattern(tree: dict[str, Any]) -> str:
    """Return a regular expression that matches any text of a prefix tree. It compares each character once."""
    if "" in tree:
        return ""  # a shorter text ends here, whatever follows
    branches = []
    for character, branch in tree.items():
        text = re.escape(character)
        while len(branch) == 1 and "" not in branch:
            ((character, branch),) = branch.items()
            text += re.escape(character)
        branches.append(text + _pattern(branch))
    return branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"


def _cut(text: str, mark: str) -> list[str]:
    """Return the pieces of a text between its marks, at least one. Marks that the template has written as escape
    sequences of JSON or Python are found too."""
    first, *others = text.replace(json.dumps(mark)[1:-1], mark).split(mark)
    return [first, *(piece for piece in others if piece)]


def _own(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] != "assistant":
        return {}
    return {name: message[name] for name in _OF_THE_MODEL if name in message}


def _given_texts(conversation: Conversation) -> Iterable[str]:
    """Yield all texts of the conversation that the model has not written."""
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
    """Return a copy of nested lists and dictionaries in which `change` has been applied to all texts, including
    keys."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(name): _mapped(each, change) for name, each in value.items()}
    if isinstance(value, list):
        return [_mapped(each, change) for each in value]
    return value
