"""Converts conversations and texts to prompt tokens, with the model's tokenizer and chat template."""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from typing import Any

from smoe.conversation.conversation import NEW_ANSWER, Conversation, Ending
from smoe.conversation.prompt import ConversationPrompts, Written
from smoe.errors import ChatTemplateError, ContextError
from smoe.generation.generate import encode
from smoe.server.api_errors import ApiError, refused
from smoe.server.image_parts import IMAGE_PARTS, has_images, url_of
from smoe.server.image_prompts import ImagePrompts, Prompt
from smoe.server.output.families import format_of
from smoe.server.output.output_format import At

_LAST_TOKENS = 16
"""The number of last prompt tokens that contain the marker that begins reasoning (one or several tokens) and the space
after it."""
_CHARACTERS, _MARGIN = 16, 16
"""Of a long prompt, this many characters for each token of the context are tokenized first. If these give too many
tokens, by more than a margin for tokens that further text may merge, the whole prompt is too long."""
_SOMETHING = [{"role": "user", "content": "?"}]
_A_TOOL = {
    "type": "function",
    "function": {"name": "tool_of_no_name", "description": "", "parameters": {"type": "object", "properties": {}}},
}


class Prompts:
    """Converts texts and conversations to prompt tokens, with one tokenizer and its chat template."""

    def __init__(
        self,
        tokenizer: Any,
        vocabulary: int,
        context_tokens: int,
        *,
        parses_control_tokens: bool = False,
        images: ImagePrompts | None = None,
        why_no_images: str = "this model reads text only",
    ) -> None:
        """`context_tokens`: longer prompts are not tokenized to their end. `parses_control_tokens`: the text of a
        control token in a message becomes that token. `images`: reads the images of conversations; None: images are
        refused with the sentence `why_no_images`."""
        self._images, self._why_no_images = images, why_no_images
        self._tokenizer, self._vocabulary, self._context_tokens = tokenizer, vocabulary, context_tokens
        self._conversations = ConversationPrompts(
            tokenizer, context_tokens, parses_control_tokens=parses_control_tokens
        )
        self.has_template = self._conversations.template.exists
        self._not_given = {"messages", *inspect.signature(tokenizer.apply_chat_template).parameters}
        """Variables that a request may not give to the template, because the library itself uses them."""
        self.takes_tools = self.has_template and self._shows_tools()
        self.format = format_of(self._conversations.template.source)
        """The model's format of reasoning and tool calls."""

    @property
    def template(self) -> str:
        """The chat template; empty without one."""
        return self._conversations.template.source

    @property
    def template_state(self) -> str:
        """The state of the chat template: `none` (there is none), `ok`, or `failed` (it exceeded a limit on the last
        conversation)."""
        return self._conversations.template.state

    def close(self) -> None:
        """Stop rendering conversations; the rendering in progress fails. Any thread may call this method."""
        self._conversations.template.close()

    def place_of(self, ids: Sequence[int]) -> At:
        """Return the position in the output's structure at which a conversation's prompt ends: within reasoning, or
        before it."""
        return self.format.place_of(self._tokenizer.decode(list(ids[-_LAST_TOKENS:]), skip_special_tokens=False))

    def of_text(self, text: str) -> list[int]:
        """Return the tokens of a text to continue, with the tokenizer's initial tokens.

        Raises `ConfigError` for a text without tokens, `ContextError` for a text that is far too long.
        """
        self._check_length(text)
        return encode(self._tokenizer, [text])[0]

    def tokens_of(self, text: str, adds_initial: bool, parses_control_tokens: bool) -> list[int]:
        """Return the tokens of any text. `adds_initial`: with the tokenizer's initial tokens."""
        splits = not parses_control_tokens
        found = self._tokenizer(text, add_special_tokens=adds_initial, split_special_tokens=splits)
        tokens: list[int] = found["input_ids"]
        return tokens

    def of_tokens(self, ids: Sequence[int], param: str = "prompt") -> list[int]:
        """Return prompt tokens unchanged. Raises an `ApiError` for ids outside the vocabulary."""
        if any(not 0 <= token < self._vocabulary for token in ids):
            raise refused(
                f"'{param}' has token ids outside the vocabulary; they must be from 0 to {self._vocabulary - 1}",
                param,
            )
        return list(ids)

    def of_messages(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None,
        given: dict[str, Any],
        param: str = "messages",
        ending: Ending = NEW_ANSWER,
    ) -> Prompt:
        """Return the tokens and images of a conversation in the template's form, up to the model's answer. `given`: the
        template's variables. Raises an `ApiError`, or an `ImageError`."""
        if not self.has_template:
            message = (
                "this model has no chat template, so it cannot continue a conversation; use /v1/completions to "
                "continue a text, or start the server with smoe serve --chat-template FILE"
            )
            raise refused(message, param, "no_chat_template")
        if tools and not self.takes_tools:
            message = (
                "this model's chat template does not support tools; switch them off in the program that sends them, "
                "or start the server with smoe serve --chat-template FILE and a template that supports them"
            )
            raise refused(message, "tools", "no_tools")
        urls: list[str] = []
        turns = [self._turn(message, param, urls) for message in messages]
        written = self._written(turns, list(tools) if tools else None, given, param, ending)
        text = written.plain
        _check_characters(text, param)
        self._check_length(text)
        ids = self._conversations.encode(written)
        return Prompt(ids) if self._images is None or not urls else self._images.prompt(ids, urls, param)

    @property
    def takes_images(self) -> bool:
        """Whether messages can contain images."""
        return self._images is not None and self.has_template

    def _written(
        self,
        turns: list[dict[str, Any]],
        tools: list[Any] | None,
        given: dict[str, Any],
        param: str,
        ending: Ending = NEW_ANSWER,
    ) -> Written:
        if taken := sorted(self._not_given & given.keys()):
            raise refused(f"'chat_template_kwargs' may not contain {taken[0]!r}", "chat_template_kwargs")
        try:
            return self._conversations.write(Conversation(turns, tools), given, ending)
        except ChatTemplateError as error:
            raise refused(f"this model's chat template cannot render this conversation: {error}", param) from error

    def _check_length(self, text: str) -> None:
        """Raise `ContextError` for a text that is too long, by tokenizing its beginning only. Tokenizing a million
        characters takes hundreds of megabytes, and seconds in which other prompts wait."""
        beginning, most = text[: _CHARACTERS * self._context_tokens], self._context_tokens
        if len(beginning) == len(text):
            return
        counted = len(self._tokenizer(beginning, add_special_tokens=False)["input_ids"])
        if counted > most + _MARGIN:
            raise ContextError.far_too_long(most, f"about {counted * len(text) // len(beginning)}")

    def _shows_tools(self) -> bool:
        """Return whether the template writes the given tools."""
        try:
            without = self._written(_SOMETHING, None, {}, "messages")
            return self._written(_SOMETHING, [_A_TOOL], {}, "messages").text != without.text
        except ApiError:
            return False

    def _turn(self, message: dict[str, Any], param: str, urls: list[str]) -> dict[str, Any]:
        """Return a message in the form that chat templates expect: its text as one string, or as parts if it has
        images, and the arguments of tool calls as values. The images are added to `urls`."""
        turn = {"role": message["role"], "content": self._content(message, param, urls)}
        for name in ("name", "reasoning_content", "tool_call_id"):
            if message.get(name) is not None:
                turn[name] = message[name]
        if message.get("tool_calls"):
            turn["tool_calls"] = [_as_values(call, param) for call in message["tool_calls"]]
        return turn

    def _content(self, message: dict[str, Any], param: str, urls: list[str]) -> str | list[dict[str, Any]]:
        content = message.get("content")
        if not (isinstance(content, list) and has_images(content)):
            return text_of(content, param)
        if self._images is None:
            raise refused(f"{self._why_no_images}; a message has an image", param)
        if message["role"] != "user":
            raise refused("images are accepted in messages of the user only", param)
        parts: list[dict[str, Any]] = []
        for part in content or ():
            if part.get("type") in IMAGE_PARTS:
                urls.append(url_of(part, param))
                parts.append({"type": "image"})
            else:
                parts.append({"type": "text", "text": text_of([part], param)})
        return parts


def text_of(content: str | Sequence[dict[str, Any]] | None, param: str) -> str:
    """Return a message's text, which may consist of several parts. Raises an `ApiError` for a part that is not text."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for part in content:
        kind = part.get("type")
        text = part.get("refusal" if kind == "refusal" else "text")
        if kind not in ("text", "input_text", "output_text", "refusal") or not isinstance(text, str):
            raise refused(f"this model reads text only; a part of a message has the type {str(kind)[:40]!r}", param)
        texts.append(text)
    return "".join(texts)


def _as_values(call: dict[str, Any], param: str) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise refused("a message's 'tool_calls' must each have a 'function' with a 'name'", param)
    arguments = function.get("arguments", "{}")
    try:
        value = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        value = arguments
    return {**call, "function": {**function, "arguments": value}}


def _check_characters(text: str, param: str) -> None:
    """Raise an `ApiError` for a lone surrogate in a conversation. The arguments of calls are JSON within JSON, so they
    can contain one even in a valid body."""
    try:
        text.encode("utf8")
    except UnicodeEncodeError as error:
        raise refused("the text has half a character (a lone surrogate), which is not valid text", param) from error
