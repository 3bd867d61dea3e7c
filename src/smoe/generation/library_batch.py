"""Generates a batch with `generate` of transformers, with padding on the left. It is used for recordings, in which a
row of a batch is one text from beginning to end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from smoe.generation.library_settings import generation_config
from smoe.generation.sampling_settings import Sampling
from smoe.runtime.engine import Engine


@dataclass(frozen=True)
class Batch:
    """Prompts that padding on the left has made equally long."""

    input_ids: torch.Tensor
    """[rows, T] token ids."""
    attention_mask: torch.Tensor
    """[rows, T], 1 for tokens and 0 for padding."""


def pad(rows: Sequence[Sequence[int]], pad_id: int) -> Batch:
    """Return the token ids of several rows as one batch. Padding is on the left, so that new tokens follow the prompts
    directly."""
    width = max(len(row) for row in rows)
    ids = [[pad_id] * (width - len(row)) + list(row) for row in rows]
    mask = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
    return Batch(torch.tensor(ids), torch.tensor(mask))


def continue_batch(model: PreTrainedModel, tokenizer: Any, batch: Batch, sampling: Sampling) -> torch.Tensor:
    """Return a batch of prompts with their continuations, [rows, T + new tokens]. There are `sampling.max_new_tokens`
    new tokens, or fewer if the context is full."""
    engine: Engine = model.offload  # type: ignore[assignment]
    room = engine.context_tokens - batch.input_ids.shape[1]
    torch.manual_seed(sampling.seed)
    made: torch.Tensor = model.generate(  # type: ignore[operator]
        input_ids=batch.input_ids.to(model.device),
        attention_mask=batch.attention_mask.to(model.device),
        generation_config=generation_config(model, tokenizer, sampling, min(room, sampling.max_new_tokens)),
    )
    return made
