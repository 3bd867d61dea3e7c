"""Decoding given tokens, one a step, as generation would: to measure quality and time on the same text every time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from transformers import PreTrainedModel

from smoe.runtime.kv_cache import RowCache


def forced(model: PreTrainedModel, ids: Sequence[int], cache: RowCache) -> Iterator[tuple[torch.Tensor, float]]:
    """(logits of the token that follows [V], seconds of the step) for every token of `ids`."""
    now = model.offload.now  # type: ignore[operator]
    for token in ids:
        started = now()
        output = model(input_ids=torch.tensor([[token]]), past_key_values=cache, use_cache=True, logits_to_keep=1)
        seconds = now() - started
        yield output.logits[0, -1], seconds
