"""A draft that runs ahead on its own thread: what it says when, and that the text does not depend on it.

Would catch: experts of another token or text, a guess that is kept though the model chose otherwise, a thread that goes
on after the end, a draft whose failure ends the model's text.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from smoe.errors import ConfigError, GenerationCancelledError, UnsupportedModelError
from smoe.load.engine_parts import scoring_rules
from smoe.models.kv_cache import RowCache
from smoe.models.read_spec import read_spec
from smoe.policy.draft_predictions import Expected
from smoe.runtime.draft_model import Alignment, Draft, Greedy, as_draft
from smoe.runtime.running_ahead import DraftRouting, RunningAhead
from tests import oracle, zoo
from tests.listener import Heard
from tests.packs import pack_folder

Open = Callable[..., PreTrainedModel]
PROMPT = oracle.PROMPT[0].tolist()
STEPS = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = zoo.save("mixtral", tmp_path_factory.mktemp("packed"))
    pack_folder(folder, precision="int2")
    return folder


@pytest.fixture
def text(folder: Path, open_model: Open) -> Greedy:
    """The model, which has read the prompt."""
    text = Greedy(open_model(folder, "half"))
    text.read(PROMPT)
    return text


@pytest.fixture
def draft(folder: Path, open_model: Open) -> Iterator[Draft]:
    model = open_model(folder, "full", precision="int2", max_sequences=2)
    with as_draft(model, scoring_rules(model, read_spec(folder, model.offload.config)), spares=0) as draft:
        yield draft


def replayed(draft: Draft, tokens: list[int], cache: RowCache) -> list[list[Expected]]:
    """What it says of each token where it is told every one, by itself and in order."""
    draft.read(PROMPT)
    return [list(draft.step(Alignment(1, 1), token, cache)) for token in tokens]


@pytest.mark.parametrize("departure", ["late", "at-once"])
def test_it_says_what_it_says_when_told_every_token(departure: str, text: Greedy, draft: Draft) -> None:
    ahead = RunningAhead(draft, departure)
    said, guessed, tokens, further = [], [], [], 0
    for _ in range(STEPS):
        tokens.append(text.next_token)
        ahead.begin(tokens[-1], text.cache)
        assert ahead.wait(60)
        now, after = ahead.predicted()
        said.append(now)
        guessed.append(after)
        text.take(tokens[-1:])
        further += draft.text.cache.length == text.cache.length + 1
    found = replayed(draft, tokens, text.cache)
    assert [[each.layer for each in layers] for layers in said] == [[each.layer for each in layers] for layers in found]
    if departure == "late":
        assert said == found and not any(guessed) and not further
    else:
        assert further == STEPS, "one token further than the model"
        assert all(len(layers) == len(found[0]) for layers in guessed)
    ahead.close()


def test_a_guess_that_the_model_did_not_choose_is_taken_back(text: Greedy, draft: Draft) -> None:
    ahead = RunningAhead(draft, "at-once")
    first = text.next_token
    ahead.begin(first, text.cache)
    assert ahead.wait(60)
    guess = draft.text.next_token
    text.take([first])
    other = (guess + 1) % 50
    ahead.begin(other, text.cache)
    assert ahead.wait(60)
    now, _ = ahead.predicted()
    assert now == replayed(draft, [first, other], text.cache)[1]
    ahead.close()


def test_another_text_and_one_that_was_taken_back_are_followed(text: Greedy, draft: Draft) -> None:
    ahead = RunningAhead(draft, "late")
    for _ in range(3):
        ahead.begin(text.next_token, text.cache)
        assert ahead.wait(60)
        text.take([text.next_token])
    text.cache.rewind(len(PROMPT))
    ahead.begin(7, text.cache)
    assert ahead.wait(60)
    now, _ = ahead.predicted()
    assert now == replayed(draft, [7], text.cache)[0]
    text.read(PROMPT[::-1])
    ahead.begin(7, text.cache)
    assert ahead.wait(60)
    now, _ = ahead.predicted()
    draft.read(PROMPT[::-1])
    assert now == list(draft.step(Alignment(1, 1), 7, text.cache))
    ahead.close()


def test_a_prompt_behind_a_text_that_was_taken_back_is_followed(text: Greedy, draft: Draft) -> None:
    """As a chat goes on: what the draft has of the positions in between is of another text."""
    ahead = RunningAhead(draft, "late")
    predictor = DraftRouting(ahead)
    ahead.begin(text.next_token, text.cache)
    assert ahead.wait(60)
    text.cache.rewind(len(PROMPT) - 9)
    again = PROMPT[3:15]
    predictor.begin(torch.tensor([again]), text.cache)
    text.take(again)
    ahead.begin(7, text.cache)
    assert ahead.wait(60)
    draft.read(PROMPT[:-9] + again)
    assert ahead.predicted()[0] == list(draft.step(Alignment(1, 1), 7, text.cache))
    ahead.close()


def test_a_cache_that_was_given_up_is_no_end(text: Greedy, draft: Draft) -> None:
    ahead, gone = RunningAhead(draft, "late"), text.cache
    gone.retire()
    ahead.begin(3, gone)
    assert ahead.wait(60) and ahead.predicted() == ([], [])
    text.read(PROMPT)
    ahead.begin(3, text.cache)
    assert ahead.wait(60) and ahead.predicted()[0]
    ahead.close()


class Scripted:
    """In a draft's place: says one layer, and then waits to be cancelled or let go."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.cancelled = threading.Event()
        self.followed: list[int] = []
        engine = SimpleNamespace(cancel=self.cancelled.set, close=lambda: None)
        self.text = SimpleNamespace(engine=engine, next_token=11)

    def unlearn(self, unchanged: float) -> None:
        pass

    def follow(self, token: int, position: int, cache: RowCache, say: Callable[[Expected], None]) -> None:
        if token < 0:
            raise ZeroDivisionError("gone")
        self.followed.append(token)
        say(Expected(0, (token,), (1.0,)))
        while not self.go.wait(0.005):
            if self.cancelled.is_set():
                self.cancelled.clear()
                raise GenerationCancelledError("cancelled")


