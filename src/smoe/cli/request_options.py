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
        help="File with a Jinja chat template, which replaces the model's own.",
        rich_help_panel="Conversation",
    ),
]
ParseControlTokens = Annotated[
    bool,
    typer.Option(
        "--parse-control-tokens",
        help="Read the text of a control token in a message, such as <|im_end|>, as that token. \\[default: as "
        "ordinary text]",
        rich_help_panel="Conversation",
    ),
]


@dataclass(frozen=True)
class SamplingOptions:
    """The options for the choice of tokens."""

    max_new_tokens: Annotated[
        int, typer.Option(help="Maximum number of tokens to generate.", rich_help_panel=_SAMPLING)
    ] = 128
    temperature: Annotated[
        float,
        typer.Option(help="Randomness of sampling; 0: always choose the most likely token.", rich_help_panel=_SAMPLING),
    ] = 0.0
    top_p: Annotated[
        float,
        typer.Option(
            help="Sample only from the likeliest tokens whose probabilities sum to this value.",
            rich_help_panel=_SAMPLING,
        ),
    ] = 1.0
    seed: Annotated[
        int, typer.Option(help="Seed for sampling; equal seeds give equal texts.", rich_help_panel=_SAMPLING)
    ] = 0
    stop: Annotated[
        list[str] | None,
        typer.Option(
            help="End the text when the model writes this string, which is not printed. Repeatable.",
            rich_help_panel=_SAMPLING,
        ),
    ] = None


@dataclass(frozen=True)
class ChatSamplingOptions:
    """The options for the choice of tokens in a conversation; those left out have the model's values (its
    generation_config.json)."""

    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            help="Maximum number of tokens of an answer. \\[default: the model's, else 512]", rich_help_panel=_SAMPLING
        ),
    ] = None
    temperature: Annotated[
        float | None,
        typer.Option(
            help="Randomness of sampling; 0: always choose the most likely token. \\[default: the model's]",
            rich_help_panel=_SAMPLING,
        ),
    ] = None
    top_p: Annotated[
        float | None,
        typer.Option(
            help="Sample only from the likeliest tokens whose probabilities sum to this value. \\[default: the "
            "model's]",
            rich_help_panel=_SAMPLING,
        ),
    ] = None
    top_k: Annotated[
        int | None,
        typer.Option(
            help="Sample only from this many of the likeliest tokens; 0: from all. \\[default: the model's]",
            rich_help_panel=_SAMPLING,
        ),
    ] = None
    repetition_penalty: Annotated[
        float | None,
        typer.Option(
            help="Penalty on tokens that already occur in the text; above 1: fewer repetitions. \\[default: the "
            "model's]",
            rich_help_panel=_SAMPLING,
        ),
    ] = None
    seed: Annotated[
        int | None,
        typer.Option(
            help="Seed for sampling; the same seed repeats a conversation. \\[default: random]",
            rich_help_panel=_SAMPLING,
        ),
    ] = None
    stop: Annotated[
        list[str] | None,
        typer.Option(
            help="End an answer when the model writes this string, which is not printed. Repeatable.",
            rich_help_panel=_SAMPLING,
        ),
    ] = None


@dataclass(frozen=True)
class PromptOptions:
    """The options for prompts."""

    prompt: Annotated[
        list[str] | None,
        typer.Option(
            "--prompt",
            "-p",
            help="Text to continue. Repeatable: several prompts run together.",
            rich_help_panel=_PROMPT,
        ),
    ] = None
    prompt_file: Annotated[
        list[str] | None,
        typer.Option(help="File whose whole text is a prompt; - is stdin. Repeatable.", rich_help_panel=_PROMPT),
    ] = None
