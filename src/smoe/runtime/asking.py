"""A predictor that runs concurrently with the experts, on a thread of its own (DuoServe-MoE, section 5.3).

One layer in decode, time to the right:

    computing thread   | router | plan | wait | expert 1 | expert 2 ... | next layer
    asking thread                      | predict ............ |
    next layer's loads                                        | begin, behind those that this layer waits for

A question ends before the next router is observed, so the predictor's state is one thread's at a time and what it says
does not depend on when. The computing thread looks for the answer between experts, as soon as it may, or only once the
first is done, as in the paper, whose loads overwrite that expert (`prefetch_asked`).
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

import torch

from smoe.policy.prediction import Prediction, Predictor, Sight


class Asking:
    """One question at a time. All but the answering belongs to the computing thread."""

    def __init__(self) -> None:
        self._worker = ThreadPoolExecutor(1, "smoe-asking")  # its thread begins with the first question
        self._has_begun = False
        self._answer: Future[Sequence[Prediction]] | None = None

    @property
    def is_open(self) -> bool:
        """Whether a question has been asked whose answer has not been taken."""
        return self._answer is not None

    def begin(self, predictor: Predictor, sight: Sight) -> None:
        """Ask. The predictor must not be used until the answer has been taken."""
        assert self._answer is None, "one question at a time"
        if not self._has_begun:
            self._has_begun, count = True, torch.get_num_threads()
            self._worker.submit(_begin).result()
            torch.set_num_threads(count)  # threads that are yet to come take what was set last
        self._answer = self._worker.submit(_ask, predictor, sight)

    def take(self, waits: bool) -> Sequence[Prediction] | None:
        """The answer; None where nothing was asked, or where it is not there and `waits` is false.

        What the predictor has raised is raised here.
        """
        if self._answer is None or not (waits or self._answer.done()):
            return None
        found = self._answer.result()
        self._answer = None
        return found

    def drain(self) -> None:
        """Forget the question, once its answering has ended."""
        if self._answer is not None:
            self._answer.cancel()
            wait([self._answer])
            self._answer = None

    def close(self) -> None:
        """End the thread; any number of times."""
        self._worker.shutdown(cancel_futures=True)


def _begin() -> None:
    torch.set_num_threads(1)  # the experts want the others
    torch.set_grad_enabled(False)


def _ask(predictor: Predictor, sight: Sight) -> Sequence[Prediction]:
    return list(predictor.predict(sight))
