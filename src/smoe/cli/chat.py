"""`smoe chat`: a conversation on the terminal."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from smoe.cli.options import Debug, EngineOptions, Model, SamplingOptions
from smoe.errors import ContextError

if TYPE_CHECKING:
    from smoe.runtime.chat import Chat

EPILOG = """Examples:

smoe chat

smoe chat Qwen/Qwen3-30B-A3B --memory 8GiB --context 8192 --temperature 0.7

In the conversation: /reset forgets it, /quit leaves, Ctrl-C stops an answer, Ctrl-D leaves.
"""

_QUIT, _RESET = "/quit", "/reset"


def command(engine: EngineOptions, sampling: SamplingOptions, model: Model = "demo", debug: Debug = False) -> None:
    """Talk with a model. What has been said is not computed again.

    The model's own chat template is used; a model without one continues the text instead.
    """
    from smoe.cli.console import note
    from smoe.cli.generate import to_sampling
    from smoe.cli.session import loaded, tokenizer_of
    from smoe.runtime.chat import Chat

    with loaded(model, engine.config(), engine.revision) as ready:
        chat = Chat(ready, tokenizer_of(model, engine.revision), to_sampling(sampling))
        if not chat.has_template:
            note("this model has no chat template: it continues the text rather than answering it")
        note(f"{_RESET} forgets the conversation, {_QUIT} leaves, Ctrl-C stops an answer")
        while (message := _ask()) not in (None, _QUIT):
            if message == _RESET:
                chat.reset()
                note("forgotten")
            elif message.startswith("/") and " " not in message:
                note(f"there is no {message}; {_RESET} forgets the conversation, {_QUIT} leaves")
            elif message:
                _answer(chat, message)


def _ask() -> str | None:
    """The next line; None at the end of the input."""
    while True:
        try:
            if sys.stdin.isatty() and sys.stdout.isatty():
                return input("> ").strip()
            line = sys.stdin.readline()
            return line.strip() if line else None
        except EOFError:
            return None
        except KeyboardInterrupt:
            from smoe.cli.console import note

            note(f"\n{_QUIT} or Ctrl-D leaves")


def _answer(chat: Chat, message: str) -> None:
    from smoe.cli.console import complain, note
    from smoe.units import format_rate, format_seconds

    try:
        generation = chat.say(message, _write)
    except ContextError as error:
        complain(error)
        note(f"{_RESET} makes room")
        return
    print(flush=True)
    words = ["stopped"] if generation.was_interrupted else []
    if generation.ttft_seconds is not None:
        words.append(f"first token after {format_seconds(generation.ttft_seconds)}")
    if generation.tokens_per_second is not None:
        words.append(format_rate(generation.tokens_per_second))
    words.append(f"{chat.reused_tokens} of {generation.prompt_tokens} tokens were known")
    for text in [", ".join(words), *generation.notes]:
        note(text)


def _write(row: int, text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
