"""Decoding given tokens, one a step, as generation would: to measure quality and time on the same text every time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from transformers import PreTrainedModel

from smoe.models.kv_cache import RowCache


def forced_rows(
    model: PreTrainedModel, rows: Sequence[Sequence[int]], cache: RowCache
) -> Iterator[tuple[torch.Tensor, float]]:
    """(logits of the tokens that follow [B, V], seconds of the step) for every column of `rows` [B, T]."""
    now = model.offload.now  # type: ignore[operator]
    for column in zip(*rows, strict=True):
        given = torch.tensor(column, device=model.device).unsqueeze(1)
        started = now()
        output = model(input_ids=given, past_key_values=cache, use_cache=True, logits_to_keep=1)
        seconds = now() - started
        yield output.logits[:, -1], seconds


def forced(model: PreTrainedModel, ids: Sequence[int], cache: RowCache) -> Iterator[tuple[torch.Tensor, float]]:
    """(logits of the token that follows [V], seconds of the step) for every token of `ids`."""
    for logits, seconds in forced_rows(model, [ids], cache):
        yield logits[0], seconds
