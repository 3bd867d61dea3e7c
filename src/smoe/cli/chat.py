"""`smoe chat`: a conversation on the terminal."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import typer

from smoe.cli.libraries import import_libraries
from smoe.cli.options import Debug, EngineOptions, Model, check_text, in_container
from smoe.cli.request_options import ChatSamplingOptions, ChatTemplate, ParseControlTokens
from smoe.errors import ConfigError, ContextError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from smoe.generation.chat import Chat
    from smoe.generation.sampling_settings import Sampling

EPILOG = """Examples:

smoe chat

smoe chat Qwen/Qwen3-30B-A3B --memory 8GiB --context 8192 --temperature 0.7

smoe chat ./my-moe --memory 8GiB --temperature 0     (the likeliest token)

In the conversation: /help lists the commands, /settings shows how tokens are
chosen, /reset starts a new conversation, /quit (or /exit, /bye) leaves,
Ctrl-C stops an answer, Ctrl-D leaves.
"""

_QUIT = "/quit"
_LEAVING = (_QUIT, "/exit", "/bye")
"""Messages that end a chat, here and in similar programs."""
_COMMANDS = {
    "/help": "lists these commands",
    "/settings": "shows how tokens are chosen, and how much of the context and memory is used",
    "/reset": "starts a new conversation",
    _QUIT: "leaves, as /exit, /bye and Ctrl-D do",
    "Ctrl-C": "stops an answer",
}
_MOST_NEW_TOKENS = 512
"""The most new tokens of an answer by default."""


def command(
    engine: EngineOptions,
    sampling: ChatSamplingOptions,
    model: Model = "demo",
    chat_template: ChatTemplate = None,
    parse_control_tokens: ParseControlTokens = False,
    debug: Debug = False,
) -> None:
    """Chat with a model. Earlier messages stay in the KV cache and are not computed again.

    The model's own chat template (or that of --chat-template) and its own sampling settings are used; options override
    them, and /settings shows them. A model without a template continues the text instead.
    """
    from smoe.cli.console import note, stdin
    from smoe.cli.interrupts import exit_code, print_interrupted, was_terminated

    settings = in_container(engine.config())
    import_libraries(model, settings)
    from smoe.cli.session import loaded_with_tokenizer
    from smoe.conversation.template_file import read_template
    from smoe.generation.chat import Chat
    from smoe.load.last_residents import filling_when_idle
    from smoe.models.files import DEMO, DEMO_REMARK, fetch

    if stdin() is None:
        raise ConfigError(
            "smoe chat reads messages from stdin, and stdin is closed; run it in a terminal, or pipe text into it"
        )
    _sampling(sampling, None)  # bad values are refused before the model is loaded
    template = None if chat_template is None else read_template(chat_template)
    with (
        loaded_with_tokenizer(model, settings, engine.revision, template, describes=False) as (ready, tokenizer),
        filling_when_idle(fetch(model, engine.revision), ready.offload),  # type: ignore[arg-type]
    ):
        chosen = _sampling(sampling, ready)
        chat = Chat(ready, tokenizer, chosen, parses_control_tokens=parse_control_tokens)
        if model == DEMO:
            note(DEMO_REMARK)
        if not chat.has_template:
            note(
                "this model has no chat template, so it continues your text instead of answering; to use a template, "
                "give "
                "--chat-template FILE"
            )
        _help()
        while not was_terminated() and (message := _ask()) not in (None, *_LEAVING):
            if message == "/help":
                _help(is_asked=True)
            elif message == "/settings":
                _show_settings(ready, chat, chosen, sampling)
            elif message == "/reset":
                chat.reset()
                note("the conversation is deleted; your next message begins a new conversation", is_asked=True)
            elif message.startswith("/") and " " not in message:
                note(f"the command {message} is unknown; /help lists the commands", is_asked=True)
            elif message:
                _answer(chat, message)
    if was_terminated():
        print_interrupted()
        raise typer.Exit(exit_code())


def _sampling(options: ChatSamplingOptions, model: PreTrainedModel | None) -> Sampling:
    """Return the sampling settings: the given options, and the model's own values for options that are not given."""
    import secrets

    from smoe.generation.sampling_settings import Sampling

    own = model.generation_config.max_new_tokens if model is not None else None
    given = options.max_new_tokens
    return Sampling(
        max_new_tokens=given if given is not None else own or _MOST_NEW_TOKENS,
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        repetition_penalty=options.repetition_penalty,
        seed=options.seed if options.seed is not None else secrets.randbelow(10**6),
        stop=tuple(options.stop or ()),
    )


def _help(*, is_asked: bool = False) -> None:
    """Print the chat's commands."""
    from smoe.cli.console import note

    note("\n".join(f"{name:<11}{meaning}" for name, meaning in _COMMANDS.items()), is_asked=is_asked)


def _show_settings(model: PreTrainedModel, chat: Chat, sampling: Sampling, options: ChatSamplingOptions) -> None:
    """Print the sampling settings with the origin of each, the part of the context that the conversation uses, and how
    the memory budget is divided."""
    from smoe.cli.console import note
    from smoe.cli.session import described
    from smoe.generation.library_settings import choices_of

    choices = choices_of(model, sampling)
    lines = [f"{name} {value:g} ({whose})" for name, (value, whose) in choices.items()]
    if "temperature" in choices:
        lines.append(f"seed {sampling.seed} ({'given' if options.seed is not None else 'drawn; --seed repeats it'})")
    else:
        lines.insert(0, "always the most likely token; --temperature 0.7 would sample")
    engine: Any = model.offload
    lines.append(f"at most {sampling.max_new_tokens} new tokens an answer (--max-new-tokens)")
    lines.append(f"{chat.tokens} of {engine.context_tokens} tokens of context used (--context)")
    note("\n".join([*lines, *described(engine)]), is_asked=True)


def _ask() -> str | None:
    """Return the next line that the user types; None at the end of the input."""
    from smoe.cli.console import complain, note
    from smoe.cli.interrupts import was_terminated

    while True:
        try:
            if sys.stdin.isatty() and sys.stdout.isatty():
                line = input("> ")
            elif not (line := sys.stdin.readline()):
                return None
            check_text(line, "the message")
            return line.strip()
        except EOFError:
            return None
        except ConfigError as error:
            complain(error)
        except KeyboardInterrupt:
            if was_terminated():
                return None
            note(f"\n{_QUIT} or Ctrl-D leaves", is_asked=True)


def _answer(chat: Chat, message: str) -> None:
    from smoe.cli.console import complain, note, warn
    from smoe.units import format_rate, format_seconds

    try:
        generation = chat.say(message, _write)
    except ContextError as error:
        complain(error)
        note("/reset starts a new conversation", is_asked=True)
        return
    print(flush=True)
    words = ["stopped"] if generation.was_interrupted else []
    is_cut = generation.answers[0].finish_reason == "length"
    if is_cut and not generation.notes:
        words.append(f"cut after {generation.new_tokens} tokens (--max-new-tokens)")
    if generation.ttft_seconds is not None:
        words.append(f"first token after {format_seconds(generation.ttft_seconds)}")
    if generation.tokens_per_second is not None:
        words.append(format_rate(generation.tokens_per_second))
    words.append(f"{chat.reused_tokens} of {generation.prompt_tokens} tokens were in the KV cache")
    note(", ".join(words))
    for text in generation.notes if is_cut else ():
        warn(text)


def _write(row: int, text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
