"""Prefetches for later layers: runs a predictor when it is due, and starts loads of the experts that it predicts.

When a predictor runs is its `Moment`; the moments are in capitals. One layer in decode, time to the right:

    computing thread     | router | plan | ROUTED | resident experts | RESIDENTS_DONE | wait | expert | wait | expert
    predictor thread                     | CONCURRENT, FIRST_DONE .......... |
    next layer's loads                             | begin, after those that this layer waits for

A phase that has no predictor uses nothing of this module (`execute.py`). A prediction on the predictor's thread ends
before the next layer's router is observed. So only one thread at a time uses the predictor's state, and the prediction
does not depend on timing. Between two experts the computing thread checks whether the prediction is done. The setting
`prefetch_asked` decides whether the checks begin at once or after the first expert, as in the paper (DuoServe-MoE,
section 5.3), where prefetched experts overwrite that expert.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import nullcontext

import torch

from smoe.kernels.threads import threads
from smoe.memory.pacing import Pacing
from smoe.memory.reading_threads import Ticket
from smoe.policy.plan import LayerPlan
from smoe.policy.plan_prefetch import has_prefetch_slots, plan_prefetch
from smoe.policy.prediction import ON_A_THREAD, Moment, Prediction, Predictor, Sight
from smoe.policy.step import Decision
from smoe.policy.trial import LookAheadTrial, Trial
from smoe.routing import Phase, real_rows
from smoe.runtime.arrivals import Arrivals
from smoe.runtime.layer import NOTHING, Meanwhile
from smoe.runtime.step import Step

_MOST_AWAITED = 8
"""The maximum number of recent layers whose loads may still run while the host computes later layers."""

Guess = Callable[[Iterable[Prediction]], Iterable[Prediction]]
"""A function that passes predictions to other units, and returns those that this machine should prefetch."""


class Prefetching:
    """Runs the predictors of one engine and starts their loads. Only one thread at a time may use it."""

    def __init__(
        self,
        predictors: Mapping[Phase, Predictor],
        arrivals: Arrivals,
        pacing: Pacing,
        guess: Guess,
        trial: Trial | None = None,
    ) -> None:
        """`trial` decides whether prefetching in decode pays; None: it always runs."""
        self.predictors = predictors
        self.trial = trial
        self.look_ahead_trial = LookAheadTrial()
        """Decides whether there is enough time for a look-ahead."""
        self.arrivals = arrivals
        self.pacing = pacing
        self.now = pacing.now
        self._guess = guess
        self._asking = Asking()
        self.awaited: deque[tuple[list[Ticket], float]] = deque(maxlen=_MOST_AWAITED)
        """For each of the last layers: the loads that it waited for when its resident experts were computed, and the
        time of that moment."""

    def use(self, predictors: Mapping[Phase, Predictor]) -> None:
        """From now on, run these predictors, one for each phase."""
        self.predictors = predictors

    @property
    def is_on(self) -> bool:
        """Whether prefetching in decode steps currently runs, because it pays."""
        return self.trial is None or self.trial.is_on

    def begin(self, step: Step, decision: Decision) -> Meanwhile:
        """Run the predictor of the step's phase before the experts if it is due there, or start it concurrently with
        the experts. Return the work that the computing thread must still do between experts."""
        predictor, plan = self.predictors[step.phase], decision.plan
        sight = Sight(step.layer, step.hidden, None, real_rows(decision.routing))
        if predictor.asked is Moment.RESIDENTS_DONE:
            return _LookAhead(self, predictor, sight, plan) if step.phase is Phase.DECODE else NOTHING
        if not self.has_room(step.phase, plan):
            return NOTHING
        if predictor.asked in ON_A_THREAD:
            self._asking.begin(predictor, sight)
            return _Concurrent(self, self._asking, plan, predictor.asked)
        began, predictions = self.predict(predictor, sight)
        if step.phase is Phase.DECODE:
            self.pacing.ask_gate(began)
        else:  # a prompt takes them in ascending order
            predictions = [named._replace(experts=sorted(named.experts)) for named in predictions]
        self.bring(predictions, plan)
        return NOTHING

    def has_room(self, phase: Phase, plan: LayerPlan) -> bool:
        """Return whether a prefetch could load something: an expert is missing, a slot is free, and prefetching pays at
        present."""
        if self.arrivals.is_all_here or not has_prefetch_slots(self.arrivals.table, plan):
            return False
        return phase is Phase.PREFILL or self.is_on

    def predict(self, predictor: Predictor, sight: Sight) -> tuple[float, Iterable[Prediction]]:
        """Run `predictor`. Return its predictions, and the wall-clock time at which the predictor began (not emulated
        time)."""
        began, is_single = time.perf_counter(), sight.hidden.shape[0] == 1
        with threads(1) if is_single else nullcontext():  # a second thread would wait for a reading thread's core
            return began, predictor.predict(sight)

    def bring(self, predictions: Iterable[Prediction], plan: LayerPlan) -> None:
        """Start loads of predicted experts. They follow the loads that the running layer waits for."""
        planning = self.pacing.begin_planning()
        self.arrivals.prefetch(plan_prefetch(self._guess(predictions), self.arrivals.table, plan))
        self.pacing.end_planning(planning)

    def note_pass(self, phase: Phase, seconds: float) -> None:
        """Record the duration of a forward pass, from which `trial` decides whether prefetching pays."""
        counters, trial = self.arrivals.counters, self.trial
        if trial is None:
            return
        guesses = counters.prefetches, counters.prefetches_used
        if phase is Phase.DECODE:
            trial.note(seconds, *guesses)
        else:
            trial.pass_over(*guesses)

    def reset(self) -> None:
        """Delete all measurements of prefetching."""
        self.look_ahead_trial = LookAheadTrial()
        self.trial = Trial() if self.trial is not None else None
        self.awaited.clear()

    def recover(self) -> None:
        """Wait until no prediction is running, after an error in a pass."""
        self._asking.drain()
        self.awaited.clear()

    def close(self) -> None:
        """End the predictor's thread."""
        self._asking.close()


