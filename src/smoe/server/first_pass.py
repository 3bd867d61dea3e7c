"""Generates two tokens after a short prompt when the server starts, so that no request waits for the costs of a model's
first use.

There are three such costs. Kernels are compiled, or loaded from the user's cache. The libraries make kernels of their
own when they are first used. Memory is used for the first time.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from smoe.generation.loop import DecodeLoop
from smoe.generation.request import End, Piece, Request
from smoe.generation.sampling_settings import Sampling

_PROMPT_TOKENS, _NEW_TOKENS = 2, 2


def first_pass(model: PreTrainedModel, tokenizer: Any) -> None:
    """Generate two tokens after a short prompt, in a separate decode loop, so that no later request reuses this text.
    Where `Engine.without_reads` has an effect, no expert is read for it.

    Raises the error with which the model fails."""
    engine: Any = model.offload
    vocabulary = int(model.config.get_text_config().vocab_size)
    count = min(_PROMPT_TOKENS, engine.context_tokens - _NEW_TOKENS, vocabulary)
    if count < 1:
        return
    ends: list[End] = []

    def note(what: Piece | End) -> None:
        if isinstance(what, End):
            ends.append(what)

    loop = DecodeLoop(model, tokenizer)
    loop.hand_in(Request(range(count), Sampling(max_new_tokens=_NEW_TOKENS, ignores_end=True), note))
    with engine.without_reads():  # the experts of this prompt are not those of the first request
        loop.run(until_idle=True)
    for end in ends:
        if end.error is not None:
            raise end.error
