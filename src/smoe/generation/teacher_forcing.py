"""Runs a given text through a model: one token at a time, as in generation, to measure quality and time, or many tokens
at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from transformers import PreTrainedModel

from smoe.models.kv_cache import RowCache


def forced_rows(
    model: PreTrainedModel, rows: Sequence[Sequence[int]], cache: RowCache
) -> Iterator[tuple[torch.Tensor, float]]:
    """Yield (logits of the next tokens [B, V], seconds of the step) for every column of the token ids `rows` [B, T]."""
    now = model.offload.now  # type: ignore[operator]
    for column in zip(*rows, strict=True):
        given = torch.tensor(column, device=model.device).unsqueeze(1)
        started = now()
        output = model(input_ids=given, past_key_values=cache, use_cache=True, logits_to_keep=1)
        seconds = now() - started
        yield output.logits[:, -1], seconds


def forced(model: PreTrainedModel, ids: Sequence[int], cache: RowCache) -> Iterator[tuple[torch.Tensor, float]]:
    """Yield (logits of the next token [V], seconds of the step) for every token of `ids`."""
    for logits, seconds in forced_rows(model, [ids], cache):
        yield logits[0], seconds


def read_through(model: PreTrainedModel, ids: Sequence[int], tick: Callable[[int], None]) -> None:
    """Run the tokens `ids` through the model, as many at a time as the context holds. `tick` is called with the number
    of tokens of each pass."""
    engine = model.offload
    context: int = engine.context_tokens  # type: ignore[union-attr,assignment]
    with torch.no_grad():
        for begin in range(0, len(ids), context):
            piece = ids[begin : begin + context]
            given = torch.tensor([piece], device=model.device)
            cache = engine.new_cache()  # type: ignore[union-attr,operator]
            model(input_ids=given, past_key_values=cache, use_cache=True, logits_to_keep=1)
            tick(len(piece))
