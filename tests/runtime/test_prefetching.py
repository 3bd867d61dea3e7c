"""A predictor that is asked beside the experts: another thread, the same words, the same bits.

Would catch: a predictor that two threads use at once, loads that begin before the first expert is done, an answer that
is lost or taken twice, an error of the asking thread that nobody hears of.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from smoe.kernels.threads import threads
from smoe.policy.plan import Load, LoadReason, Serve
from smoe.policy.prediction import ASKED, Moment, Prediction, Predictor, Sight
from smoe.routing import Phase, Routing
from smoe.runtime.prefetching import Asking
from tests import oracle
from tests.threads import engine_threads

Open = Callable[..., PreTrainedModel]
SIGHT = Sight(3, None)


class Slow(Predictor):
    """Answers when it may."""

    def __init__(self) -> None:
        self.may = threading.Event()
        self.thread = 0

    def predict(self, sight: Sight) -> Sequence[Prediction]:
        self.thread = threading.get_ident()
        assert self.may.wait(60)
        if sight.layer < 0:
            raise ZeroDivisionError
        return [Prediction(sight.layer + 1, [5, 2])]


def test_an_answer_is_taken_once_and_waited_for_only_where_asked() -> None:
    asking, slow = Asking(), Slow()
    assert asking.take(waits=True) is None, "nothing was asked"
    asking.begin(slow, SIGHT)
    assert asking.is_open and asking.take(waits=False) is None
    slow.may.set()
    assert asking.take(waits=True) == [Prediction(4, [5, 2])]
    assert not asking.is_open and asking.take(waits=True) is None
    assert slow.thread != threading.get_ident()
    asking.close()


def test_what_the_predictor_raises_is_raised_here_and_forgotten_when_drained() -> None:
    asking, slow = Asking(), Slow()
    slow.may.set()
    asking.begin(slow, Sight(-1, None))
    with pytest.raises(ZeroDivisionError):
        asking.take(waits=True)
    asking.drain()
    asking.begin(slow, SIGHT)
    assert asking.take(waits=True) is not None
    asking.close()


def test_its_thread_begins_with_the_first_question_and_ends_when_closed() -> None:
    before = engine_threads()
    asking, slow = Asking(), Slow()
    assert engine_threads() == before
    slow.may.set()
    asking.begin(slow, SIGHT)
    assert len(engine_threads() - before) == 1
    asking.drain()
    asking.close()
    asking.close()
    assert engine_threads() == before


def test_a_question_takes_no_cores_from_threads_that_come_later() -> None:
    """Torch's number of threads is that of every new thread, whoever set it last."""
    with threads(2):
        asking, slow, found = Asking(), Slow(), list[int]()
        slow.may.set()
        asking.begin(slow, SIGHT)
        asking.take(waits=True)
        later = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
        later.start()
        later.join()
        asking.close()
    assert found == [2]


@pytest.mark.parametrize("budget", ["full", "half", "minimum"])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_bits_are_those_of_the_unmodified_model(
    device: str, family: str, budget: str, toy: Callable[..., Path], open_model: Open
) -> None:
    bench: dict[str, Any] = {"device": "emulated", "dilation": 1.0} if device == "emulated" else {}
    folder, asked = toy(family), "concurrent" if family == "mixtral" else "first-expert"
    model = open_model(folder, budget, prefetch="previous-token", prefetch_asked=asked, **bench)
    oracle.assert_same_steps(oracle.greedy(model), oracle.reference_steps(folder))
    model.offload.executor.table.check()
    if budget == "half":
        assert model.offload.stats().prefetches > 0


@pytest.mark.parametrize("cores", [1, 2])
def test_several_rows_with_own_kernels_have_the_same_bits(
    cores: int, toy: Callable[..., Path], open_model: Open
) -> None:
    """The first expert is computed by itself, the others in one piece."""
    folder = toy("qwen3_moe", dtype=torch.bfloat16, hidden_size=256, moe_intermediate_size=64)
    prompt = torch.cat([oracle.PROMPT, oracle.PROMPT.flip(1)])
    found = []
    before = torch.get_num_threads()
    try:
        for asked in ASKED:
            switches = {"prefetch": "previous-token", "max_sequences": 2, "threads": cores}
            model = open_model(folder, "half", prefetch_asked=asked, **switches)
            found.append(oracle.greedy(model, prompt, 8))
    finally:
        torch.set_num_threads(before)
    for steps in found[1:]:
        oracle.assert_same_steps(steps, found[0])


