"""Reads a chat template that the user gives in a file, in place of the model's own."""

from __future__ import annotations

from pathlib import Path

from smoe.conversation.template_process import TemplateProcess
from smoe.errors import ChatTemplateError, ConfigError

_QUESTION = "Who went to the park?"
_VARIABLES = {
    "messages": [{"role": "user", "content": _QUESTION}],
    "tools": None,
    "documents": None,
    "add_generation_prompt": True,
    "bos_token": "",
    "eos_token": "",
    "unk_token": "",
    "pad_token": "",
}
"""The variables of the simplest conversation, with which the template is tested. The model's special tokens are not
known yet."""


def read_template(path: Path) -> str:
    """Return the template in a file. Raise `ConfigError` if the file cannot be read, is not valid Jinja, or does not
    render a conversation of one user message."""
    try:
        template = path.read_text(encoding="utf8")
    except (OSError, UnicodeDecodeError) as error:
        raise _unusable(path, _unread(error)) from error
    process = TemplateProcess()
    try:
        text = process.render(template, _VARIABLES, process.deadline())
    except ChatTemplateError as error:
        raise _unusable(path, f"cannot write a conversation of one user message: {error}") from error
    finally:
        process.close()
    if _QUESTION not in text:
        raise _unusable(path, "leaves out the user's message: it writes no `content` of `messages`")
    return template


def _unread(error: OSError | UnicodeDecodeError) -> str:
    why = getattr(error, "strerror", None) or error
    return f"cannot be read: {why}; give the path of a text file that contains a Jinja template"


def _unusable(path: Path, why: str) -> ConfigError:
    return ConfigError(
        f"the chat template {path} (`chat_template`) {why}",
        setting="chat_template",
        given=str(path),
        allowed="a Jinja template of conversations, as tokenizer_config.json has it, in a text file",
    )
