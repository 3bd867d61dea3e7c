"""The options of requests: prompts, and the choice of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

_SAMPLING = "Sampling"
_PROMPT = "Prompt"


ChatTemplate = Annotated[
    Path | None,
    typer.Option(
        "--chat-template",
        metavar="FILE",
        help="A Jinja template of conversations that replaces the model's own.",
        rich_help_panel="Conversation",
    ),
]
ParseControlTokens = Annotated[
    bool,
    typer.Option(
        "--parse-control-tokens",
        help="Read the text of control tokens (<|im_end|>) in messages as those tokens. \\[default: as text]",
        rich_help_panel="Conversation",
    ),
]


@dataclass(frozen=True)
class SamplingOptions:
    """The options for the choice of tokens."""

    max_new_tokens: Annotated[int, typer.Option(help="Tokens to generate, at most.", rich_help_panel=_SAMPLING)] = 128
    temperature: Annotated[
        float, typer.Option(help="0: always choose the most likely token.", rich_help_panel=_SAMPLING)
    ] = 0.0
    top_p: Annotated[
        float,
        typer.Option(help="Sample from the likeliest tokens of this total probability.", rich_help_panel=_SAMPLING),
    ] = 1.0
    seed: Annotated[int, typer.Option(help="Seed for sampling.", rich_help_panel=_SAMPLING)] = 0
    stop: Annotated[
        list[str] | None,
        typer.Option(help="End the text before this string. Repeatable.", rich_help_panel=_SAMPLING),
    ] = None


@dataclass(frozen=True)
class ChatSamplingOptions:
    """The options for the choice of tokens in a conversation; those left out have the model's values (its
    generation_config.json)."""

    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            help="Tokens of an answer, at most. \\[default: the model's, else 512]", rich_help_panel=_SAMPLING
        ),
    ] = None
    temperature: Annotated[
        float | None,
        typer.Option(
            help="0: always choose the most likely token. \\[default: the model's]", rich_help_panel=_SAMPLING
        ),
    ] = None
    top_p: Annotated[
        float | None,
        typer.Option(
            help="Sample from the likeliest tokens of this total probability. \\[default: the model's]",
            rich_help_panel=_SAMPLING,
        ),
    ] = None
    top_k: Annotated[
        int | None,
        typer.Option(
            help="Sample from this many of the likeliest tokens; 0: from all. \\[default: the model's]",
            rich_help_panel=_SAMPLING,
        ),
    ] = None
    repetition_penalty: Annotated[
        float | None,
        typer.Option(help="Above 1: fewer repetitions. \\[default: the model's]", rich_help_panel=_SAMPLING),
    ] = None
    seed: Annotated[
        int | None,
        typer.Option(
            help="Seed for sampling, to repeat a conversation. \\[default: random]", rich_help_panel=_SAMPLING
        ),
    ] = None
    stop: Annotated[
        list[str] | None,
        typer.Option(help="End an answer before this string. Repeatable.", rich_help_panel=_SAMPLING),
    ] = None


@dataclass(frozen=True)
class PromptOptions:
    """The options for prompts."""

    prompt: Annotated[
        list[str] | None,
        typer.Option(
            "--prompt", "-p", help="A prompt. Repeatable: several prompts run together.", rich_help_panel=_PROMPT
        ),
    ] = None
    prompt_file: Annotated[
        list[str] | None,
        typer.Option(help="A file that is one prompt; - is stdin. Repeatable.", rich_help_panel=_PROMPT),
    ] = None
