"""Converts a request's fields to sampling settings. Fields that a request leaves out have the model's own values."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from transformers import PreTrainedModel

from smoe.generation.choices import COLDEST
from smoe.generation.request import Constraint
from smoe.generation.sampling import Sampling
from smoe.server.fields import Completing, RequestFields
from smoe.server.problem import refused
from smoe.server.texts import TextRequest

_ANY_SEED = -1
"""The seed that means "no seed" in vLLM and llama.cpp."""


class Copied(Constraint, Protocol):
    """The interface of a constraint on the next token that is copied for each text."""

    def another(self) -> Copied:
        """Return a copy for another text that has the same prompt."""


def sampling_of(asked: RequestFields, model: PreTrainedModel, max_new_tokens: int) -> Sampling:
    """Return the sampling settings of a request. Raises `ConfigError` for values out of bounds, and an `ApiError` for
    unknown token ids."""
    own = model.generation_config
    temperature, top_k = asked.temperature, None if asked.top_k is None else max(0, asked.top_k)
    narrows = asked.top_p not in (None, 1) or bool(top_k) or bool(asked.min_p)
    if asked.top_p == 0:
        temperature = 0.0  # no token but the most likely one
    elif temperature is None:
        temperature = (1.0 if own.temperature is None else own.temperature) if own.do_sample or narrows else 0.0
    penalties = asked.repetition_penalty, asked.repeat_penalty
    sampling = Sampling(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=_first(asked.top_p or None, own.top_p, 1.0),
        top_k=int(_first(top_k, own.top_k, 0)),
        min_p=own.min_p if asked.min_p is None else asked.min_p,
        repetition_penalty=1.0 if asked.repeat_last_n == 0 else _first(*penalties, own.repetition_penalty, 1.0),
        repetition_window=asked.repeat_last_n if (asked.repeat_last_n or 0) > 0 else None,
        ignores_end=bool(asked.ignore_eos),
        seed=secrets.randbelow(2**31) if asked.seed in (None, _ANY_SEED) else asked.seed,
    )
    if sampling.temperature is not None and sampling.temperature <= COLDEST:  # the likeliest token, of however many
        sampling = replace(sampling, temperature=0.0, top_p=1.0, top_k=0, min_p=None)
    if not isinstance(asked, Completing):
        return sampling
    return replace(
        sampling,
        stop=asked.stops,
        presence_penalty=_first(asked.presence_penalty, 0.0),
        frequency_penalty=_first(asked.frequency_penalty, 0.0),
        logit_bias=_biases(asked.logit_bias or {}, int(model.config.get_text_config().vocab_size)),
    )


def another(sampling: Sampling, number: int) -> Sampling:
    """Return the sampling settings of the `number`-th text of a request: the same settings with another seed."""
    return replace(sampling, seed=(sampling.seed + number) % 2**63) if number else sampling


def texts_of(
    ids: Sequence[int], sampling: Sampling, count: int, logprobs: int | None, constraint: Copied | None
) -> list[TextRequest]:
    """Return one request to the decode loop for each text of a prompt. Each has a copy of the constraint."""
    copies = [constraint if constraint is None or not number else constraint.another() for number in range(count)]
    return [TextRequest(ids, another(sampling, n), logprobs, each) for n, each in enumerate(copies)]


def refuse_endless(asked: RequestFields) -> None:
    """Raise an `ApiError` for a request that ignores the end token and has a grammar: its text could not end where the
    grammar ends."""
    if asked.ignore_eos:
        raise refused("'ignore_eos' must be false where a grammar constrains the response", "ignore_eos")


def _first(*values: float | None) -> float:
    """Return the first of the values that is not None."""
    return next(value for value in values if value is not None)


def _biases(given: dict[str, float], vocabulary: int) -> tuple[tuple[int, float], ...]:
    found = []
    for name, bias in given.items():
        if not (name.isascii() and name.isdigit() and len(name) < 10 and int(name) < vocabulary):
            raise refused(
                f"'logit_bias' names {name[:20]!r}; token ids are numbers from 0 to {vocabulary - 1}",
                "logit_bias",
                "invalid_value",
            )
        found.append((int(name), float(bias)))
    return tuple(found)