class Cache:
    """In a cache's place."""

    def __init__(self, length: int) -> None:
        self.length, self.capacity_tokens, self.rows = length, 100, 1


def cache_of(length: int) -> Any:
    return Cache(length)


def until(is_so: Callable[[], bool]) -> bool:
    pause = threading.Event()
    return any(is_so() or pause.wait(0.005) for _ in range(2000))


def test_what_is_of_no_use_any_more_is_cancelled() -> None:
    draft: Any = Scripted()
    ahead, cache = RunningAhead(draft, "late"), cache_of(5)
    ahead.begin(1, cache)
    assert until(lambda: draft.followed == [1])
    assert until(lambda: [each.experts for each in ahead.predicted()[0]] == [(1,)]), "as soon as it is known"
    ahead.begin(2, cache)
    assert until(lambda: draft.followed == [1, 2])
    assert until(lambda: [each.experts for each in ahead.predicted()[0]] == [(2,)])
    ahead.pause()
    assert ahead.wait(10) and ahead.predicted() == ([], [])
    ahead.close()
    ahead.close()


def test_a_listener_hears_everything_at_once() -> None:
    draft: Any = Scripted()
    ahead, heard, cache = RunningAhead(draft, "at-once"), Heard(), cache_of(5)
    DraftRouting(ahead).speak_to(heard)
    ahead.begin(1, cache)
    assert until(lambda: heard.said == [(5,), (5, 0, 1)]), "while it goes on"
    draft.go.set()
    assert ahead.wait(10) and heard.said[2:] == [(6, 0, 11)]
    cache.length = 6
    ahead.begin(11, cache)
    assert ahead.wait(10) and heard.said[3:] == [(7, 0, 11)], "as it had guessed: nothing is taken back"
    cache.length = 7
    ahead.begin(3, cache)
    assert ahead.wait(10) and heard.said[4:] == [(7,), (7, 0, 3), (8, 0, 11)], "of another token"
    ahead.close()


