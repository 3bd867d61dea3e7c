"""Renders conversations as text with a model's chat template."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from smoe.conversation.conversation import NEW_ANSWER, OTHER_FORMS, Conversation, Ending, developer_as_system
from smoe.conversation.template_process import TemplateProcess
from smoe.errors import ChatTemplateError, ChatTemplateLimitError

_INSTRUCTION = "one instruction"
_GOES_ON = "[the final message goes on here] "
_DEVELOPER = Conversation([{"role": "developer", "content": _INSTRUCTION}, {"role": "user", "content": "one question"}])


class ChatTemplate:
    """The chat template of one tokenizer. If the template fails on a conversation, it is applied to equivalent forms of
    the conversation (`conversation.py`)."""

    def __init__(self, tokenizer: Any, process: TemplateProcess | None = None) -> None:
        self._tokenizer = tokenizer
        self._process = process or TemplateProcess()
        template = tokenizer.chat_template
        self.exists = template is not None
        self.source = "\n".join(template.values()) if isinstance(template, dict) else template or ""
        """The template's source; if there are several templates (one for tools), all of them."""
        self._knows_developer: bool | None = None
        self._has_ended = True

    @property
    def state(self) -> str:
        """The state of the template. none: the model has none; failed: the last conversation exceeded a limit of time
        or memory; ok: otherwise."""
        return "none" if not self.exists else "ok" if self._has_ended else "failed"

    def write(
        self, conversation: Conversation, variables: dict[str, Any] | None = None, ending: Ending = NEW_ANSWER
    ) -> str:
        """Return the conversation as text, which ends at the point where the model should answer or continue.
        `variables`: further variables for the template. Raise `ChatTemplateError` if the template fails."""
        if any(message["role"] == "developer" for message in conversation.messages) and not self._takes_developer():
            conversation = developer_as_system(conversation)
        return self._written(conversation, variables or {}, ending)

    def close(self) -> None:
        """Stop rendering: the conversation that is being rendered fails, and so do later ones. Any thread may call
        this."""
        self._process.close()

    def _written(self, conversation: Conversation, variables: dict[str, Any], ending: Ending) -> str:
        """Return the rendered conversation. If the template fails, equivalent forms of the conversation are tried. A
        form that changes the template's error message is used for the next attempts too."""
        deadline = self._process.deadline()
        try:
            return self._rendered(conversation, variables, deadline, ending)
        except ChatTemplateLimitError:
            raise
        except ChatTemplateError as error:
            first, reason = error, str(error)
        for form in OTHER_FORMS:
            other = form(conversation)
            if other == conversation:
                continue
            try:
                return self._rendered(other, variables, deadline, ending)
            except ChatTemplateLimitError:
                raise
            except ChatTemplateError as error:
                if str(error) != reason:
                    conversation, reason = other, str(error)
        raise first

    def _rendered(
        self, conversation: Conversation, variables: dict[str, Any], deadline: float, ending: Ending = NEW_ANSWER
    ) -> str:
        if ending.continue_final_message:
            conversation = _open_ended(conversation)
        all_variables = {
            **self._tokenizer.special_tokens_map,
            **variables,
            "messages": [_plain(message) for message in conversation.messages],
            "tools": conversation.tools,
            "documents": None,
            "add_generation_prompt": ending.add_generation_prompt,
        }
        template = self._tokenizer.get_chat_template(None, conversation.tools)
        try:
            text = self._process.render(template, all_variables, deadline)
        except ChatTemplateError as error:
            self._has_ended = not isinstance(error, ChatTemplateLimitError)
            raise
        self._has_ended = True
        return _cut_off(text) if ending.continue_final_message else text

    def _takes_developer(self) -> bool:
        """Return whether the text of a message with the role `developer` appears in the rendered conversation. It is
        not enough that the template's source contains the role's name."""
        if self._knows_developer is None:
            try:
                text = self._rendered(_DEVELOPER, {}, self._process.deadline())
            except ChatTemplateLimitError:
                raise
            except ChatTemplateError:
                text = ""
            self._knows_developer = "developer" in self.source and _INSTRUCTION in text
        return self._knows_developer


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message without empty fields. Its reasoning is stored under both names that templates use."""
    message = {name: value for name, value in message.items() if value is not None}
    if "reasoning_content" in message:
        message = {"thinking": message["reasoning_content"], **message}
    return message


def _open_ended(conversation: Conversation) -> Conversation:
    """Return the conversation with a marker at the end of the last message, which the model should continue."""
    *before, last = conversation.messages
    text = last.get("content")
    if not isinstance(text, str):
        raise ChatTemplateError("the last message of the conversation has no text that the model could continue")
    return replace(conversation, messages=[*before, {**last, "content": text + _GOES_ON}])


def _cut_off(text: str) -> str:
    """Return the rendered conversation up to the marker at the end of the last message. If the template strips spaces
    from messages, spaces at the end of the last message are stripped too."""
    place = text.rfind(_GOES_ON.strip())
    if place < 0:
        raise ChatTemplateError(
            "the chat template leaves out the last message, so the model cannot continue that message"
        )
    return text[:place] if text.startswith(_GOES_ON, place) else text[:place].rstrip()
