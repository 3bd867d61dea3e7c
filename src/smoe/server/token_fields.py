"""The fields of requests to llama.cpp's endpoints for tokens."""

from __future__ import annotations

from pydantic import Field

from smoe.server.body import AskedFields
from smoe.server.fields import Ids


class TokenizeAsked(AskedFields):
    """A request to `POST /tokenize`."""

    content: str = Field(max_length=500_000)
    """The text."""
    add_special: bool | None = None
    """Whether the tokenizer's initial tokens are added; left out: false."""
    parse_special: bool | None = None
    """Whether the text of a control token becomes that token; left out: true."""
    with_pieces: bool | None = None
    """Whether each token is listed with its text."""


class DetokenizeAsked(AskedFields):
    """A request to `POST /detokenize`."""

    tokens: Ids
