"""Compares our methods for a decoder layer with transformers': both must compute the same bits from the same input, and
write the same keys and values (`decoder_layer.py`, `prompt_layer.py`)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from smoe.fastpath.fast_layer import FastLayer
from smoe.fastpath.prompt_layer import PromptLayer
from smoe.kernels.proof import same_bits
from smoe.models.kv_cache import RowCache

PROOF_POSITIONS = 5
"""The number of positions in the KV cache before a token that is compared, and that of the tokens of a prompt."""
_PROOF_TURNS = 4


class Embeddings(NamedTuple):
    """The outputs of a model's rotary embedding for one token, each [1, 1, rotary size]."""

    cos: torch.Tensor
    sin: torch.Tensor


def agrees(model: PreTrainedModel, layer: nn.Module, ours: FastLayer, embeddings: Embeddings) -> bool:
    """Return whether our method and transformers' compute the same bits in a decoder layer, and write the same keys and
    values."""
    generator = torch.Generator().manual_seed(0)
    cache = RowCache(model.config.get_text_config(), 1, PROOF_POSITIONS + 1)
    modules, stub, parts = layer._modules, _Stub(), ours.work.parts
    mlp, modules[ours.mlp] = modules[ours.mlp], stub

    def numbers(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=generator).bfloat16()

    try:
        with torch.no_grad():
            cache.layers[ours.index].update(*numbers(2, 1, parts.key_heads, PROOF_POSITIONS, parts.size))
            cache.begin_after(PROOF_POSITIONS)
            return all(
                _agrees_on(ours, stub, cache, numbers(1, 1, parts.o.outputs), numbers(2, *embeddings.cos.shape).tanh())
                for _ in range(_PROOF_TURNS)
            )
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):  # the module has another signature
        return False
    finally:
        modules[ours.mlp] = mlp


def agrees_on_prompts(
    model: PreTrainedModel, layer: nn.Module, ours: FastLayer, prompt: PromptLayer, embeddings: Embeddings
) -> bool:
    """Return whether `prompt` and transformers' function compute the same bits for a text, and for its continuation, in
    a decoder layer, and write the same keys and values."""
    generator = torch.Generator().manual_seed(0)
    config, tokens = model.config.get_text_config(), PROOF_POSITIONS
    cache, again = (RowCache(config, 1, 2 * tokens) for _ in range(2))
    modules, stub = layer._modules, _Stub()
    mlp, modules[ours.mlp] = modules[ours.mlp], stub
    causal = torch.ones(1, 1, tokens, 2 * tokens, dtype=torch.bool).tril(tokens)
    sizes = tokens, embeddings.cos.shape[-1]
    try:
        with torch.no_grad():
            for mask in (None, causal):
                hidden = torch.randn(1, tokens, ours.work.parts.o.outputs, generator=generator).bfloat16()
                cos, sin = torch.randn(2, 1, *sizes, generator=generator).bfloat16().tanh()
                positions = torch.arange(cache.length, cache.length + tokens).unsqueeze(0)
                given = {"past_key_values": cache, "position_embeddings": (cos, sin), "position_ids": positions}
                theirs, seen = ours.library(hidden, attention_mask=mask, use_cache=True, **given), stub.seen
                place = prompt.place(hidden, mask, (cos, sin), again)
                if place is None:
                    return False
                mine = ours.several_tokens(prompt, hidden, (cos, sin), place)
                if not all(map(same_bits, (mine, stub.seen), (theirs, seen))):
                    return False
                cache.begin_after(cache.length + tokens)
                again.begin_after(cache.length)
            stored = (layer.place()[:2] for layer in (cache.layers[ours.index], again.layers[ours.index]))
            return all(map(same_bits, *stored))
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):  # the module has another signature
        return False
    finally:
        modules[ours.mlp] = mlp


def _agrees_on(ours: FastLayer, stub: _Stub, cache: RowCache, hidden: torch.Tensor, embeddings: torch.Tensor) -> bool:
    """Return whether our method and transformers' compute the same bits for one token `hidden`. `embeddings` [2, 1, 1,
    rotary size]: cosines and sines."""
    cos, sin = embeddings
    position = torch.tensor([[cache.length]])
    given = {"past_key_values": cache, "position_embeddings": (cos, sin), "position_ids": position}
    theirs, seen = ours.library(hidden, attention_mask=None, use_cache=True, **given), stub.seen
    place = ours.place(hidden, (cos, sin), cache)
    if place is None:
        return False
    written = [storage[:, :, place.end].clone() for storage in (place.keys, place.values)]
    for storage in (place.keys, place.values):
        storage[:, :, place.end] = 0
    mine = ours.one_token(hidden, (cos, sin), place)
    again = [storage[:, :, place.end] for storage in (place.keys, place.values)]
    return all(map(same_bits, (mine, stub.seen, *again), (theirs, seen, *written)))


class _Stub(nn.Module):
    """A replacement for a layer's mlp in tests: it stores its input and returns other numbers, whose values do not
    matter."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = torch.empty(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = x.clone()
        return x.flip(-1)
