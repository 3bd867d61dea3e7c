"""From conversations to prompts: marks, template, tokens."""

from __future__ import annotations

from typing import Any, NamedTuple

from smoe.conversation.chat_template import ChatTemplate
from smoe.conversation.control_tokens import ControlTokens
from smoe.conversation.conversation import NEW_ANSWER, Conversation, Ending
from smoe.errors import ChatTemplateError


class Written(NamedTuple):
    """A conversation as the template has written it."""

    text: str
    """The prompt, with marks in the text of control tokens that the messages have."""
    mark: str
    """Nothing where there are none."""

    @property
    def plain(self) -> str:
        """Without marks."""
        return self.text.replace(self.mark, "") if self.mark else self.text


class ConversationPrompts:
    """Makes the prompts of one tokenizer."""

    def __init__(self, tokenizer: Any, context_tokens: int, *, parses_control_tokens: bool = False) -> None:
        """`parses_control_tokens`: text of control tokens in messages becomes those tokens."""
        self.template = ChatTemplate(tokenizer)
        self._control = ControlTokens(tokenizer, self.template.source)
        self._context_tokens, self._parses_control_tokens = context_tokens, parses_control_tokens

    def write(
        self, conversation: Conversation, variables: dict[str, Any] | None = None, ending: Ending = NEW_ANSWER
    ) -> Written:
        """The conversation as text, up to where the model answers or goes on.

        Raises `ChatTemplateError`, and `ContextError` where it has more text of control tokens than there is room
        for."""
        mark = ""
        try:
            if not self._parses_control_tokens:
                conversation, mark = self._control.marked(conversation, self._context_tokens)
            return Written(self.template.write(conversation, variables, ending), mark)
        except RecursionError as error:
            raise ChatTemplateError("the conversation has lists within lists, too many to look at") from error

    def encode(self, written: Written, begin: int = 0) -> list[int]:
        """The tokens of a conversation's text from `begin` on. Raises `ContextError` for far too many."""
        return self._control.encode(written.text[begin:], written.mark, self._context_tokens)
