"""Several tokens of one text through a decoder layer: the bits of transformers' way with the same kernels.

Would catch another rounding of the rotary embedding, a token that takes its neighbour's angle or place in the KV cache,
a continuation that overwrites the text before it, and a way that somebody looks into being gone past.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from smoe.fastpath import attention, fast_layer
from smoe.kernels.isa import widest
from smoe.kernels.spinning_pool import SpinningPool
from smoe.models.kv_cache import RowCache
from tests import promised
from tests.fastpath.layers import IDS, MODELS, adopt, model_of, quantise

LENGTHS = 7, 3, 2
"""The tokens of a text and of its continuations, each in one pass."""


@pytest.fixture(scope="module")
def own_order() -> Iterator[SpinningPool]:
    """A pool that multiplies in our own order, also on CPUs without bf16 instructions."""
    promised.needs(widest() is not None, promised.MACHINE_CODE)
    with SpinningPool(2, in_own_order=True) as made:
        yield made


def adopted(kind: str, is_quantised: bool, pool: SpinningPool) -> PreTrainedModel:
    model = model_of(*MODELS[kind])
    if is_quantised:
        quantise(model)
    assert attention.speed_up_prompts(model, pool) == 2
    assert len(adopt(model, pool)) == 2
    return model


def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry with the number of tokens for every layer and prompt that goes through our method."""
    seen: list[int] = []
    several_tokens = fast_layer.FastLayer.several_tokens

    def noted(self: Any, prompt: Any, hidden: torch.Tensor, *args: Any) -> torch.Tensor:
        seen.append(hidden.shape[1])
        return several_tokens(self, prompt, hidden, *args)

    monkeypatch.setattr(fast_layer.FastLayer, "several_tokens", noted)
    return seen


def read(
    model: PreTrainedModel, ids: torch.Tensor = IDS, start: int = 0, lengths: Sequence[int] = LENGTHS
) -> list[torch.Tensor]:
    """Return the logits of all tokens, and then the keys and values of every layer."""
    cache, begin = RowCache(model.config, ids.shape[0], start + ids.shape[1]), 0
    cache.start = start
    found = []
    with torch.no_grad():
        for tokens in lengths:
            cache.begin(tokens, ids.shape[0])
            some = ids[:, begin : begin + tokens]
            found.append(model(input_ids=some, past_key_values=cache, use_cache=True).logits)
            cache.commit()
            begin += tokens
    return found + [each for layer in cache.layers for each in layer._store]


def taken_back(model: PreTrainedModel) -> None:
    """The layers' own forward again."""
    for layer in model.model.layers:
        del layer.forward


@pytest.mark.parametrize("is_quantised", [False, True], ids=["bf16", "8 bits"])
@pytest.mark.parametrize("kind", MODELS)
def test_the_bits_are_those_of_transformers(
    kind: str, is_quantised: bool, own_order: SpinningPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = adopted(kind, is_quantised, own_order)
    seen = calls(monkeypatch)
    ours = read(model)
    assert seen == [tokens for tokens in LENGTHS for _ in range(2)]
    shifted = read(model, start=3)
    taken_back(model)
    theirs = read(model)
    assert len(seen) == 4 * len(LENGTHS)
    assert all(map(torch.equal, ours, theirs))
    assert all(map(torch.equal, shifted[: len(LENGTHS)], theirs))


@pytest.mark.parametrize("tokens", [8, 100])
def test_a_prompt_on_all_threads(tokens: int, own_order: SpinningPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With more tokens than wake sleeping threads, and a last step of fewer tokens."""
    model, seen = adopted("norms of heads", True, own_order), calls(monkeypatch)
    ids = torch.randint(96, (1, tokens + 5), generator=torch.Generator().manual_seed(1))
    ours = read(model, ids, lengths=(tokens, 5))
    assert seen == [tokens, tokens, 5, 5]
    taken_back(model)
    assert all(map(torch.equal, ours, read(model, ids, lengths=(tokens, 5))))


def test_several_rows_and_other_masks_go_the_librarys_way(
    own_order: SpinningPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, seen = adopted("norms of heads", False, own_order), calls(monkeypatch)
    read(model, IDS.repeat(2, 1))
    cache = RowCache(model.config, 1, IDS.shape[1])
    padded = torch.ones(1, 7, dtype=torch.long)
    padded[0, 0] = 0
    with torch.no_grad():
        cache.begin(7, 1)
        model(input_ids=IDS[:, :7], past_key_values=cache, use_cache=True, attention_mask=padded)
        model(input_ids=IDS)
    assert not seen


def test_somebody_who_looks_in_sees_every_module(own_order: SpinningPool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, seen = adopted("norms of heads", False, own_order), calls(monkeypatch)
    looked: list[str] = []
    hook = model.model.layers[0].self_attn.register_forward_hook(lambda *_: looked.append("attention"))
    read(model)
    assert len(looked) == len(LENGTHS)
    assert len(seen) == len(LENGTHS)  # the other layer
    hook.remove()
    model.model.layers[0].self_attn.q_proj.register_forward_hook(lambda *_: looked.append("q"))
    read(model)
    assert looked.count("q") == len(LENGTHS)


def test_another_attention_function_is_called(own_order: SpinningPool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, seen = adopted("norms of heads", False, own_order), calls(monkeypatch)
    own = model.model.layers[0].self_attn
    called: list[int] = []
    original = own.forward

    def other(*args: Any, **kwargs: Any) -> Any:
        called.append(1)
        return original(*args, **kwargs)

    monkeypatch.setattr(own, "forward", other)
    read(model)
    assert len(called) == len(seen) == len(LENGTHS)


def test_tokens_beyond_the_cache_are_an_error(own_order: SpinningPool) -> None:
    """Would catch machine code that writes past the storage."""
    model = adopted("norms of heads", False, own_order)
    cache = RowCache(model.config, 1, 8)
    cache.begin_after(6)
    with torch.no_grad(), pytest.raises(RuntimeError):
        model.model(input_ids=IDS[:, :6], past_key_values=cache, use_cache=True)


def test_a_layer_that_reads_prompts_in_another_way_is_found_out(
    own_order: SpinningPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(*MODELS["norms of heads"])
    (of_layer,) = {type(layer) for layer in model.model.layers}
    forward = of_layer.forward

    def other(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        output = forward(self, hidden_states, *args, **kwargs)
        return output if hidden_states.shape[1] == 1 else output * 2

    monkeypatch.setattr(of_layer, "forward", other)
    attention.speed_up_prompts(model, own_order)
    assert len(adopt(model, own_order)) == 2
    seen = calls(monkeypatch)
    read(model)
    assert not seen
