"""Our cache against the library's DynamicCache: what attention sees, and going back.

Would catch: a window that is one position off, a failed pass that leaves its positions behind, a prompt reused at the
wrong place.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from smoe.errors import EngineStateError
from smoe.memory.arena import GIVES_BACK
from smoe.models.kv_cache import BLOCK_TOKENS, RowCache
from tests import oracle, zoo

Open = Callable[..., PreTrainedModel]
WINDOW = 8


def keys(tokens: int, seed: int) -> torch.Tensor:
    return torch.randn(1, 2, tokens, 16, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
@pytest.mark.parametrize("steps", [[5, 1, 1], [20, 1, 1, 1], [3, 4, 1, 7, 1], [1] * 20, [8, 1], [7, 1], [9, 8, 1]])
def test_attention_sees_what_the_library_shows(family: str, steps: list[int]) -> None:
    """Full and sliding layers, prompts shorter and longer than the window, chunks, single steps."""
    config = zoo.make(family).config
    ours, theirs = RowCache(config, 1, 64), DynamicCache(config=config)
    for number, tokens in enumerate(steps):
        ours.begin(tokens, 1)
        for layer in range(config.num_hidden_layers):
            assert ours.get_mask_sizes(tokens, layer) == theirs.get_mask_sizes(tokens, layer)
            new = keys(tokens, 10 * number + layer), keys(tokens, 1000 + 10 * number + layer)
            shown, expected = ours.update(*new, layer), theirs.update(*new, layer)
            assert all(torch.equal(a, b) for a, b in zip(shown, expected, strict=True))
        ours.commit()
        assert ours.get_seq_length() == theirs.get_seq_length() == sum(steps[: number + 1])


def test_gpt_oss_far_beyond_its_window(toy: Callable[..., Path], open_model: Open) -> None:
    """48 positions with a window of 8, wrapped six times, at a small budget."""
    folder = toy("gpt_oss")
    assert oracle.reference(folder).config.sliding_window == WINDOW
    model = open_model(folder, "minimum")
    oracle.assert_same_steps(
        oracle.greedy(model, new_tokens=40), oracle.greedy(oracle.reference(folder), new_tokens=40)
    )


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "deepseek_v3"])
def test_a_conversation_reuses_its_prompt(family: str, toy: Callable[..., Path], open_model: Open) -> None:
    """A second turn on the first one's cache equals the library's second turn on its own cache, bit for bit."""
    folder = toy(family)
    ours, theirs = open_model(folder, "fifth"), oracle.reference(folder)
    results = []
    for model, cache in ((ours, ours.offload.new_cache()), (theirs, DynamicCache(config=theirs.config))):
        options = {"past_key_values": cache, "max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
        first = model.generate(oracle.PROMPT, **options)
        second = model.generate(torch.cat([first, oracle.PROMPT[:, :7]], dim=1), **options)
        results.append(second)
    assert torch.equal(*results)
    whole = theirs.generate(results[0][:, :-8], max_new_tokens=8, min_new_tokens=8, do_sample=False)
    assert torch.equal(results[0], whole)


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "deepseek_v3"])
def test_rewinding_is_as_if_it_had_not_been(family: str, toy: Callable[..., Path], open_model: Open) -> None:
    """Also for sliding windows, which keep every position."""
    model = open_model(toy(family), "half")
    cache = model.offload.new_cache()
    model(oracle.PROMPT, past_key_values=cache)
    token = torch.tensor([[7]])
    expected = model(token, past_key_values=cache).logits
    model(oracle.PROMPT[:, :9], past_key_values=cache)
    cache.rewind(oracle.PROMPT_TOKENS)
    assert torch.equal(model(token, past_key_values=cache).logits, expected)
    cache.crop(-1)
    assert cache.get_seq_length() == oracle.PROMPT_TOKENS
    assert torch.equal(model(token, past_key_values=cache).logits, expected)
    cache.reset()
    assert cache.get_seq_length() == 0
    model(oracle.PROMPT, past_key_values=cache)
    assert torch.equal(model(token, past_key_values=cache).logits, expected)


def test_rewinding_forwards_or_below_zero_is_refused(toy: Callable[..., Path], open_model: Open) -> None:
    model = open_model(toy("mixtral"))
    cache = model.offload.new_cache()
    model(oracle.PROMPT, past_key_values=cache)
    for length in (-1, oracle.PROMPT_TOKENS + 1):
        with pytest.raises(ValueError, match="rewind"):
            cache.rewind(length)


@pytest.mark.parametrize("family", ["qwen3_next", "lfm2_moe"])
def test_recurrent_layers_refuse_to_go_back(family: str, toy: Callable[..., Path], open_model: Open) -> None:
    model = open_model(toy(family))
    cache = model.offload.new_cache()
    model(oracle.PROMPT, past_key_values=cache)
    assert not cache.can_rewind
    with pytest.raises(EngineStateError, match="recurrent"):
        cache.rewind(3)
    assert cache.get_seq_length() == oracle.PROMPT_TOKENS


def test_a_failed_pass_leaves_nothing_behind(
    toy: Callable[..., Path], open_model: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = open_model(toy("gpt_oss"))
    cache = model.offload.new_cache()
    model(oracle.PROMPT, past_key_values=cache)
    token = torch.tensor([[7]])

    def fail(*_: object) -> torch.Tensor:
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr(model.lm_head, "forward", fail)
        with pytest.raises(KeyboardInterrupt):
            model(torch.tensor([[9]]), past_key_values=cache)
    assert cache.get_seq_length() == oracle.PROMPT_TOKENS
    continued = model(token, past_key_values=cache).logits
    fresh = model.offload.new_cache()
    model(oracle.PROMPT, past_key_values=fresh)
    assert torch.equal(continued, model(token, past_key_values=fresh).logits)


@pytest.mark.parametrize("family", ["qwen3_next", "lfm2_moe"])
def test_a_failed_pass_spoils_a_recurrent_cache(
    family: str, toy: Callable[..., Path], open_model: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some layers' state has taken the lost tokens in: would catch a cache that goes on with them, silently wrong."""
    model = open_model(toy(family))
    cache, token = model.offload.new_cache(), torch.tensor([[7]])
    expected = model(oracle.PROMPT, past_key_values=cache).logits

    def fail(*_: object) -> torch.Tensor:
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr(model.lm_head, "forward", fail)
        with pytest.raises(KeyboardInterrupt):
            model(token, past_key_values=cache)
    with pytest.raises(EngineStateError, match="new cache"):
        model(token, past_key_values=cache)
    cache.reset()
    assert torch.equal(model(oracle.PROMPT, past_key_values=cache).logits, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_positions_travel_as_bytes(dtype: torch.dtype) -> None:
    """Keys and values of other sizes, a few positions at a time, into a cache to which nothing was written yet."""
    config = zoo.make("gpt_oss").config
    ours, theirs, pattern = RowCache(config, 1, 64), RowCache(config, 1, 32), RowCache(config, 1, 1)
    for cache, tokens in ((ours, 12), (pattern, 1)):
        cache.begin(tokens, 1)
        for layer in range(config.num_hidden_layers):
            cache.update(keys(tokens, layer).to(dtype), keys(tokens, 50 + layer)[..., :7].to(dtype), layer)
        cache.commit()
    for begin, end in ((0, 5), (5, 6), (6, 12)):
        rows = ours.taken_out(begin, end)
        assert rows.dtype == torch.uint8 and len(rows) == (end - begin) * ours.position_bytes
        theirs.put_in(rows, begin, end, pattern)
    assert theirs.length == 12 and torch.equal(theirs.taken_out(0, 12), ours.taken_out(0, 12))
    theirs.rewind(4)
    theirs.put_in(ours.taken_out(4, 7), 4, 7, pattern)
    assert torch.equal(theirs.taken_out(0, 7), ours.taken_out(0, 7))
    three = ours.taken_out(0, 3)
    for begin, end in ((6, 9), (8, 11), (7, 9), (7, 7), (30, 33)):
        with pytest.raises(ValueError, match="cannot be appended"):
            theirs.put_in(three if (begin, end) != (7, 9) else three[:-1], begin, end, pattern)
    with pytest.raises(ValueError, match="cannot be appended"):
        theirs.put_in(ours.taken_out(0, 1).repeat(30), 7, 37, pattern)
    ours.retire()
    with pytest.raises(EngineStateError):
        ours.taken_out(0, 1)


def test_memory_is_counted_before_it_is_written_and_given_back() -> None:
    """In blocks, row by row; what is given back is zeros, what is kept stays."""

    class Asked:
        calls = 0

        def note_growth(self) -> None:
            self.calls += 1

    asked, config = Asked(), zoo.make("mixtral").config
    cache = RowCache(config, 2, 4 * BLOCK_TOKENS, weakref.ref(asked))
    for tokens, blocks, calls in ((100, 1, 1), (28, 1, 1), (1, 2, 2), (300, 4, 3)):
        cache.begin(tokens, 2)
        assert (cache.backed_tokens, asked.calls) == (2 * blocks * BLOCK_TOKENS, calls)
        for layer in cache.layers:
            layer.update(*(torch.ones(2, 2, tokens, 16) for _ in range(2)))
        cache.commit()
    cache.give_back(1, 5)
    left = BLOCK_TOKENS if GIVES_BACK else cache.capacity_tokens
    assert cache.backed_tokens == cache.capacity_tokens + left
    keys = cache.layers[0]._store[0]
    assert bool((keys[0, :, : cache.length] == 1).all()) and bool((keys[1, :, :left] == 1).all())
    assert not keys[1, :, left:].any()
    cache.reset()
    assert cache.backed_tokens == (0 if GIVES_BACK else 2 * cache.capacity_tokens)
