"""The decode loop: requests start and end between steps. Each has its own row of the KV cache, its own sampler and its
own end.

    waiting --a row is free--> prefill --whole prompt--> decode --end, stop, length, cancelled, failed--> ended
                               one piece of a prompt     one token of all
                               (or several short         texts in a step
                               prompts) in a step

While some texts are decoded, prefill gets as much time as decode and no more. A prompt is divided into the same pieces
as if it were alone. A row is decoded as it would be alone, if that costs no time. So a request's result does not depend
on other requests.

An error within a step affects only the rows that cause it: a pass of several rows that fails is repeated for each row.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from smoe.errors import ConfigError, ContextError, EngineBusyError, EngineStateError
from smoe.generation.detokenizer import TextStream
from smoe.generation.library_settings import end_tokens, generation_config
from smoe.generation.prompt_images import piece_end
from smoe.generation.request import End, EndReason, Piece, Request
from smoe.generation.row_text import common_beginning
from smoe.generation.rows import Rows
from smoe.generation.sampler import Sampler
from smoe.machine.processor import waited_seconds
from smoe.metrics import Counters
from smoe.runtime.engine import Engine

_log = logging.getLogger(__name__)

UNSETTLED_STEPS = 8
"""The number of decode steps after a prompt whose times forecasts do not use. They include work that is done once, and
loads of experts that the prompt has evicted or not used."""


class Prefill(NamedTuple):
    """The state of the prefill of one prompt, or of several short ones that are processed together."""

    begun: float
    """The time at which the prefill began, in seconds of the engine's clock."""
    seconds: float
    """The seconds since then."""
    tokens_read: int
    """The number of tokens of which keys and values are in the KV cache."""
    tokens: int
    """The number of all tokens of the prompts."""


