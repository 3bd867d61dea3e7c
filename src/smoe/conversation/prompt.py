"""Makes prompts from conversations: marks, then the chat template, then tokens."""

from __future__ import annotations

from typing import Any, NamedTuple

from smoe.conversation.chat_template import ChatTemplate
from smoe.conversation.control_tokens import ControlTokens
from smoe.conversation.conversation import NEW_ANSWER, Conversation, Ending
from smoe.errors import ChatTemplateError


class Written(NamedTuple):
    """A conversation that the template has rendered."""

    text: str
    """The prompt, with marks in the text of control tokens from messages."""
    mark: str
    """The mark; empty where the text has none."""

    @property
    def plain(self) -> str:
        """The text without marks."""
        return self.text.replace(self.mark, "") if self.mark else self.text


class ConversationPrompts:
    """Makes prompts with one tokenizer and its chat template."""

    def __init__(self, tokenizer: Any, context_tokens: int, *, parses_control_tokens: bool = False) -> None:
        """`parses_control_tokens`: the text of a control token in a message becomes that token."""
        self.template = ChatTemplate(tokenizer)
        self._control = ControlTokens(tokenizer, self.template.source)
        self._context_tokens, self._parses_control_tokens = context_tokens, parses_control_tokens

    def write(
        self, conversation: Conversation, variables: dict[str, Any] | None = None, ending: Ending = NEW_ANSWER
    ) -> Written:
        """Return the conversation as text, up to where the model answers or continues.

        Raises `ChatTemplateError`, and `ContextError` for more text of control tokens than the context has room for.
        """
        mark = ""
        try:
            if not self._parses_control_tokens:
                conversation, mark = self._control.marked(conversation, self._context_tokens)
            return Written(self.template.write(conversation, variables, ending), mark)
        except RecursionError as error:
            raise ChatTemplateError("the conversation has too many levels of nested lists") from error

    def encode(self, written: Written, begin: int = 0) -> list[int]:
        """Return the tokens of a conversation's text from character `begin` on. Raises `ContextError` for far too
        many."""
        return self._control.encode(written.text[begin:], written.mark, self._context_tokens)
