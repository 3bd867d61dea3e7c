"""One request at a time: what waits, what is cancelled, what a close does to what is running.

Would catch: a cache made before its turn has come, which takes the memory of the running request's; a request that
waits for ever; an engine that a cancelled request leaves unusable; memory that is given back under a running pass.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from smoe.errors import ConfigError, EngineBusyError, EngineStateError, GenerationCancelledError
from smoe.presets import configure
from smoe.runtime import passes
from tests import oracle
from tests.runtime.test_faults import assert_healthy
from tests.threads import engine_threads

Open = Callable[..., PreTrainedModel]
Toy = Callable[..., Path]
OTHER = oracle.PROMPT.flip(1)
GREEDY: dict[str, Any] = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
A_WHILE = 0.3
"""Seconds for which a test lets another thread run: only what a wrong engine would do needs them."""


class AtStep(StoppingCriteria):  # type: ignore[misc]
    """Calls `act` once, after `step` tokens."""

    def __init__(self, step: int, act: Callable[[], object]) -> None:
        self.left, self.act = step, act

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.left -= 1
        if self.left == 0:
            self.act()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


def at_step(step: int, act: Callable[[], object]) -> dict[str, Any]:
    return {**GREEDY, "stopping_criteria": StoppingCriteriaList([AtStep(step, act)])}


@contextmanager
def in_a_pass(model: PreTrainedModel, layer: int, act: Callable[[], object]) -> Iterator[None]:
    """Inside, `act` is called once, when the attention of `layer` has run."""
    done: list[int] = []

    def hook(*_: Any) -> None:
        if not done:
            done.append(1)
            act()

    handle = model.model.layers[layer].self_attn.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


class Aside(threading.Thread):
    """Another thread, and what came of it."""

    def __init__(self, work: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self.work = work
        self.result: Any = None
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.result = self.work()
        except BaseException as error:
            self.error = error

    def begin(self) -> None:
        """Start, and give it time to spoil what runs meanwhile."""
        self.start()
        self.join(A_WHILE)

    def end(self) -> Any:
        self.join(60)
        assert not self.is_alive()
        if self.error is not None:
            raise self.error
        return self.result


OTHERS: dict[str, Callable[[PreTrainedModel], torch.Tensor]] = {
    "plain": lambda model: model(OTHER).logits,
    "without cache": lambda model: model(OTHER, use_cache=False).logits,
    "generate": lambda model: model.generate(OTHER, **GREEDY),
    "own cache": lambda model: model(OTHER, past_key_values=model.offload.new_cache()).logits,
}


@pytest.mark.parametrize("where", ["step 1", "step 5", "pass 0", "pass 3"])
@pytest.mark.parametrize("other", OTHERS)
def test_another_thread_s_request_waits(other: str, where: str, toy: Toy, open_model: Open) -> None:
    """Its cache too is made when its turn has come: the budget has room for one."""
    model = open_model(toy("qwen2_moe"), "fifth")
    expected, expected_other = model.generate(oracle.PROMPT, **GREEDY), OTHERS[other](model)
    aside = Aside(lambda: OTHERS[other](model))
    kind, _, number = where.partition(" ")
    if kind == "step":
        got = model.generate(oracle.PROMPT, **at_step(int(number), aside.begin))
    else:
        with in_a_pass(model, int(number), aside.begin):
            got = model.generate(oracle.PROMPT, **GREEDY)
    assert torch.equal(got, expected)
    assert torch.equal(aside.end(), expected_other)
    model.offload.executor.table.check()


@pytest.mark.parametrize("layer", [0, 3])
def test_a_cache_that_retires_in_a_pass_is_not_made_anew(layer: int, toy: Toy, open_model: Open) -> None:
    """Would catch zeros in the place of the keys and values of all tokens so far: silently wrong logits."""
    folder = toy("mixtral")
    model = open_model(folder)
    cache = model.offload.new_cache()
    model(oracle.PROMPT, past_key_values=cache)
    with in_a_pass(model, layer, model.offload.new_cache), pytest.raises(EngineStateError, match="newer"):
        model(OTHER[:, :1], past_key_values=cache)
    assert_healthy(model, folder)


def test_a_pass_inside_a_pass_is_refused(toy: Toy, open_model: Open) -> None:
    folder = toy("mixtral")
    model = open_model(folder)
    with (
        in_a_pass(model, 1, lambda: model(OTHER, use_cache=False)),
        pytest.raises(EngineStateError, match="inside a forward pass"),
    ):
        model(oracle.PROMPT)
    assert_healthy(model, folder)


def test_a_new_thread_computes_on_as_many_threads_as_the_loading_one(toy: Toy, open_model: Open) -> None:
    """Torch gives a new thread the number that anybody asked for last, which may be a helper's 1."""
    before, seen = torch.get_num_threads(), list[int]()
    try:
        model = open_model(toy("mixtral"), threads=2)
        torch.set_num_threads(1)
        with in_a_pass(model, 0, lambda: seen.append(torch.get_num_threads())):
            aside = Aside(lambda: (model(OTHER), torch.get_num_threads())[1])
            aside.start()
            assert aside.end() == 1
        assert seen == [2] and torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