class _Concurrent(Meanwhile):
    """The work between experts for a predictor that runs on its own thread: loads begin as soon as its prediction is
    done."""

    may_start_loads = True

    def __init__(self, prefetching: Prefetching, asking: Asking, plan: LayerPlan, moment: Moment) -> None:
        self._prefetching, self._asking, self._plan = prefetching, asking, plan
        self._is_at_once = moment is Moment.CONCURRENT

    def finished(self, experts: int) -> None:
        if experts or self._is_at_once:
            self._take(waits=False)

    def end(self) -> None:
        self._take(waits=True)  # no other thread uses the predictor when it observes the next router

    def _take(self, waits: bool) -> None:
        """Start the loads of the prediction, if the prediction is done or `waits` is true."""
        prefetching = self._prefetching
        asked = prefetching.now()
        predictions = self._asking.take(waits)
        if predictions is not None:
            prefetching.bring(predictions, self._plan)
            prefetching.arrivals.counters.look_ahead_seconds += prefetching.now() - asked


class _LookAhead(Meanwhile):
    """The work between experts for a predictor that uses the output of the resident experts, while the layer waits for
    loads."""

    def __init__(self, prefetching: Prefetching, predictor: Predictor, sight: Sight, plan: LayerPlan) -> None:
        self._prefetching, self._predictor, self._sight, self._plan = prefetching, predictor, sight, plan

    def residents_done(self, output: Callable[[], torch.Tensor]) -> None:
        ours, plan = self._prefetching, self._plan
        if not ours.has_room(Phase.DECODE, plan):
            return
        awaited, asked = ours.arrivals.awaited(plan), ours.now()
        if awaited:
            ours.awaited.append((awaited, asked))
        if not ours.look_ahead_trial.fits(len(awaited)):
            return
        began, predictions = ours.predict(self._predictor, self._sight._replace(partial=output()))
        ours.pacing.look_ahead(began, self._sight.hidden.shape[0])
        ours.bring(predictions, plan)
        seconds, counters = ours.now() - asked, ours.arrivals.counters
        ours.look_ahead_trial.note_cost(seconds)
        counters.look_aheads += 1
        counters.look_ahead_seconds += seconds

    def end(self) -> None:
        """Measure how long the loads of earlier layers took after the resident experts had been computed, for layers
        whose loads have all ended.

        On a GPU this is some layers later, because the device waits for loads while the host continues.
        """
        ours = self._prefetching
        while ours.awaited and all(ticket.is_over for ticket in ours.awaited[0][0]):
            tickets, residents_done = ours.awaited.popleft()
            seconds = max(ticket.ended for ticket in tickets) - residents_done
            ours.look_ahead_trial.note_wait(len(tickets), max(0.0, seconds))


class Asking:
    """Runs one prediction at a time on a thread. Only the computing thread may call its methods."""

    def __init__(self) -> None:
        self._worker = ThreadPoolExecutor(1, "smoe-asking")  # its thread begins with the first prediction
        self._has_begun = False
        self._answer: Future[Sequence[Prediction]] | None = None

    @property
    def is_open(self) -> bool:
        """Whether a prediction has begun and has not been taken."""
        return self._answer is not None

    def begin(self, predictor: Predictor, sight: Sight) -> None:
        """Start `predictor` on the thread, with the input `sight`. Nothing else may use the predictor until `take` has
        returned its prediction."""
        assert self._answer is None, "one prediction at a time"
        if not self._has_begun:
            self._has_begun, count = True, torch.get_num_threads()
            self._worker.submit(_begin).result()
            torch.set_num_threads(count)  # later threads take the last value that was set
        self._answer = self._worker.submit(_predict, predictor, sight)

    def take(self, waits: bool) -> Sequence[Prediction] | None:
        """Return the prediction; None if no prediction was started, or if it is unfinished and `waits` is false.

        An exception of the predictor is raised here.
        """
        if self._answer is None or not (waits or self._answer.done()):
            return None
        found = self._answer.result()
        self._answer = None
        return found

    def drain(self) -> None:
        """Wait for the running prediction and drop its result."""
        if self._answer is not None:
            self._answer.cancel()
            wait([self._answer])
            self._answer = None

    def close(self) -> None:
        """End the thread. Repeated calls have no effect."""
        self._worker.shutdown(cancel_futures=True)


def _begin() -> None:
    torch.set_num_threads(1)  # the experts need the other threads
    torch.set_grad_enabled(False)


def _predict(predictor: Predictor, sight: Sight) -> Sequence[Prediction]:
    return list(predictor.predict(sight))
