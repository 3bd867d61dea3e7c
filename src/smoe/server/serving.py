"""A model that is served: its decode loop runs on a thread of its own, and requests are converted to prompts."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar
from urllib.parse import quote

from fastapi import FastAPI
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from transformers import PreTrainedModel

from smoe import __version__
from smoe.errors import EngineStateError
from smoe.generation.library_settings import end_tokens
from smoe.generation.loop import DecodeLoop, Prefill
from smoe.generation.request import End, Piece, Request
from smoe.machine.native_heap import give_back_heap
from smoe.metrics import Counters
from smoe.models.finish_spec import position_limit
from smoe.runtime.engine import Engine
from smoe.server.api_errors import ApiError, busy, failed, over, problem_of, refused
from smoe.server.body import AskedFields, UnknownFields, asked_of, body_of
from smoe.server.fields import UP_TO_THE_CONTEXT
from smoe.server.grammar import Grammars
from smoe.server.guard import release_body
from smoe.server.image_prompts import ImagePrompts, why_no_images
from smoe.server.meters import Meters
from smoe.server.model_health import ModelHealth
from smoe.server.prompts import Prompts
from smoe.server.request_lines import note_asked
from smoe.server.settings import ServerConfig
from smoe.server.texts import Bell, TextRequest, Texts
from smoe.server.token_text import TokenTexts

_log = logging.getLogger(__name__)
IGNORED_FIELDS = "x-smoe-ignored-fields"
"""The response header that lists ignored fields."""
_MOST_LISTED = 20
"""The maximum number of field names in the response header."""
_T = TypeVar("_T")
_A = TypeVar("_A", bound=AskedFields)


class Serving:
    """One served model. Call `start` first, then handle requests, then call `close`."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        name: str,
        config: ServerConfig,
        warn: Callable[[str], None] = _log.warning,
    ) -> None:
        """`warn` prints for the user who started the server."""
        self.model, self.name, self.config = model, name, config
        self.engine: Engine = model.offload  # type: ignore[assignment]
        self.began = int(time.time())
        self.vocabulary = int(model.config.get_text_config().vocab_size)
        positions = position_limit(model.config)
        self._is_whole_context = positions is not None and self.engine.context_tokens >= positions
        self.ends = frozenset(end_tokens(model, tokenizer))
        self.prompts = Prompts(
            tokenizer,
            self.vocabulary,
            self.engine.context_tokens,
            parses_control_tokens=config.parses_control_tokens,
            images=_image_prompts(model, tokenizer, config),
            why_no_images=why_no_images(model.config.model_type),
        )
        self.tokens = TokenTexts(tokenizer)
        self.grammars = Grammars(tokenizer, self.vocabulary, sorted(self.ends))
        self.tokenizer = tokenizer
        self.fingerprint = _fingerprint(name, self.engine)
        self._before = self.engine.stats()
        """The engine's counters before the first request."""
        self._places = self.engine.config.max_sequences
        self._loop = DecodeLoop(model, tokenizer, self._places + config.max_waiting)
        self.meters = Meters(self.engine, self._loop, lambda: self.counters)
        self._bell = Bell()
        self._asked: weakref.WeakSet[Texts] = weakref.WeakSet()
        self.health = ModelHealth()
        self._unknown = UnknownFields(config.is_strict, warn)
        self._is_ending = self._has_read = False
        self._thread = threading.Thread(target=self._run, name="smoe-decode", daemon=True)
        self._preparing = ThreadPoolExecutor(1, "smoe-prompts")
        """The only thread that makes prompts: tokenizers are not thread-safe, and a long prompt must not delay
        responses."""

    def start(self) -> None:
        """Start the decode loop."""
        self._before = self.engine.stats()
        self._thread.start()

    def give_back_memory(self) -> None:
        """Return the heap's free pages to the system, if a body has been read since the last call."""
        if self._has_read and not self._is_ending:
            self._has_read = False
            self._preparing.submit(give_back_heap)

    def close(self) -> None:
        """Cancel all texts, and wait until the decode loop has ended."""
        self._is_ending = True
        self._loop.close()
        self.end_now()
        if self._thread.ident is not None:
            self._thread.join()
        self._preparing.shutdown()

    def end_soon(self) -> None:
        """Accept no more requests; texts in progress continue."""
        self._is_ending = True
        self._loop.close()

    def end_now(self) -> None:
        """Cancel all texts, and the rendering of a chat template that does not end."""
        self._loop.cancel_all()
        self.prompts.close()

    @property
    def state(self) -> str:
        """The state of the server: ok, ending or failed."""
        return "failed" if self.failure is not None else "ending" if self._is_ending else "ok"

    @property
    def failure(self) -> Exception | None:
        """The error because of which the model has failed; None if it works."""
        return self.health.failure

    @property
    def counters(self) -> Counters:
        """The engine's counters of all requests: without the work before `start`, such as the first pass."""
        counters: Counters = self.engine.stats() - self._before
        return counters

    @property
    def counters_of_one_text(self) -> Counters:
        """The engine's counters of the decode steps with one text. The server must be closed."""
        return self._loop.counters_of_one_text

    @property
    def waited_share(self) -> float | None:
        """The fraction of `busy_seconds` in which the decode loop was ready to run without a core; None if no request
        has waited for a token."""
        return self._loop.waited_seconds / self.busy_seconds if self.busy_seconds else None

    @property
    def running(self) -> int:
        """The number of texts in prefill or decode."""
        return self._loop.running

    @property
    def waiting(self) -> int:
        """The number of texts in the queue."""
        return self._loop.waiting

    @property
    def prefill(self) -> Prefill | None:
        """The state of the prefill in progress, or None."""
        return self._loop.prefill

    @property
    def busy_seconds(self) -> float:
        """Seconds during which at least one request waited for a token."""
        return self._loop.busy_seconds

    async def read(self, kind: type[_A], request: HttpRequest, work: Callable[[_A], _T]) -> _T:
        """Parse a request body, and return the result of `work` for it. Both are computed on the thread that makes
        prompts.

        This thread processes one request at a time, so requests that wait take only the memory of their bodies. Raises
        an `ApiError`.
        """
        self.refuse_if_ending()
        self._has_read = True
        try:
            data = [await body_of(request)]
            here = asyncio.get_running_loop()
            prepared = await here.run_in_executor(self._preparing, lambda: self._prepared(kind, data.pop(), work))
            _list_ignored(request, prepared[1])
            return prepared[0]
        finally:
            release_body(request.scope)

    def _prepared(self, kind: type[_A], data: bytes, work: Callable[[_A], _T]) -> tuple[_T, list[str]]:
        """Return the result of `work` for a parsed body, and the names of the body's ignored fields."""
        asked, ignored = asked_of(kind, data, self._unknown)
        asked.check_unsupported()
        for place, what in asked.ignored_parts.items():
            if self.config.is_strict:
                message = f"'{place}' is not supported, and this server refuses unsupported fields; leave it out"
                raise refused(message, place, "unsupported_parameter")
            self._unknown.warn_of(what)
            ignored.append(place)
        if asked.asked_model is not None:
            self.check_name(asked.asked_model, asked.tags)
        try:
            return work(asked), ignored
        except Exception as error:
            problem = problem_of(error, asked.settings, self._is_whole_context)
        raise problem  # outside of the `except`: the error would keep what was parsed in memory

    def ask(self, wanted: Sequence[TextRequest], fields: Mapping[str, str], is_streamed: bool) -> Texts:
        """Pass the texts of a request to the decode loop. If the response is not streamed, only the end of a text wakes
        the server's thread.

        Raises an `ApiError`, in which `fields` gives the names of settings.
        """
        self.refuse_if_ending()
        self._check_room(len(wanted))
        try:
            texts = Texts(self._loop, self._bell, wanted, self._on_event, is_streamed)
        except Exception as error:
            raise problem_of(error, fields, self._is_whole_context) from error
        self._asked.add(texts)
        note_asked(texts)
        return texts

    def _check_room(self, texts: int) -> None:
        """Raise an `ApiError` if a request has more texts than the server ever accepts, or than the queue has room for
        now."""
        places, queue = self._places, self.config.max_waiting
        if texts > places + queue:
            message = (
                f"prompts times 'n' are {texts} texts; this server takes at most {places + queue} at once: {places} "
                f"decoded together and a queue of {queue}"
            )
            raise refused(message, "n")
        room = places + queue - self.running - self.waiting
        if texts > room:
            wanted = "the queue is full" if texts == 1 else f"{texts} texts requested, room for {max(0, room)}"
            raise busy(f"{wanted}; try again later")

    def check(self, wanted: TextRequest, fields: Mapping[str, str]) -> None:
        """Raise the `ApiError` that `ask` would raise for an empty or too long prompt."""
        try:
            self._loop.check(Request(wanted.ids, wanted.sampling, lambda what: None))
        except Exception as error:
            raise problem_of(error, fields, self._is_whole_context) from error

    def refuse_if_ending(self) -> None:
        """Raise an `ApiError` if the model has failed or the server is shutting down."""
        if self.health.lost is not None:
            raise failed(self.health.lost)
        if self._is_ending:
            raise over()

    def check_name(self, model: str, tags: Sequence[str] = ("",)) -> None:
        """Raise an `ApiError` if a request names another model than the served one. `tags`: the suffixes that may
        follow the name."""
        if model not in [self.name + tag for tag in tags]:
            message = f"the model {model[:100]!r} does not exist here; this server serves {self.name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    def limit(self, ids: Sequence[int], given: int | None) -> int:
        """Return the maximum number of new tokens after a prompt: the requested number, or as many as the context has
        room for, at least 1."""
        return max(1, self.engine.context_tokens - len(ids)) if given in (None, UP_TO_THE_CONTEXT) else given

    def _run(self) -> None:
        try:
            self._loop.run(after_step=self._bell.ring)
        except Exception as error:
            _log.exception("the decode loop failed; no request is answered any more")
            self.health.lose(error)
            self._loop.close()
            self._bell.say(self._give_up)

    def _on_event(self, request: Request, what: Piece | End) -> None:
        """Count an event of a text for the metrics and the model's health. The decode loop's thread calls this
        method."""
        self.meters.on_event(request, what)
        if isinstance(what, End):
            self.health.note(what)

    def _give_up(self) -> None:
        for texts in list(self._asked):
            texts.give_up(EngineStateError("the decode loop has failed"))
        self._bell.ring()


