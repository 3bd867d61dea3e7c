"""A copy of the model that decodes beside it: what it names, and how it is aligned.

Would catch: a token or keys and values that are not the model's where they should be, or are where they should not,
rows of another layer or position, a choice that is not the router's own, a router that is heard after the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from smoe.errors import EngineStateError
from smoe.load.engine_parts import scoring_rules
from smoe.models.kv_cache import RowCache
from smoe.models.read_spec import read_spec
from smoe.policy.draft_predictions import Expected
from smoe.runtime.draft_model import Alignment, Draft, Greedy, as_draft
from tests import oracle, zoo
from tests.packs import pack_folder

Open = Callable[..., PreTrainedModel]
PROMPT = oracle.PROMPT[0].tolist()
STEPS = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A toy with experts in two bits beside its own."""
    folder = zoo.save("mixtral", tmp_path_factory.mktemp("packed"))
    pack_folder(folder, precision="int2")
    return folder


@pytest.fixture
def run(folder: Path, open_model: Open) -> Iterator[tuple[Greedy, list[int], list[Any]]]:
    """The model's own text after the prompt: (what decoded it, its tokens, what its routers chose for them)."""
    text = Greedy(open_model(folder, "half"))
    text.read(PROMPT)
    tokens = []
    with text.engine.recording() as trace:
        for _ in range(STEPS):
            tokens.append(text.next_token)
            text.take(tokens[-1:])
    yield text, tokens, [set(routing.top_k_index[0]) for routing in trace]


def open_draft(folder: Path, open_model: Open, precision: str) -> Any:
    model = open_model(folder, "full", precision=precision)
    return as_draft(model, scoring_rules(model, read_spec(folder, model.offload.config)))


def steps(draft: Draft, alignment: Alignment, tokens: list[int], cache: RowCache) -> list[Expected]:
    draft.read(PROMPT)
    return [expected for token in tokens for expected in draft.step(alignment, token, cache)]


@pytest.mark.parametrize("alignment", [Alignment(1, 1), Alignment(0, 0), Alignment(4, 2)])
def test_a_copy_in_the_same_precision_names_what_is_chosen(
    alignment: Alignment, folder: Path, open_model: Open, run: Any
) -> None:
    text, tokens, chosen = run
    layers = sorted(text.engine.store.layers)
    with open_draft(folder, open_model, "auto") as draft:
        said = steps(draft, alignment, tokens, text.cache)
        assert draft.text.next_token == text.next_token
    assert [set(expected.experts[:2]) for expected in said] == chosen
    assert [expected.layer for expected in said] == layers * STEPS
    for expected in said:
        assert len(expected.experts) == len(set(expected.experts)) == len(expected.scores) == 3, "one spare"
        assert list(expected.scores) == sorted(expected.scores, reverse=True)


def test_told_every_token_it_names_what_it_chooses_itself(folder: Path, open_model: Open, run: Any) -> None:
    """Against the copy reading the model's text by itself; a token that was not handed over would show."""
    text, tokens, chosen = run
    model = open_model(folder, "full", precision="int2")
    cache = model.offload.new_cache()
    model(torch.tensor([PROMPT]), past_key_values=cache)
    with model.offload.recording() as trace:
        for token in tokens:
            model(torch.tensor([[token]]), past_key_values=cache)
    with open_draft(folder, open_model, "int2") as draft:
        said = steps(draft, Alignment(1, 0), tokens, text.cache)
    assert [set(expected.experts[:2]) for expected in said] == [set(routing.top_k_index[0]) for routing in trace]
    assert [set(expected.experts[:2]) for expected in said] != chosen, "two bits choose otherwise somewhere"


def test_left_alone_it_goes_astray(folder: Path, open_model: Open, run: Any) -> None:
    text, tokens, chosen = run
    with open_draft(folder, open_model, "int2") as draft:
        told = steps(draft, Alignment(1, 0), tokens, text.cache)
        alone = steps(draft, Alignment(0, 0), tokens, text.cache)
        draft.read(PROMPT)
        own = []
        for token in tokens:
            own.append(draft.text.next_token)
            draft.step(Alignment(0, 0), token, text.cache)
        assert own != tokens, "it writes another text"
    assert alone != told
    right = [
        sum(len(set(e.experts[:2]) & wanted) for e, wanted in zip(said, chosen, strict=True)) for said in (told, alone)
    ]
    assert right[1] < right[0]


@pytest.mark.parametrize("period", [1, 3])
def test_aligned_keys_and_values_are_the_models_bit_for_bit(
    period: int, folder: Path, open_model: Open, run: Any
) -> None:
    """After each alignment all rows before the token under way; those since then are the draft's own."""
    text, tokens, _ = run
    with open_draft(folder, open_model, "int2") as draft:
        draft.read(PROMPT)
        assert differing(draft.text.cache, text.cache, 0, len(PROMPT))
        for number, token in enumerate(tokens):
            draft.step(Alignment(0, period), token, text.cache)
            aligned = len(PROMPT) + number - number % period
            assert not differing(draft.text.cache, text.cache, 0, aligned)
            own = differing(draft.text.cache, text.cache, aligned, len(PROMPT) + number)
            assert own == (number % period > 0), "not before their time"


def differing(one: RowCache, other: RowCache, begin: int, end: int) -> bool:
    """Whether any key or value of these positions differs, in any layer."""
    pairs = [
        (a, b)
        for mine, its in zip(one.layers, other.layers, strict=True)
        for a, b in zip(mine._store, its._store, strict=True)
    ]
    assert len(pairs) == 2 * 4
    return not all(torch.equal(a[:, :, begin:end], b[:, :, begin:end]) for a, b in pairs)


def test_positions_that_not_both_have_are_refused(folder: Path, open_model: Open, run: Any) -> None:
    text, _, _ = run
    with open_draft(folder, open_model, "int2") as draft:
        draft.read(PROMPT)
        gap = len(PROMPT) + 1
        for begin, end in ((0, text.cache.length + 1), (gap, gap + 1), (-1, 2), (3, 2)):
            with pytest.raises(ValueError, match="cannot take over the positions"):
                draft.text.cache.take_over(text.cache, begin, end)


def test_recurrent_layers_have_no_rows_to_align(toy: Callable[..., Path], open_model: Open) -> None:
    folder = toy("lfm2_moe")
    text = Greedy(open_model(folder, "half"))
    text.read(PROMPT)
    with open_draft(folder, open_model, "auto") as draft:
        draft.read(PROMPT)
        with pytest.raises(EngineStateError, match="recurrent state"):
            draft.step(Alignment(1, 1), text.next_token, text.cache)
        assert len(draft.step(Alignment(1, 0), text.next_token, text.cache)) == len(text.engine.store.layers)


def test_a_prompt_is_read_in_pieces(folder: Path, open_model: Open, run: Any) -> None:
    """Would catch a long prompt that exceeds the workspace that was planned."""
    pieces = Greedy(open_model(folder, "half", prefill_tokens=7))
    passes = pieces.engine.stats().forward_passes
    pieces.read(PROMPT)
    assert pieces.engine.stats().forward_passes - passes == 4 and pieces.cache.length == len(PROMPT)


def test_nobody_listens_after_the_end(folder: Path, open_model: Open) -> None:
    model = open_model(folder, "full")
    hooks = sum(len(module._forward_hooks) for module in model.modules())
    with as_draft(model, scoring_rules(model, read_spec(folder, model.offload.config))):
        assert model.offload.executor.observers
    assert not model.offload.executor.observers
    assert sum(len(module._forward_hooks) for module in model.modules()) == hooks
