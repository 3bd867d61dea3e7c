"""The programs that `smoe launch` starts: how each gets a server, by environment variables and options of its own."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import NamedTuple

_ANSWER_PART = 4
"""The context length divided by the maximum number of tokens that an agent should request for an answer."""


class RunningServer(NamedTuple):
    """A running server: its address, model and key, which a launched program needs."""

    url: str
    """The address, without `/v1`."""
    model: str
    key: str
    """The API key that the program sends. If the server needs no key, any text."""
    context_tokens: int
    """The number of tokens of prompt and answer together: agents shorten a conversation before it is full."""


class Program(NamedTuple):
    """A program that `smoe launch` can start, with its settings for using a server."""

    command: str
    install: str
    """The command that installs the program; empty where it is not known."""
    environment: Callable[[RunningServer], dict[str, str]]
    arguments: Callable[[RunningServer], list[str]] = lambda server: []
    """Arguments before those of the user."""


def _openai(server: RunningServer) -> dict[str, str]:
    address = f"{server.url}/v1"
    return {
        "OPENAI_BASE_URL": address,
        "OPENAI_API_BASE": address,
        "OPENAI_API_KEY": server.key,
        "OPENAI_MODEL": server.model,
    }


def _anthropic(server: RunningServer) -> dict[str, str]:
    models = ("MODEL", "SMALL_FAST_MODEL", *(f"DEFAULT_{size}_MODEL" for size in ("HAIKU", "SONNET", "OPUS")))
    return {
        "ANTHROPIC_BASE_URL": server.url,
        "ANTHROPIC_AUTH_TOKEN": server.key,
        "ANTHROPIC_API_KEY": "",  # a key for Anthropic must not be sent to this server
        **{f"ANTHROPIC_{name}": server.model for name in models},
        "CLAUDE_CODE_SUBAGENT_MODEL": server.model,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_AUTO_COMPACT_WINDOW": str(server.context_tokens),
    }


def _any(server: RunningServer) -> dict[str, str]:
    """Return the environment variables that clients of OpenAI's, Anthropic's and Ollama's APIs read."""
    ollama = {"OLLAMA_HOST": server.url, "OLLAMA_API_KEY": server.key}
    return {**_openai(server), **_anthropic(server), **ollama}


def _opencode(server: RunningServer) -> dict[str, str]:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "smoe",
        "options": {"baseURL": f"{server.url}/v1", "apiKey": server.key},
        "models": {server.model: {"name": server.model, "limit": _limit(server)}},
    }
    model = f"smoe/{server.model}"
    config = {"provider": {"smoe": provider}, "model": model, "small_model": model}
    return {"OPENCODE_CONFIG_CONTENT": json.dumps(config)}


def _limit(server: RunningServer) -> dict[str, int]:
    """Return the limits of opencode, which leaves room for an answer of `output` tokens in the context."""
    return {"context": server.context_tokens, "output": server.context_tokens // _ANSWER_PART}


def _codex_arguments(server: RunningServer) -> list[str]:
    provider = "model_providers.smoe"
    settings = {
        "model_provider": "smoe",
        f"{provider}.name": "smoe",
        f"{provider}.base_url": f"{server.url}/v1",
        f"{provider}.env_key": "SMOE_API_KEY",
        f"{provider}.wire_api": "responses",
        "model_context_window": server.context_tokens,
    }
    given = [part for name, value in settings.items() for part in ("-c", f"{name}={json.dumps(value)}")]
    return [*given, "-m", server.model]


PROGRAMS = {
    each.command: each
    for each in (
        Program(
            "aider",
            "python -m pip install aider-install && aider-install",
            _openai,
            lambda server: ["--model", f"openai/{server.model}", "--no-show-model-warnings"],
        ),
        Program("claude", "npm install -g @anthropic-ai/claude-code", _anthropic),
        Program("codex", "npm install -g @openai/codex", lambda server: {"SMOE_API_KEY": server.key}, _codex_arguments),
        Program("opencode", "npm install -g opencode-ai", _opencode),
        Program("qwen", "npm install -g @qwen-code/qwen-code", _openai),
    )
}
"""{command: program} of the programs that need settings of their own."""


def program_of(command: str) -> Program:
    """Return the program with this command. A command that is not in `PROGRAMS` gets the usual environment
    variables."""
    return PROGRAMS.get(command) or Program(command, "", _any)
