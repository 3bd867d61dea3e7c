"""The forward passes of one engine. One thread at a time runs them and others wait; any thread can end the running
request.

Three threads, time to the right:

    thread A     | turn: generate: pass, pass, pass ...              | done
    thread B        | waits ............. logs a warning ....        | turn: ...
    thread C                                    | cancel(): A's next layer raises

`cancel()` ends whichever request runs. A `Cancellation` ends one particular call, whether it runs or waits.

No lock is held during a turn; the turn is only a record of the thread that has it. So a `finally` clause can undo an
interrupt (Ctrl-C) at any point, which is impossible for a lock that was just being acquired.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch

from smoe.errors import EngineBusyError, EngineStateError, GenerationCancelledError
from smoe.fastpath.rows_of_pass import RowsOfPass
from smoe.kernels.threads import threads
from smoe.memory.store import ExpertStore
from smoe.models.kv_cache import RowCache
from smoe.models.scoring import ScoringRule
from smoe.routing import Phase
from smoe.runtime.cancellation import Cancellation
from smoe.runtime.execute import LayerExecutor
from smoe.runtime.rerouting import Scored
from smoe.runtime.reserve import Reserve
from smoe.runtime.step import Step

PATIENCE_SECONDS = 2.0
"""A thread that waits longer than this logs a warning."""
_LOOK_AGAIN_SECONDS = 1.0
"""Waiting threads check again after this time, because an interrupt can lose the notification that a turn has ended."""

_log = logging.getLogger(__name__)


class Passes:
    """The forward passes of one engine through its model. The model's modules call its methods (`seam.py`)."""

    def __init__(
        self,
        executor: LayerExecutor,
        store: ExpertStore,
        rules: Mapping[int, ScoringRule],
        reserve: Reserve,
        rows_of_pass: RowsOfPass | None,
        leaves_little: bool,
        leaves_little_of_prompts: bool,
        turn_timeout_seconds: float | None,
    ) -> None:
        """`rules`: by layer, the scoring rules of routers whose scores a policy reads. `rows_of_pass`: passes the
        lengths of the texts in a batch to attention; None if the model's attention does not support texts of different
        lengths. `leaves_little`: whether our kernels compute almost all products of one token, so that the library
        needs only one thread. `leaves_little_of_prompts`: the same for passes of several tokens."""
        self.turns = Turns()
        self.executor, self.rules, self.rows_of_pass = executor, rules, rows_of_pass
        self._shut_down: Callable[[], None] | None = None
        """Frees the engine at the end of the running turn, once it is to be closed; no further turn may begin then."""
        self._experts = {layer: held.experts for layer, held in store.layers.items()}
        self._reserve = reserve
        self._leaves_little, self._leaves_little_of_prompts = leaves_little, leaves_little_of_prompts
        self._timeout_seconds = turn_timeout_seconds
        self._threads = torch.get_num_threads()
        """The number of computing threads, on which our kernels have been compared."""
        self._process = os.getpid()
        self._is_in_pass = False
        self._phase = Phase.PREFILL
        self._sequences = 1
        self._answer: Callable[[Step], torch.Tensor] = executor.run
        """Computes the experts' output [T, H] of a layer; measurements replace it (`stand_in.py`)."""
        self._logits: dict[int, torch.Tensor] = {}
        """The routers' logits in this pass, until their experts run."""
        self._silent: torch.Tensor | None = None
        """[T] of this pass, True at positions that need no expert; None where all do."""

    @property
    def is_closing(self) -> bool:
        """Whether the engine is being closed or is closed, so that no further turn may begin."""
        return self._shut_down is not None

    @property
    def is_changing_steps(self) -> bool:
        """Whether the running pass differs from an ordinary forward pass: some positions need no expert, or a
        measurement replaces the computation of experts."""
        return self._silent is not None or self._answer != self.executor.run

    @contextmanager
    def answered_by(self, answer: Callable[[Step], torch.Tensor]) -> Iterator[None]:
        """Let `answer` compute the output [T, H] of every layer's experts during the `with` block."""
        before, self._answer = self._answer, answer
        try:
            yield
        finally:
            self._answer = before

    def close(self, shut_down: Callable[[], None], timeout_seconds: float | None) -> None:
        """Cancel the running request, and call `shut_down` when the request has ended. (`shut_down` may be called
        twice.) Raise `EngineBusyError` if the request does not end within `timeout_seconds`."""
        self._shut_down = shut_down
        if self._process != os.getpid():
            shut_down()  # the thread that has the turn is in another process
            return
        self.turns.cancel("this request was cancelled because its model was closed")
        if not self.turns.is_mine:
            with self.turns.taken(timeout_seconds, "close(timeout_seconds=...)"):
                shut_down()

    @contextmanager
    def turn(self, cancellations: Sequence[Cancellation] = ()) -> Iterator[None]:
        """Give the calling thread the turn during the `with` block, to compute or to make a cache. Only one thread has
        the turn; it uses the engine's number of threads.

        Raises `EngineBusyError` after waiting for `turn_timeout_seconds`, `EngineStateError` if the engine is closed,
        and `GenerationCancelledError` if one of `cancellations` ends the request while it waits.
        """
        if self.turns.is_mine and self._process == os.getpid():
            yield  # also while it is closing: the pass says so
            return
        self.check_usable()
        with self.turns.taken(self._timeout_seconds, "turn_timeout_seconds", cancellations):
            try:
                self.check_usable()
                self._is_in_pass = False
                with threads(self._threads):
                    yield
            finally:
                if self._shut_down is not None:
                    self._shut_down()

    @contextmanager
    def forward_pass(
        self, given: torch.Tensor, padding: torch.Tensor | None, cache: RowCache | None, encodes_image: bool = False
    ) -> Iterator[None]:
        """Prepare one forward pass of the model before the `with` block, and finish it afterwards. The thread must have
        the turn.

        `given`: token ids [rows, new positions], or their embeddings [rows, new positions, H]. `padding`: [rows, new
        positions], True at padding, for which no expert is computed. `encodes_image`: whether the image encoder runs
        within the pass. Raises `GenerationCancelledError` if the turn was
        cancelled; `run_experts` also raises it.
        """
        self.refuse_in_pass("the model")
        self._is_in_pass = True
        rows, tokens = given.shape[:2]
        try:
            if cache is not None:
                cache.begin(tokens, rows)
            self._phase = Phase.DECODE if tokens == 1 else Phase.PREFILL
            self._sequences = rows
            self._reserve.begin(tokens * rows, encodes_image)
            self._note_silent(tokens, padding, cache)
            if self._phase is Phase.PREFILL:
                self.executor.arrivals.pause_fill()
            self.executor.begin_pass(given if given.dim() == 2 else None, cache)
            started = self.executor.now()
            try:
                self.turns.check()
                with torch.no_grad(), self._apart(cache, tokens) as alone, self._threads_for(tokens * rows, alone):
                    yield
            except BaseException:
                self.executor.recover()  # no read stays in flight
                raise
            if cache is not None:
                cache.commit()
                self._reserve.caches.check()
            self._count_pass(tokens * rows, self.executor.now() - started)
            if self._phase is Phase.PREFILL:
                self.executor.arrivals.resume_preload()
        finally:
            self._is_in_pass = False

    @contextmanager
    def image_pass(self) -> Iterator[None]:
        """Make room for the image encoder before the `with` block, in which it computes one image. The thread must have
        the turn. Raises `GenerationCancelledError` if the turn was cancelled."""
        self.refuse_in_pass("the image encoder")
        self.turns.check()
        self._reserve.begin_image()
        with torch.no_grad():
            yield

    def _note_silent(self, tokens: int, padding: torch.Tensor | None, cache: RowCache | None) -> None:
        """Find the positions of the pass that need no expert: padding, and rows whose text has ended."""
        silent = cache.padding(tokens) if padding is None and cache is not None else padding
        if cache is not None and cache.ended is not None:
            ended = cache.ended.unsqueeze(1).expand(-1, tokens)
            silent = ended if padding is None else ended | padding
        self._silent = None if silent is None else silent.reshape(-1)

    def _count_pass(self, positions: int, seconds: float) -> None:
        counters, answerer = self.executor.counters, self.executor.answerer
        counters.forward_passes += 1
        counters.tokens += positions - (int(self._silent.sum()) if self._silent is not None else 0)
        counters.forward_seconds += seconds
        if answerer is not None and self._phase is Phase.DECODE:
            answerer.answering.note_step(seconds)
        self.executor.prefetching.note_pass(self._phase, seconds)

    def run_experts(
        self, layer: int, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the weighted sum of one layer's experts [T, H]. `hidden` [T, H] is the experts' input; `top_k_index`
        and `top_k_weights` [T, K] are the router's choice, as the library passes them."""
        self.turns.check()
        if self._silent is not None:
            top_k_index = top_k_index.masked_fill(self._silent.unsqueeze(1), self._experts[layer])
        logits, rule = self._logits.pop(layer, None), self.rules.get(layer)
        scored = Scored(rule, rule.scores(logits)) if rule is not None and logits is not None else None
        step = Step(layer, self._phase, hidden, top_k_index, top_k_weights, self._sequences, logits, scored)
        for observer in self.executor.observers:
            observer.routed(step)
        output = self._answer(step)
        for observer in self.executor.observers:
            observer.computed(step, output)
        return output

    def note_logits(self, layer: int, logits: torch.Tensor) -> None:
        """Store the logits [T, E] of one layer's router until `run_experts` of that layer uses them."""
        self._logits[layer] = logits

    def _apart(self, cache: RowCache | None, tokens: int) -> AbstractContextManager[bool]:
        """Compute the rows of a batch as separate texts during the `with` block. Yield whether each row gets the same
        bits as in a pass that contains only this row."""
        if cache is None or cache.row_lengths is None or self.rows_of_pass is None:
            return nullcontext(False)
        return self.rows_of_pass.apart(cache.row_keys(tokens), tokens)

    def _threads_for(self, positions: int, alone: bool) -> AbstractContextManager[None]:
        """Limit the library to one thread during the `with` block if our kernels compute the large products of this
        pass.

        The library's remaining work is so short that dividing it takes longer than doing it. Its threads, once awake,
        also delay ours: on a busy machine each small operation of a layer waits for a core, and a prompt of 16 tokens
        takes three times as long. Our kernels were compared with the library for one token, on one thread and on all.
        If a remaining product has other bits on one thread, it uses all threads (`fastpath/linear.py`).
        """
        is_several = positions > 1 and not alone
        return threads(1) if (self._leaves_little_of_prompts if is_several else self._leaves_little) else nullcontext()

    def owns(self, cache: RowCache) -> bool:
        """Return whether `cache` is in this engine's part of the memory budget."""
        return cache.is_in(self._reserve.caches)

    def check_usable(self) -> None:
        """Raise `EngineStateError` if the engine is closed, or if it belongs to the parent of a forked process."""
        if self._shut_down is not None:
            raise EngineStateError("this model was closed; load it again with smoe.from_pretrained")
        if self._process != os.getpid():
            raise EngineStateError(
                "this model was loaded before this process was forked; load the model in the child process instead"
            )

    def refuse_in_pass(self, what: str) -> None:
        """Raise `EngineStateError` while a forward pass is running. `what`: the name, for the message, of the call that
        is not allowed during a pass."""
        if self._is_in_pass:
            raise EngineStateError(
                f"{what} cannot be called inside a forward pass of the same model, for example in a hook"
            )


class Turns:
    """The turns of one engine: the times in which one thread uses the engine and others wait. If a thread begins a turn
    within its own turn, both are the same turn."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._holder: int | None = None
        self._began = 0.0
        self._why_cancelled: str | None = None
        self._cancellations: Sequence[Cancellation] = ()
        """The cancellations of the running turn."""

    @property
    def is_running(self) -> bool:
        """Whether any thread has the turn, the exclusive use of the engine."""
        return self._holder is not None

    @property
    def is_mine(self) -> bool:
        """Whether the calling thread has the turn, the exclusive use of the engine."""
        return self._holder == threading.get_ident()

    @contextmanager
    def taken(
        self, timeout_seconds: float | None, bound: str, cancellations: Sequence[Cancellation] = ()
    ) -> Iterator[None]:
        """Give the calling thread the turn, the exclusive use of the engine, during the `with` block.

        Raises `EngineBusyError` after waiting for `timeout_seconds` (None: no limit); `bound` is the name of this limit
        in the error's message. Raises `GenerationCancelledError` if one of `cancellations` ends the call before its
        turn.
        """
        if self.is_mine:
            yield
            return
        with ExitStack() as watched:
            for each in cancellations:
                watched.enter_context(each.waking(self._wake))
            try:
                try:
                    self._wait(timeout_seconds, bound, cancellations)
                    yield
                finally:
                    self._end()
            finally:
                self._end()  # again, in case an interrupt occurred within the first call

    def cancel(self, why: str) -> bool:
        """Make the running turn raise an error with the text `why` at its next layer. Return False if no turn is
        running. Any thread may call this."""
        with self._changed:
            if self._holder is None:
                return False
            self._why_cancelled = why
            return True

    def check(self) -> None:
        """Raise `GenerationCancelledError` if the running turn was cancelled."""
        if self._why_cancelled is not None:
            raise GenerationCancelledError(self._why_cancelled)
        _check(self._cancellations)

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _end(self) -> None:
        if self.is_mine:
            self._holder = None
            with self._changed:
                self._changed.notify()

    def _wait(self, timeout_seconds: float | None, bound: str, cancellations: Sequence[Cancellation]) -> None:
        asked = time.monotonic()
        end = None if timeout_seconds is None else asked + timeout_seconds
        is_patient = True
        with self._changed:
            while self._holder is not None:
                _check(cancellations)
                now = time.monotonic()
                if end is not None and now >= end:
                    raise EngineBusyError(
                        f"another request has been running for {now - self._began:.1f} s, and this request was "
                        f"allowed to wait {timeout_seconds:g} s at most ({bound}); try again later, end the running "
                        "request with model.offload.cancel(), or allow a longer wait"
                    )
                if is_patient and now - asked >= PATIENCE_SECONDS:
                    is_patient = False
                    _log.warning(
                        "waiting for this model: another request has been running for %.1f s; model.offload.cancel() "
                        "ends it, turn_timeout_seconds bounds the wait",
                        now - self._began,
                    )
                left = _LOOK_AGAIN_SECONDS if end is None else min(_LOOK_AGAIN_SECONDS, end - now)
                self._changed.wait(min(left, PATIENCE_SECONDS) if is_patient else left)
            self._began = time.monotonic()
            self._why_cancelled, self._cancellations = None, cancellations
            self._holder = threading.get_ident()


def _check(cancellations: Sequence[Cancellation]) -> None:
    if any(each.ends_without_tokens for each in cancellations):
        raise GenerationCancelledError("this request was cancelled by its Cancellation before its first token")
