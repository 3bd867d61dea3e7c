"""The decode loop: requests come and go between steps, each with a row, a sampler and an end of its own.

    asked --waiting--> reading --last piece read--> decoding --end, stop, length, cancelled, failed--> over
                       one prompt at a time,        all of them together,
                       a piece a step               a token each a step

While some decode, reading gets as much time as decoding and no more. A prompt is read in the pieces in which it would
be read alone, and a row decodes as it would alone where that costs nothing (`Engine.decodes_alone`), so what a request
gets does not depend on who else is there.

Whatever fails within a step fails the rows that it fails in: a pass of several rows is made again for each of them.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from smoe.errors import ConfigError, ContextError, EngineBusyError, EngineStateError
from smoe.generation.detokenizer import TextStream
from smoe.generation.generate import end_tokens, generation_config
from smoe.generation.request import End, Piece, Reason, Request
from smoe.generation.rows import Rows
from smoe.generation.sampler import Sampler
from smoe.runtime.engine import Engine

_log = logging.getLogger(__name__)


class DecodeLoop:
    """Of one model. `hand_in` and `close` may be called from any thread; one thread at a time calls `step` or `run`."""

    def __init__(self, model: PreTrainedModel, tokenizer: Any, most_waiting: int | None = None) -> None:
        """`most_waiting`: requests that may wait for a row; None: any number."""
        self._model, self._tokenizer = model, tokenizer
        self._engine: Engine = model.offload  # type: ignore[assignment]
        self._ends = end_tokens(model, tokenizer)
        self._most_waiting = most_waiting
        self._changed = threading.Condition()
        self._asked: deque[Request] = deque()
        self._is_closed = False
        self._rows: Rows | None = None
        self._reading: _Text | None = None
        self._decoding: list[_Text] = []
        """In the order of their rows, from 0 on."""
        self._seconds_of = {"reading": 0.0, "decoding": 0.0}
        """Spent while both were wanted."""

    # -- any thread ---------------------------------------------------------------------------------------------------

    def hand_in(self, request: Request) -> None:
        """Have it answered. Raises `ContextError` for a prompt that leaves no room, `EngineBusyError` where too many
        wait, `EngineStateError` where the loop has been closed."""
        self.check(request)
        with self._changed:
            if self._is_closed:
                raise EngineStateError("this model takes no more requests: it is being closed")
            if self._most_waiting is not None and len(self._asked) >= self._most_waiting:
                raise EngineBusyError(
                    f"{len(self._asked)} requests wait already, which is all that may; try again later"
                )
            request.asked = self._engine.now()
            self._asked.append(request)
            self._changed.notify_all()

    def check(self, request: Request) -> None:
        """Raise what `hand_in` would, but for how many wait."""
        if not request.ids:
            raise ConfigError("the prompt has no tokens; give some text", setting="prompt", given="", allowed="text")
        room = self._engine.context_tokens
        if len(request.ids) >= room:
            raise ContextError(
                f"the prompt has {len(request.ids)} tokens, the context reserved in the budget is {room}; shorten the "
                "prompt or raise `context_tokens`",
                setting="context_tokens",
                given=room,
                allowed=f"at least {len(request.ids) + 1} for this prompt",
            )

    @property
    def waiting(self) -> int:
        """Requests without a row."""
        return len(self._asked)

    @property
    def running(self) -> int:
        """Requests that are read or decoded."""
        return len(self._decoding) + (self._reading is not None)

    def wake(self) -> None:
        """Have the loop look at what was cancelled."""
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        """Take no more requests; `run` returns once those that there are have ended."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def cancel_all(self) -> None:
        """End everything before the next step."""
        with self._changed:
            for request in [*self._asked, *(text.request for text in self._texts())]:
                request.is_cancelled = True
            self._changed.notify_all()

    # -- the loop's thread --------------------------------------------------------------------------------------------

    def run(self, until_idle: bool = False) -> None:
        """Work until `close`, or until there is nothing to do."""
        while True:
            with self._changed:
                while not self._is_closed and not until_idle and not self._has_work:
                    self._changed.wait()
                if not self._has_work:
                    return
            with self._engine.turn():
                while self._has_work:
                    self.step()

    @property
    def _has_work(self) -> bool:
        return bool(self._asked or self._decoding or self._reading is not None)

    def step(self) -> None:
        """One piece of a prompt, or one token of every text that is decoded."""
        self._drop_cancelled()
        if self._reading is None:
            self._admit()
        if self._reading is not None and (not self._decoding or self._is_turn_of_reading()):
            with self._timed("reading", bool(self._decoding)):
                self._read(self._reading)
        elif self._decoding:
            with self._timed("decoding", self._reading is not None):
                self._decode()

    def _texts(self) -> list[_Text]:
        return [*self._decoding, *([self._reading] if self._reading is not None else [])]

    @contextmanager
    def _timed(self, what: str, are_both_wanted: bool) -> Iterator[None]:
        began = self._engine.now()
        try:
            yield
        finally:
            if are_both_wanted:
                self._seconds_of[what] += self._engine.now() - began

    def _is_turn_of_reading(self) -> bool:
        return self._seconds_of["reading"] <= self._seconds_of["decoding"]

    def _drop_cancelled(self) -> None:
        with self._changed:
            dropped = [request for request in self._asked if request.is_cancelled]
            for request in dropped:
                self._asked.remove(request)
        for request in dropped:
            self._say(request, End(Reason.CANCELLED, ""))
        for text in self._texts():
            if text.request.is_cancelled:
                self._leave(text, Reason.CANCELLED)

    def _admit(self) -> None:
        """The next request that waits gets a row, where one is free."""
        rows = self._usable_rows()
        with self._changed:
            if not self._asked or not rows.has_free:
                return
            request = self._asked.popleft()
        try:
            text = _Text(
                request, self._sampler(request), TextStream(self._tokenizer, request.ids, request.sampling.stop)
            )
        except Exception as error:
            self._say(request, End(Reason.FAILED, "", error))
            return
        text.row, request.reused_tokens = rows.take(request.ids)
        request.begun = self._engine.now()
        self._reading = text
        self._seconds_of = {"reading": 0.0, "decoding": 0.0}

    def _usable_rows(self) -> Rows:
        """The rows; new ones where somebody else has used the cache's place, and nothing is under way."""
        if self._rows is None or (self._rows.is_lost and not self._texts()):
            self._rows = Rows(self._model, self._engine)
        return self._rows

    def _sampler(self, request: Request) -> Sampler:
        config = generation_config(self._model, self._tokenizer, request.sampling, self._engine.context_tokens)
        return Sampler(self._model, config, request.sampling, request.ids, request.logprobs, request.constraint)

    # -- passes -------------------------------------------------------------------------------------------------------

    def _read(self, text: _Text) -> None:
        """The next piece of a prompt; after the last one the first token."""
        rows, ids, begin = self._usable_rows(), text.request.ids, text.read
        if not begin:
            begin = text.request.reused_tokens
        end = min(len(ids), begin + self._engine.config.prefill_tokens)
        try:
            logits = rows.read(text.row, ids[begin:end])
        except Exception as error:
            self._fail(text, error)
            return
        text.read = end
        if end < len(ids):
            return
        self._reading = None
        self._join(text)
        self._take(text, logits)

    def _join(self, text: _Text) -> None:
        """Decode it with the others from now on."""
        rows, to = self._usable_rows(), len(self._decoding)
        rows.exchange(text.row, to)
        text.row = to
        self._decoding.append(text)

    def _decode(self) -> None:
        rows, texts = self._usable_rows(), list(self._decoding)
        tokens = [text.request.new_ids[-1] for text in texts]
        try:
            logits = rows.decode(tokens)
        except Exception as error:
            self._decode_each(texts, error)
            return
        for text, own in zip(texts, logits, strict=True):
            self._take(text, own)

    def _decode_each(self, texts: Sequence[_Text], error: Exception) -> None:
        """A pass has failed: make it again for every row, and let those go on that can."""
        if len(texts) == 1:
            self._fail(texts[0], error)
            return
        _log.warning("a step of %d texts has failed and is made again for each of them: %s", len(texts), error)
        rows, found = self._usable_rows(), list[tuple[_Text, torch.Tensor | Exception]]()
        for text in texts:
            try:
                found.append((text, rows.decode_alone(text.row, text.request.new_ids[-1])))
            except Exception as own:
                found.append((text, own))
        for text, outcome in found:  # who leaves moves the others' rows, so not before
            if isinstance(outcome, Exception):
                self._fail(text, outcome)
            else:
                self._take(text, outcome)

    def _take(self, text: _Text, logits: torch.Tensor) -> None:
        """logits [V]: choose a token, say it, see whether it was the last."""
        request = text.request
        try:
            token, logprob, top = text.sampler.choose(logits)
            request.new_ids.append(token)
            is_end = token in self._ends and not request.sampling.ignores_end
            shown = "" if is_end else text.stream.push(token)
        except Exception as error:
            self._fail(text, error)
            return
        if len(request.new_ids) == 1:
            request.first = self._engine.now()
        self._say(request, Piece(token, shown, logprob, top))
        if is_end:
            self._leave(text, Reason.END)
        elif text.stream.found_stop:
            self._leave(text, Reason.STOP)
        elif len(request.new_ids) >= request.sampling.max_new_tokens or self._is_full(text):
            self._leave(text, Reason.LENGTH)

    def _is_full(self, text: _Text) -> bool:
        return len(text.request.ids) + len(text.request.new_ids) >= self._engine.context_tokens

    def _fail(self, text: _Text, error: Exception) -> None:
        self._leave(text, Reason.FAILED, error)

    def _leave(self, text: _Text, reason: Reason, error: Exception | None = None) -> None:
        """Its row is free; what it has written stays there, for whoever goes on with it."""
        rows = self._usable_rows()
        if text is self._reading:
            self._reading = None
        elif text in self._decoding:
            last = self._decoding.pop()
            if last is not text:
                rows.exchange(text.row, last.row)
                self._decoding[text.row] = last
                last.row, text.row = text.row, last.row
        rows.free(text.row, is_whole=reason is not Reason.FAILED)
        self._say(text.request, End(reason, text.stream.flush(), error))

    def _say(self, request: Request, what: Piece | End) -> None:
        if isinstance(what, End):
            request.ended = self._engine.now()
        try:
            request.hear(what)
        except Exception:
            _log.exception("whoever asked cannot hear the answer; the request is given up")
            request.is_cancelled = True


class _Text:
    """A request with a row."""

    def __init__(self, request: Request, sampler: Sampler, stream: TextStream) -> None:
        self.request = request
        self.sampler = sampler
        self.stream = stream
        self.row = -1
        self.read = 0
        """Tokens of the prompt that have been read."""
