"""One call is cancelled, from another thread: what it returns, what it raises, and that no other call notices."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from smoe import Cancellation
from smoe.errors import GenerationCancelledError
from tests import oracle
from tests.runtime.test_faults import assert_healthy
from tests.runtime.test_passes import GREEDY, AtStep, in_a_pass

Open = Callable[..., PreTrainedModel]
Toy = Callable[..., Path]


def elsewhere(act: Callable[[], object]) -> Callable[[], None]:
    """`act`, in a thread of its own, and done when this returns."""

    def run() -> None:
        thread = threading.Thread(target=act)
        thread.start()
        thread.join()

    return run


@pytest.mark.parametrize("step", [1, 5])
def test_a_call_with_tokens_returns_them(step: int, toy: Toy, open_model: Open) -> None:
    folder = toy("mixtral")
    model = open_model(folder)
    stop = Cancellation()
    whole = model.generate(oracle.PROMPT, **GREEDY)
    criteria = [AtStep(step, elsewhere(stop.cancel)), stop]
    got = model.generate(oracle.PROMPT, stopping_criteria=criteria, **GREEDY)
    assert torch.equal(got, whole[:, : oracle.PROMPT_TOKENS + step])
    assert stop.is_cancelled
    assert_healthy(model, folder)


def test_a_pass_with_tokens_before_it_is_finished(toy: Toy, open_model: Open) -> None:
    """Would catch a cancellation in the middle of a token that throws away those before it."""
    model = open_model(toy("mixtral"))
    stop = Cancellation()
    whole = model.generate(oracle.PROMPT, **GREEDY)
    passes = iter(range(100))

    def cancel_in_third() -> None:
        if next(passes) == 2:
            stop.cancel()

    handle = model.model.layers[1].self_attn.register_forward_hook(lambda *_: cancel_in_third())
    got = model.generate(oracle.PROMPT, stopping_criteria=[stop], **GREEDY)
    handle.remove()
    assert torch.equal(got, whole[:, : oracle.PROMPT_TOKENS + 3])


def test_a_prompt_that_is_being_read_ends_at_the_next_layer(toy: Toy, open_model: Open) -> None:
    folder = toy("mixtral")
    model = open_model(folder)
    stop = Cancellation()
    reached: list[int] = []
    last = model.model.layers[3].self_attn.register_forward_hook(lambda *_: reached.append(3))
    with in_a_pass(model, 1, elsewhere(stop.cancel)), pytest.raises(GenerationCancelledError, match="first token"):
        model.generate(oracle.PROMPT, stopping_criteria=[stop], **GREEDY)
    last.remove()
    assert not reached
    assert_healthy(model, folder)


def test_a_call_that_waits_ends_at_once_and_the_running_one_goes_on(toy: Toy, open_model: Open) -> None:
    """The waiting one ends while the other still has the turn, so nothing but the cancellation can have ended it."""
    model = open_model(toy("mixtral"))
    stop, outcome = Cancellation(), []
    whole = model.generate(oracle.PROMPT, **GREEDY)

    def wait() -> None:
        with pytest.raises(GenerationCancelledError):
            model.generate(oracle.PROMPT, stopping_criteria=[stop], **GREEDY)
        outcome.append("cancelled")

    waiting = threading.Thread(target=wait)

    def while_running() -> None:
        waiting.start()
        while waiting.is_alive() and not stop._wakes:
            waiting.join(0.001)
        stop.cancel()
        waiting.join(30)
        outcome.append("running")

    got = model.generate(oracle.PROMPT, stopping_criteria=[AtStep(2, while_running)], **GREEDY)
    assert outcome == ["cancelled", "running"]
    assert torch.equal(got, whole)


def test_calls_without_it_or_with_another_go_on(toy: Toy, open_model: Open) -> None:
    model = open_model(toy("mixtral"))
    stop, other = Cancellation(), Cancellation()
    whole = model.generate(oracle.PROMPT, **GREEDY)
    got = model.generate(oracle.PROMPT, stopping_criteria=[AtStep(2, stop.cancel), other], **GREEDY)
    assert torch.equal(got, whole)
    assert torch.equal(model.generate(oracle.PROMPT, **GREEDY), whole)


@pytest.mark.parametrize("give", ["by name", "by place"])
def test_a_call_given_a_cancelled_one_computes_nothing(give: str, toy: Toy, open_model: Open) -> None:
    model = open_model(toy("mixtral"))
    stop = Cancellation()
    model.generate(oracle.PROMPT, stopping_criteria=[stop], **GREEDY)
    before = model.offload.stats().forward_passes
    stop.cancel()
    given: tuple[list[Any], dict[str, Any]] = ([], {"stopping_criteria": [stop]})
    if give == "by place":
        given = ([None, None, [stop]], {})
    with pytest.raises(GenerationCancelledError):
        model.generate(oracle.PROMPT, *given[0], **given[1], **GREEDY)
    assert model.offload.stats().forward_passes == before


def test_a_batch_returns_all_rows_so_far(toy: Toy, open_model: Open) -> None:
    model = open_model(toy("mixtral"), max_sequences=2)
    prompts = torch.cat([oracle.PROMPT, oracle.PROMPT.flip(1)])
    whole = model.generate(prompts, **GREEDY)
    stop = Cancellation()
    got = model.generate(prompts, stopping_criteria=[AtStep(3, stop.cancel), stop], **GREEDY)
    assert torch.equal(got, whole[:, : oracle.PROMPT_TOKENS + 3])