# -- cancelling -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["step 3", "pass 0", "pass 2"])
@pytest.mark.parametrize("prefetch", ["none", "next-gate"])
def test_cancel_ends_the_running_request_alone(where: str, prefetch: str, toy: Toy, open_model: Open) -> None:
    """Called from another thread while this one computes; the next request is whole and exact."""
    folder = toy("qwen2_moe")
    model = open_model(folder, "fifth", prefetch=prefetch)
    answers: list[bool] = []

    def cancel() -> None:
        aside = Aside(model.offload.cancel)
        aside.start()
        answers.append(aside.end())

    assert not model.offload.cancel(), "nothing was running"
    kind, _, number = where.partition(" ")
    with pytest.raises(GenerationCancelledError):
        if kind == "step":
            model.generate(oracle.PROMPT, **at_step(int(number), cancel))
        else:
            with in_a_pass(model, int(number), cancel):
                model.generate(oracle.PROMPT, **GREEDY)
    assert answers == [True]
    executor = model.offload.executor
    assert not executor.table.inflight and not executor.arrivals.tickets, "reads were left under way"
    assert_healthy(model, folder)


def test_cancel_does_not_touch_those_who_wait(toy: Toy, open_model: Open) -> None:
    model = open_model(toy("mixtral"))
    expected = model.generate(OTHER, **GREEDY)
    aside = Aside(lambda: model.generate(OTHER, **GREEDY))

    def act() -> None:
        aside.begin()
        assert model.offload.cancel()

    with pytest.raises(GenerationCancelledError):
        model.generate(oracle.PROMPT, **at_step(2, act))
    assert torch.equal(aside.end(), expected)


# -- waiting ----------------------------------------------------------------------------------------------------------


def test_a_wait_has_a_bound(toy: Toy, open_model: Open) -> None:
    model = open_model(toy("mixtral"), turn_timeout_seconds=0.05)
    asides = [Aside(lambda use=use: use(model)) for use in OTHERS.values()]  # type: ignore[misc]

    def act() -> None:
        for aside in asides:
            aside.start()
        for aside in asides:
            aside.join(60)

    got = model.generate(oracle.PROMPT, **at_step(2, act))
    assert got.shape[1] == oracle.PROMPT_TOKENS + GREEDY["max_new_tokens"]
    for aside in asides:
        with pytest.raises(EngineBusyError, match=r"0\.05 s.*turn_timeout_seconds"):
            aside.end()
    model(OTHER)


def test_no_wait_at_all(toy: Toy, open_model: Open) -> None:
    model = open_model(toy("mixtral"), turn_timeout_seconds=0)
    aside = Aside(lambda: model(OTHER))
    model.generate(oracle.PROMPT, **at_step(2, aside.begin))
    with pytest.raises(EngineBusyError):
        aside.end()
    model(OTHER)


@pytest.mark.parametrize("bad", [-1, float("nan"), float("inf"), "soon", True])
def test_a_bad_bound_is_refused(bad: Any) -> None:
    with pytest.raises(ConfigError, match="turn_timeout_seconds"):
        configure(turn_timeout_seconds=bad)


