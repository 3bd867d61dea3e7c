"""Runs a predictor concurrently with the experts, on a thread of its own (DuoServe-MoE, section 5.3).

One layer in decode, time to the right:

    computing thread   | router | plan | wait | expert 1 | expert 2 ... | next layer
    predictor thread                   | predict ............ |
    next layer's loads                                        | begin, after those that this layer waits for

A prediction ends before the next router is observed, so one thread at a time uses the predictor's state, and the
prediction does not depend on timing. The computing thread checks for the prediction between experts: from the start, or
only after the first expert, as in the paper, whose loads overwrite that expert (`prefetch_asked`).
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

import torch

from smoe.policy.prediction import Prediction, Predictor, Sight


class Asking:
    """One prediction at a time. Only the computing thread may call its methods."""

    def __init__(self) -> None:
        self._worker = ThreadPoolExecutor(1, "smoe-asking")  # its thread begins with the first question
        self._has_begun = False
        self._answer: Future[Sequence[Prediction]] | None = None

    @property
    def is_open(self) -> bool:
        """Whether a prediction has begun and has not been taken."""
        return self._answer is not None

    def begin(self, predictor: Predictor, sight: Sight) -> None:
        """Start a prediction. The predictor must not be used until the prediction has been taken."""
        assert self._answer is None, "one prediction at a time"
        if not self._has_begun:
            self._has_begun, count = True, torch.get_num_threads()
            self._worker.submit(_begin).result()
            torch.set_num_threads(count)  # later threads take the last value that was set
        self._answer = self._worker.submit(_ask, predictor, sight)

    def take(self, waits: bool) -> Sequence[Prediction] | None:
        """Return the prediction; None where none was started, or where it is unfinished and `waits` is false.

        An exception of the predictor is raised here.
        """
        if self._answer is None or not (waits or self._answer.done()):
            return None
        found = self._answer.result()
        self._answer = None
        return found

    def drain(self) -> None:
        """Drop the prediction after it has ended."""
        if self._answer is not None:
            self._answer.cancel()
            wait([self._answer])
            self._answer = None

    def close(self) -> None:
        """End the thread. Repeated calls have no effect."""
        self._worker.shutdown(cancel_futures=True)


def _begin() -> None:
    torch.set_num_threads(1)  # the experts need the others
    torch.set_grad_enabled(False)


def _ask(predictor: Predictor, sight: Sight) -> Sequence[Prediction]:
    return list(predictor.predict(sight))
