"""Converts conversations to prompt tokens: control tokens are marked, the chat template is rendered, the text is
tokenized."""

from __future__ import annotations

from typing import Any, NamedTuple

from smoe.conversation.chat_template import ChatTemplate
from smoe.conversation.control_tokens import ControlTokens
from smoe.conversation.conversation import NEW_ANSWER, Conversation, Ending
from smoe.errors import ChatTemplateError


class Written(NamedTuple):
    """A rendered conversation, in which the text of control tokens may be marked."""

    text: str
    """The prompt. It has marks in the text of control tokens that comes from messages."""
    mark: str
    """The mark; empty if the text has none."""

    @property
    def plain(self) -> str:
        """The text without marks."""
        return self.text.replace(self.mark, "") if self.mark else self.text


class ConversationPrompts:
    """Converts conversations to prompts with one tokenizer and its chat template."""

    def __init__(self, tokenizer: Any, context_tokens: int, *, parses_control_tokens: bool = False) -> None:
        """`parses_control_tokens`: whether the text of a control token in a message becomes that token."""
        self.template = ChatTemplate(tokenizer)
        self._control = ControlTokens(tokenizer, self.template.source)
        self._context_tokens, self._parses_control_tokens = context_tokens, parses_control_tokens

    def write(
        self, conversation: Conversation, variables: dict[str, Any] | None = None, ending: Ending = NEW_ANSWER
    ) -> Written:
        """Return the rendered conversation. It ends where the model should answer or continue.

        Raise `ChatTemplateError` if the template fails. Raise `ContextError` if the messages contain the text of more
        control tokens than fit in the context.
        """
        mark = ""
        try:
            if not self._parses_control_tokens:
                conversation, mark = self._control.marked(conversation, self._context_tokens)
            return Written(self.template.write(conversation, variables, ending), mark)
        except RecursionError as error:
            raise ChatTemplateError(
                "the lists in the conversation are nested too deeply; send a conversation with fewer levels"
            ) from error

    def encode(self, written: Written, begin: int = 0) -> list[int]:
        """Return the tokens of a rendered conversation from character `begin` on. Raise `ContextError` if there are far
        more tokens than the context holds."""
        return self._control.encode(written.text[begin:], written.mark, self._context_tokens)