def test_a_right_guess_goes_on() -> None:
    draft: Any = Scripted()
    draft.go.set()
    ahead, cache = RunningAhead(draft, "at-once"), cache_of(5)
    ahead.begin(1, cache)
    assert ahead.wait(10) and draft.followed == [1, 11]
    cache.length, after = 6, ahead.predicted()[1]
    ahead.begin(11, cache)
    assert after and ahead.predicted()[0] == after, "without decoding it again"
    assert ahead.wait(10) and draft.followed == [1, 11, 11]
    ahead.close()


def test_its_failure_is_said_once_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    draft: Any = Scripted()
    ahead = RunningAhead(draft, "late")
    with caplog.at_level(logging.WARNING):
        ahead.begin(-1, cache_of(5))
        assert until(lambda: "the draft model failed" in caplog.text)
        ahead.begin(4, cache_of(6))
        ahead.begin(5, cache_of(7))
    assert ahead.predicted() == ([], []) and caplog.text.count("draft model failed") == 1
    ahead.close()


def test_batches_and_prompts_are_not_followed() -> None:
    draft: Any = Scripted()
    ahead, cache = RunningAhead(draft, "late"), cache_of(5)
    predictor = DraftRouting(ahead)
    for ids in (None, torch.zeros(1, 2, dtype=torch.long), torch.zeros(2, 1, dtype=torch.long)):
        predictor.begin(ids, cache)
    predictor.begin(torch.zeros(1, 1, dtype=torch.long), None)
    assert not draft.followed
    predictor.begin(torch.full((1, 1), 3), cache)
    assert until(lambda: draft.followed == [3])
    ahead.close()


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A toy of a family with its experts in int4, written once."""

    @functools.cache
    def folder(family: str) -> Path:
        folder = zoo.save(family, tmp_path_factory.mktemp(family), dtype=torch.bfloat16)
        pack_folder(folder, precision="int4")
        return folder

    return folder


@pytest.mark.parametrize("departure", ["late", "at-once"])
@pytest.mark.parametrize("budget", ["half", "minimum"])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_bits_are_those_of_the_unmodified_model(
    family: str, budget: str, departure: str, packed: Callable[[str], Path], open_model: Open
) -> None:
    folder = packed(family)
    model = open_model(folder, budget, prefetch="draft-model", draft_start=departure)
    oracle.assert_same_steps(oracle.greedy(model), oracle.reference_steps(folder))
    model.offload.executor.table.check()
    if budget == "half":
        assert model.offload.stats().prefetches > 0
    ledger = model.offload.ledger
    assert ledger.entries()["draft model"] > 0 and model.offload.peak_memory_bytes() <= ledger.budget_bytes


def test_it_shares_the_models_other_weights(folder: Path, open_model: Open) -> None:
    model = open_model(folder, "half", prefetch="draft-model", draft_precision="int2")
    (ahead,) = model.offload.executor.helpers[-1:]
    theirs = {name: weight.data_ptr() for name, weight in model.named_parameters() if weight.numel()}
    its = {name: weight.data_ptr() for name, weight in ahead._draft.text.model.named_parameters() if weight.numel()}
    assert its == theirs


def test_what_it_cannot_follow_is_refused(toy: Callable[..., Path], folder: Path, open_model: Open) -> None:
    with pytest.raises(UnsupportedModelError, match="recurrent state"):
        open_model(toy("lfm2_moe"), "half", prefetch="draft-model")
    with pytest.raises(ConfigError, match=r"a draft model in int4 needs its experts packed.*`draft_precision`"):
        open_model(folder, "half", prefetch="draft-model")
    with pytest.raises(ConfigError, match="`draft_precision=int4` is not lower than `precision=int4`"):
        open_model(folder, "half", prefetch="draft-model", precision="int4")
    with pytest.raises(ConfigError, match="emulated"):
        open_model(folder, "half", prefetch="draft-model", draft_precision="int2", device="emulated")
    with pytest.raises(ConfigError, match="`draft_extra` has an effect only with `prefetch=draft"):
        open_model(folder, "half", draft_extra=1)