class Course:
    """What happens in decode steps, in order: heard, begun and ended predictions, serves, prefetches."""

    def __init__(self, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[tuple[str, int]] = []
        self.threads: set[int] = set()
        executor = model.offload.executor
        predictor, arrivals = executor.prefetching.predictors[Phase.DECODE], executor.arrivals
        observe, predict = predictor.observe, predictor.predict
        served, prefetch = arrivals.served, arrivals.prefetch

        def heard(routing: Routing) -> None:
            if routing.phase is Phase.DECODE:
                self.events.append(("heard", routing.layer))
            observe(routing)

        def said(sight: Sight) -> Sequence[Prediction]:
            self.events.append(("asked", sight.layer))
            self.threads.add(threading.get_ident())
            found = list(predict(sight))
            self.events.append(("said", sight.layer))
            return found

        def done(serve: Serve, computed: int) -> None:
            served(serve, computed)
            self.events.append(("served", serve.key[0]))

        def begun(loads: Sequence[Load]) -> None:
            assert all(load.reason is LoadReason.PREFETCH for load in loads)
            self.events.extend([("prefetched", load.key[0]) for load in loads])
            prefetch(loads)

        monkeypatch.setattr(predictor, "observe", heard)
        monkeypatch.setattr(predictor, "predict", said)
        monkeypatch.setattr(arrivals, "served", done)
        monkeypatch.setattr(arrivals, "prefetch", begun)

    def layers(self) -> list[list[tuple[str, int]]]:
        """Of every layer of a decode step that asked: what happened from its router to the next one's."""
        starts = [n for n, (what, _) in enumerate(self.events) if what == "heard"] + [len(self.events)]
        found = [self.events[begin:end] for begin, end in itertools.pairwise(starts)]
        return [each for each in found if any(what == "asked" for what, _ in each)]


@pytest.mark.parametrize("asked", ASKED)
def test_loads_begin_when_they_may_and_questions_end_before_the_next_router(
    asked: str, toy: Callable[..., Path], open_model: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = open_model(toy("mixtral"), "half", prefetch="previous-token", prefetch_asked=asked)
    course = Course(model, monkeypatch)
    model.generate(oracle.PROMPT, max_new_tokens=12, min_new_tokens=12, do_sample=False)
    layers = course.layers()
    assert sum(what == "prefetched" for each in layers for what, _ in each) > 3
    assert (course.threads == {threading.get_ident()}) == (asked == "before") and len(course.threads) == 1
    for each in layers:
        names = [what for what, _ in each]
        assert names.count("asked") == names.count("said") == 1
        if "prefetched" in names:
            assert names.index("said") < names.index("prefetched")
            behind_the_first = names.index("served") < names.index("prefetched")
            assert behind_the_first if asked == "first-expert" else asked == "concurrent" or not behind_the_first
            assert all(at == each[0][1] + 1 for what, at in each if what == "prefetched")


def test_an_error_of_the_asking_thread_ends_the_request_alone(
    toy: Callable[..., Path], open_model: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = toy("mixtral")
    model = open_model(folder, "half", prefetch="previous-token", prefetch_asked="concurrent")
    predictor = model.offload.executor.prefetching.predictors[Phase.DECODE]
    assert predictor.asked is Moment.CONCURRENT

    def fail(sight: Sight) -> Sequence[Prediction]:
        raise ZeroDivisionError(sight.layer)

    with monkeypatch.context() as patch:
        patch.setattr(predictor, "predict", fail)
        with pytest.raises(ZeroDivisionError):
            oracle.greedy(model)
    oracle.assert_same_steps(oracle.greedy(model), oracle.reference_steps(folder))
    model.offload.executor.table.check()