def _image_prompts(model: PreTrainedModel, tokenizer: Any, config: ServerConfig) -> ImagePrompts | None:
    """Return the reader of images in messages; None if the model was loaded without its image encoder."""
    engine: Engine = model.offload  # type: ignore[assignment]
    if not engine.config.images:
        return None
    return ImagePrompts(model, tokenizer, config.image_folder, config.max_body_bytes)


def _fingerprint(name: str, engine: Engine) -> str:
    """Return a hash of all that determines a response except the request: the version, the model and the settings."""
    decides = (name, __version__, engine.arithmetic, sorted(map(str, engine.config.lossy)))
    return "smoe_" + hashlib.sha256(repr(decides).encode()).hexdigest()[:12]


def _list_ignored(request: HttpRequest, names: Sequence[str]) -> None:
    """Store the names of a request's ignored fields, for a header of its response."""
    request.state.ignored_fields = names


def add_post(app: FastAPI, path: str, respond: Callable[[HttpRequest], Awaitable[Response]]) -> None:
    """Add a path whose responses name the request's ignored fields in a header."""

    @app.post(path)
    async def answered(request: HttpRequest) -> Response:
        response = await respond(request)
        _add_ignored(request, response)
        return response


def _add_ignored(request: HttpRequest, response: Response) -> None:
    """Add the header that lists the request's ignored fields, if there are any."""
    names = getattr(request.state, "ignored_fields", ())
    if names:
        more = [f"and {len(names) - _MOST_LISTED} more"] if len(names) > _MOST_LISTED else []
        response.headers[IGNORED_FIELDS] = ",".join(quote(name, safe=" []") for name in [*names[:_MOST_LISTED], *more])