class DecodeLoop:
    """Generates the texts of all requests to one model, step by step. Any thread may call `hand_in` and `close`. Only
    one thread at a time may call `step` or `run`."""

    def __init__(
        self, model: PreTrainedModel, tokenizer: Any, most_waiting: int | None = None, reads_first: bool = False
    ) -> None:
        """`most_waiting`: the largest number of requests that may wait for a row of the KV cache; None: any number.
        `reads_first`: whether all prompts are processed before any text is decoded."""
        self._model, self._tokenizer = model, tokenizer
        self._engine: Engine = model.offload  # type: ignore[assignment]
        self._ends = end_tokens(model, tokenizer)
        self._most_waiting, self._reads_first = most_waiting, reads_first
        self._changed = threading.Condition()
        self._asked: deque[Request] = deque()
        self._is_closed = False
        self._rows: Rows | None = None
        self._reading: list[_Text] = []
        """The text in prefill, or several short ones that are processed together."""
        self._decoding: list[_Text] = []
        """The texts in decode. Their rows are numbered from 0 in this order."""
        self._seconds_of = {"reading": 0.0, "decoding": 0.0}
        """The seconds of prefill and decode, counted while there was work for both."""
        self.busy_seconds = 0.0
        """The seconds in which at least one request had not ended, up to the last time at which `run` was idle."""
        self.waited_seconds = 0.0
        """The part of `busy_seconds` in which the loop's thread was ready to run without a core; 0 where the system
        does not count it."""
        self._of_one_text = Counters()
        self._one_text_began: Counters | None = None
        """The counters at the beginning of the running series of decode steps of one text."""

    # -- any thread ---------------------------------------------------------------------------------------------------

    def hand_in(self, request: Request) -> None:
        """Add a request to the queue. Raise `ContextError` if the prompt leaves no room for new tokens,
        `EngineBusyError` if the queue is full, and `EngineStateError` if the loop is closed."""
        self.check(request)
        with self._changed:
            if self._is_closed:
                raise EngineStateError("this model takes no more requests: it is being closed")
            if self._most_waiting is not None and len(self._asked) >= self._most_waiting:
                raise EngineBusyError(f"{len(self._asked)} requests are waiting already, the maximum; try again later")
            request.asked = self._engine.now()
            self._asked.append(request)
            self._changed.notify_all()

    def check(self, request: Request) -> None:
        """Raise the error that `hand_in` would raise for this request at any time. A full queue or a closed loop is not
        an error here."""
        if not request.ids:
            raise ConfigError("the prompt has no tokens; give some text", setting="prompt", given="", allowed="text")
        room = self._engine.context_tokens
        if len(request.ids) >= room:
            raise ContextError.of_prompt(len(request.ids), room, self._engine.position_limit)

    @property
    def waiting(self) -> int:
        """The number of requests that wait for a row."""
        return len(self._asked)

    @property
    def running(self) -> int:
        """The number of requests in prefill or decode."""
        return len(self._texts())

    @property
    def prefill(self) -> Prefill | None:
        """The state of the prefill in progress, or None."""
        texts = list(self._reading)
        if not texts:
            return None
        read = sum(max(text.read, text.request.reused_tokens) for text in texts)
        begun = texts[0].request.begun
        return Prefill(begun, self._engine.now() - begun, read, sum(len(text.request.ids) for text in texts))

    @property
    def counters_of_one_text(self) -> Counters:
        """The engine's counters of the decode steps in which one text was decoded, and no prompt was in prefill. The
        first steps of each text do not count. No step may run."""
        began = self._one_text_began
        return self._of_one_text if began is None else self._of_one_text + (self._engine.stats() - began)

    def wake(self) -> None:
        """Wake the loop, so that it processes cancelled requests."""
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        """Refuse further requests. `run` returns when the accepted requests have ended."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def cancel_all(self) -> None:
        """End all requests before the next step."""
        with self._changed:
            for request in [*self._asked, *(text.request for text in self._texts())]:
                request.is_cancelled = True
            self._changed.notify_all()

    # -- the loop's thread --------------------------------------------------------------------------------------------

    def run(self, until_idle: bool = False, after_step: Callable[[], None] | None = None) -> None:
        """Run steps until the loop is closed and has no requests; with `until_idle`, until it has no requests.
        `after_step` is called after each step."""
        while True:
            with self._changed:
                while not self._is_closed and not until_idle and not self._has_work:
                    self._changed.wait()
                if not self._has_work:
                    return
            with self._engine.passes.turn():
                began, waited = self._engine.now(), waited_seconds() or 0.0
                self._engine.pause_filling()
                try:
                    while self._has_work:
                        self.step()
                        if after_step is not None:
                            after_step()
                    self._engine.fill()
                finally:
                    self._note_series(False)  # what is read while the loop is idle does not count
                    self.busy_seconds += self._engine.now() - began
                    self.waited_seconds += (waited_seconds() or 0.0) - waited

    def give_up(self) -> None:
        """Cancel all requests and end them at once. It may also be called after an interrupt of `run`. Events that were
        reported before stay valid."""
        self.cancel_all()
        self._drop_cancelled()

    @property
    def _has_work(self) -> bool:
        return bool(self._asked or self._decoding or self._reading)

    def step(self) -> None:
        """Process one piece of a prompt, or decode one token of every text."""
        self._drop_cancelled()
        if not self._reading:
            self._admit()
        self._note_series(self._is_settled)
        if self._reading and (not self._decoding or self._is_turn_of_reading()):
            with self._timed("reading", bool(self._decoding)):
                self._read()
        elif self._decoding:
            with self._timed("decoding", bool(self._reading)):
                self._decode()

    @property
    def _is_settled(self) -> bool:
        """Whether the next step decodes one text, no prompt is in prefill, and the text's first steps are done."""
        return (
            len(self._decoding) == 1 and not self._reading and len(self._decoding[0].request.new_ids) > UNSETTLED_STEPS
        )

    def _note_series(self, is_of_one_text: bool) -> None:
        """Begin or end a series of decode steps of one text. `is_of_one_text`: whether the next step is one."""
        if is_of_one_text and self._one_text_began is None:
            self._one_text_began = self._engine.stats()
        elif not is_of_one_text and self._one_text_began is not None:
            self._of_one_text, self._one_text_began = self.counters_of_one_text, None

    def _texts(self) -> list[_Text]:
        return [*self._decoding, *self._reading]

    @contextmanager
    def _timed(self, what: str, are_both_wanted: bool) -> Iterator[None]:
        began = self._engine.now()
        try:
            yield
        finally:
            if are_both_wanted:
                self._seconds_of[what] += self._engine.now() - began

    def _is_turn_of_reading(self) -> bool:
        return self._reads_first or self._seconds_of["reading"] <= self._seconds_of["decoding"]

    def _drop_cancelled(self) -> None:
        with self._changed:
            dropped = [request for request in self._asked if request.is_cancelled]
            for request in dropped:
                self._asked.remove(request)
        for request in dropped:
            self._say(request, End(EndReason.CANCELLED, ""))
        for text in self._texts():
            if text.request.is_cancelled:
                self._leave(text, EndReason.CANCELLED)
            elif text.request.has_enough:
                self._leave(text, EndReason.STOP)

    def _admit(self) -> None:
        """Give the next waiting request a free row of the KV cache. Also admit the requests after it whose prompts can
        be processed in the same pass."""
        rows = self._usable_rows()
        while rows.has_free:
            with self._changed:
                if not self._asked:
                    break
                if self._reading and not self._fits(self._asked[0]):
                    break
                request = self._asked.popleft()
            self._begin(request, rows)
        if not self._reading:
            self._seconds_of = {"reading": 0.0, "decoding": 0.0}

    def _fits(self, request: Request) -> bool:
        """Return whether a prompt can be processed in one pass with the prompts that were admitted before. The
        beginning of no prompt may be in the KV cache already, and all prompts together must be at most as large as one
        piece of a long prompt."""
        if request.images is not None or self._reading[0].request.images is not None:
            return False
        prompts = [*(text.request.ids for text in self._reading), request.ids]
        is_new = not self._reading[0].request.reused_tokens and not self._usable_rows().known(request.ids)
        is_own = all(2 * common_beginning(ids, request.ids) < len(request.ids) for ids in prompts[:-1])
        size = len(prompts) * max(map(len, prompts))
        is_small = min(map(len, prompts)) > 1 and size <= self._engine.config.prefill_tokens
        return self._usable_rows().share_passes is not False and is_new and is_own and is_small

    def _begin(self, request: Request, rows: Rows) -> None:
        try:
            stream = TextStream(self._tokenizer, request.ids, request.sampling.stop)
            text = _Text(request, self._sampler(request), stream)
        except Exception as error:
            self._say(request, End(EndReason.FAILED, "", error))
            return
        text.row, request.reused_tokens = rows.take(request.ids, request.images)
        request.begun = self._engine.now()
        self._reading.append(text)

    def _usable_rows(self) -> Rows:
        """Return the rows of the KV cache. If another KV cache has taken their memory and no text is in them, make new
        rows."""
        if self._rows is None or (self._rows.is_lost and not self._texts()):
            self._rows = Rows(self._model, self._engine)
        return self._rows

    def _sampler(self, request: Request) -> Sampler:
        config = generation_config(self._model, self._tokenizer, request.sampling, self._engine.context_tokens)
        return Sampler(self._model, config, request.sampling, request.ids, request.logprobs, request.constraint)

    # -- passes -------------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        """Process the next piece of a prompt, or several whole prompts. After the last piece, choose the first
        token."""
        if len(self._reading) > 1:
            self._read_together()
            return
        text, rows, ids = self._reading[0], self._usable_rows(), self._reading[0].request.ids
        begin = max(text.read, text.request.reused_tokens)
        end = piece_end(text.request.images, begin, min(len(ids), begin + self._engine.config.prefill_tokens))
        try:
            logits = rows.read(text.row, ids[begin:end])
        except Exception as error:
            self._leave(text, EndReason.FAILED, error)
            return
        text.read = end
        if text.read == len(ids):
            self._reading.clear()
            self._join(text)
            self._take(text, logits)

    def _read_together(self) -> None:
        texts, rows, first = list(self._reading), self._usable_rows(), len(self._decoding)
        for to, text in enumerate(texts, start=first):
            self._move(text, to)
        prompts = [text.request.ids for text in texts]
        try:
            found: Sequence[torch.Tensor | Exception] = rows.read_together(first, prompts)
        except Exception as error:
            found = self._each(texts, error, lambda text: rows.read_again(text.row, text.request.ids))
        self._reading.clear()
        self._decoding += texts
        self._take_all(texts, found)

    def _move(self, text: _Text, to: int) -> None:
        """Move a text in prefill to row `to` of the KV cache, by exchanging the contents of two rows."""
        self._usable_rows().exchange(text.row, to)
        for other in self._reading:
            if other is not text and other.row == to:
                other.row = text.row
        text.row = to

    def _join(self, text: _Text) -> None:
        """Move a text whose prefill is complete to the texts in decode."""
        self._move(text, len(self._decoding))
        self._decoding.append(text)

    def _decode(self) -> None:
        rows, texts = self._usable_rows(), list(self._decoding)
        try:
            found: Sequence[torch.Tensor | Exception] = rows.decode([text.request.new_ids[-1] for text in texts])
        except Exception as error:
            found = self._each(texts, error, lambda text: rows.decode_alone(text.row, text.request.new_ids[-1]))
        self._take_all(texts, found)

    def _each(
        self, texts: Sequence[_Text], error: Exception, again: Callable[[_Text], torch.Tensor]
    ) -> list[torch.Tensor | Exception]:
        """Repeat a failed pass for every row alone, so that texts without an error continue. Return each row's logits
        or error."""
        if len(texts) == 1:
            return [error]
        _log.warning(
            "decoding %d texts together failed, so this step is repeated for each text separately: %s",
            len(texts),
            error,
        )
        found: list[torch.Tensor | Exception] = []
        for text in texts:
            try:
                found.append(again(text))
            except Exception as own:
                found.append(own)
        return found

    def _take_all(self, texts: Sequence[_Text], found: Sequence[torch.Tensor | Exception]) -> None:
        for text, outcome in zip(texts, found, strict=True):
            if isinstance(outcome, Exception):
                self._leave(text, EndReason.FAILED, outcome)
            else:
                self._take(text, outcome)

    def _take(self, text: _Text, logits: torch.Tensor) -> None:
        """Choose the next token of a text from logits [V], and report it. End the text if this was its last token."""
        request = text.request
        try:
            token, logprob, top = text.sampler.choose(logits)
            request.new_ids.append(token)
            is_end = token in self._ends and not request.sampling.ignores_end
            shown = "" if is_end else text.stream.push(token)
        except Exception as error:
            self._leave(text, EndReason.FAILED, error)
            return
        if len(request.new_ids) == 1:
            request.first = self._engine.now()
        self._say(request, Piece(token, shown, logprob, top))
        if is_end:
            self._leave(text, EndReason.END)
        elif text.stream.found_stop:
            self._leave(text, EndReason.STOP)
        elif len(request.new_ids) >= request.sampling.max_new_tokens or self._is_full(text):
            self._leave(text, EndReason.LENGTH)

    def _is_full(self, text: _Text) -> bool:
        return len(text.request.ids) + len(text.request.new_ids) >= self._engine.context_tokens

    def _leave(self, text: _Text, reason: EndReason, error: Exception | None = None) -> None:
        """End a text and free its row. The keys and values stay in the row, for a later text with the same
        beginning."""
        rows = self._usable_rows()
        if text in self._reading:
            self._reading.remove(text)
        elif text in self._decoding:
            last = self._decoding.pop()
            if last is not text:
                rows.exchange(text.row, last.row)
                self._decoding[text.row] = last
                last.row, text.row = text.row, last.row
        rows.free(text.row, is_whole=reason is not EndReason.FAILED)
        self._say(text.request, End(reason, text.stream.flush(), error))

    def _say(self, request: Request, what: Piece | End) -> None:
        if isinstance(what, End):
            request.ended = self._engine.now()
        try:
            request.receive(what)
        except Exception:
            _log.exception("the client cannot receive its response; the request is dropped")
            request.is_cancelled = True


class _Text:
    """A request that has a row of the KV cache, with its sampler and the text generated so far."""

    def __init__(self, request: Request, sampler: Sampler, stream: TextStream) -> None:
        self.request = request
        self.sampler = sampler
        self.stream = stream
        self.row = -1
        self.read = 0
        """The number of prompt tokens that have been processed."""