def test_who_waits_long_says_so(
    toy: Toy, open_model: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(passes, "PATIENCE_SECONDS", 0.01)
    model = open_model(toy("mixtral"))
    aside = Aside(lambda: model(OTHER))
    with caplog.at_level(logging.WARNING, logger="smoe"):
        model.generate(oracle.PROMPT, **at_step(2, aside.begin))
        aside.end()
    (line,) = [record.getMessage() for record in caplog.records if record.name.startswith("smoe")]
    assert "waiting" in line and "cancel()" in line and "turn_timeout_seconds" in line


# -- closing ----------------------------------------------------------------------------------------------------------


def assert_closed(model: PreTrainedModel, before: set[threading.Thread]) -> None:
    assert engine_threads() <= before, "threads were left"
    assert model.offload._arena._map is None, "the slots' memory was kept"
    with pytest.raises(EngineStateError, match="closed"):
        model(oracle.PROMPT)
    model.offload.close()


def test_close_cancels_what_is_running(toy: Toy) -> None:
    before = engine_threads()
    model = oracle.open_model(toy("mixtral"))
    running, waiting = Aside(lambda: None), Aside(lambda: model(OTHER))
    reached, go_on = threading.Event(), threading.Event()

    def act() -> None:
        waiting.begin()
        reached.set()
        go_on.wait(60)

    running.work = lambda: model.generate(oracle.PROMPT, **at_step(2, act))
    running.start()
    assert reached.wait(60)
    closing = Aside(model.offload.close)
    closing.begin()
    go_on.set()
    closing.end()
    with pytest.raises(GenerationCancelledError, match="closed"):
        running.end()
    with pytest.raises(EngineStateError, match="closed"):
        waiting.end()
    assert_closed(model, before)


def test_close_waits_no_longer_than_asked(toy: Toy) -> None:
    """What was running closes the engine when it ends."""
    before = engine_threads()
    model = oracle.open_model(toy("mixtral"))
    reached, go_on = threading.Event(), threading.Event()

    def act() -> None:
        reached.set()
        go_on.wait(60)

    running = Aside(lambda: model.generate(oracle.PROMPT, **at_step(2, act)))
    running.start()
    assert reached.wait(60)
    with pytest.raises(EngineBusyError, match=r"0\.01 s"):
        model.offload.close(timeout_seconds=0.01)
    go_on.set()
    with pytest.raises(GenerationCancelledError):
        running.end()
    assert_closed(model, before)


@pytest.mark.parametrize("layer", [0, 1, 3])
@pytest.mark.parametrize("prefetch", ["none", "next-gate"])
def test_close_inside_a_pass_takes_effect_after_it(layer: int, prefetch: str, toy: Toy) -> None:
    """Called by the thread that computes: a hook, a signal's handler."""
    before = engine_threads()
    model = oracle.open_model(toy("qwen2_moe"), "fifth", prefetch=prefetch)
    model(oracle.PROMPT)
    with in_a_pass(model, layer, model.offload.close), pytest.raises(GenerationCancelledError, match="closed"):
        model(oracle.PROMPT)
    assert_closed(model, before)


def test_close_after_a_pass_s_last_layer_leaves_its_result(toy: Toy) -> None:
    before = engine_threads()
    model = oracle.open_model(toy("mixtral"))
    expected = model(oracle.PROMPT).logits

    def close(module: nn.Module, args: Any, output: Any) -> None:
        model.offload.close()

    model.model.norm.register_forward_hook(close)
    assert torch.equal(model(oracle.PROMPT).logits, expected)
    assert_closed(model, before)


@pytest.mark.parametrize("step", [2, 8])
def test_close_between_two_steps_of_the_same_thread(step: int, toy: Toy) -> None:
    """In the middle it ends the request; after the last token there is nothing left to end."""
    before = engine_threads()
    model = oracle.open_model(toy("mixtral"))
    if step < GREEDY["max_new_tokens"]:
        with pytest.raises(GenerationCancelledError, match="closed"):
            model.generate(oracle.PROMPT, **at_step(step, model.offload.close))
    else:
        got = model.generate(oracle.PROMPT, **at_step(step, model.offload.close))
        assert got.shape[1] == oracle.PROMPT_TOKENS + step
    assert_closed(model, before)
