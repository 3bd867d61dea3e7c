"""The page at `/` and its events: the state of a running engine, for all open pages.

    /        the page: files of `page/`, nothing from elsewhere
    /watch   server-sent events: `model` once (what does not change), then `look`, up to ten a second (what has changed)

One look serves all open pages; without pages the engine is not watched. A look takes one call on the server's event
loop, and another for each page: whenever this thread runs, the engine's thread may have to wait for a core.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from starlette.responses import FileResponse, Response, StreamingResponse

from smoe.report.watched import Watched
from smoe.server.events import PATIENCE_SECONDS, STILL_HERE, event

_log = logging.getLogger(__name__)
PAGE = Path(__file__).parent / "page"
LOOK_SECONDS = 0.1
_MOST_BEHIND = 100
"""How many messages a page may be behind. A slower page is disconnected, and connects again."""
_KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


class Watching:
    """Observes one engine for all open pages. Only `say` may be called outside the server's thread."""

    def __init__(
        self, watched: Watched, about: dict[str, Any], state: Callable[[], dict[str, Any]], is_over: Callable[[], bool]
    ) -> None:
        """`about`: values for the page in addition to the engine's description. `state` returns further values that
        change; `is_over` whether the run has ended."""
        self.looks = 0
        """The number of messages with changes so far."""
        self.has_begun = threading.Event()
        """An event that is set when a page is opened for the first time."""
        self._watched, self._about, self._state, self._is_over = watched, about, state, is_over
        self._queues: set[asyncio.Queue[bytes | None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._quiet = 0
        """The number of looks (collections of changes) since the last message was sent."""
        self._texts: deque[str] = deque()
        self._text = ""
        self._sent_state: dict[str, Any] = {}

    @property
    def is_watched(self) -> bool:
        """Whether a page is open."""
        return bool(self._queues)

    def say(self, text: str) -> None:
        """Add text to the generated text of a run, which the page shows in place of a chat. Any thread may call
        this."""
        self._texts.append(text)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the messages for one page, until the run is over or the page closes."""
        queue: asyncio.Queue[bytes | None] = asyncio.Queue(_MOST_BEHIND)
        if not self._queues:
            self._watched.begin()
            self._timer = asyncio.get_running_loop().call_later(LOOK_SECONDS, self._look_on)
        self._look()  # the other pages now have everything that this one gets at once
        self._queues.add(queue)
        self.has_begun.set()
        model, whole = event(self._about | self._watched.described(), "model"), event(self._whole(), "look")
        try:
            yield model
            yield whole
            while True:
                data = await queue.get()
                if data is None:
                    return
                yield data
        finally:
            self._queues.discard(queue)
            if not self._queues and self._timer is not None:
                self._timer.cancel()
                self._timer = None
                self._watched.end()

    def _whole(self) -> dict[str, Any]:
        """Return the complete state of the engine, for a page that has just been opened."""
        tiers = [pair for place in enumerate(self._watched.tiers) for pair in place if place[1]]
        return {"tiers": tiers} | self._sent_state | ({"text": self._text} if self._text else {})

    def _look_on(self) -> None:
        try:
            self._look()
        except Exception:
            _log.exception("the page can no longer show the engine; nothing else is affected")
            self._tell(None)
            return
        if self._is_over():
            self._tell(None)
        else:
            self._timer = asyncio.get_running_loop().call_later(LOOK_SECONDS, self._look_on)

    def _tell(self, data: bytes | None) -> None:
        for queue in self._queues:
            _put(queue, data)

    def _look(self) -> None:
        """Collect the changes of the engine's state since the last message, and send them to all pages."""
        self.looks += 1
        found = self._watched.look()
        state = self._state()
        found |= {name: value for name, value in state.items() if self._sent_state.get(name) != value}
        self._sent_state = state
        news = "".join(self._texts.popleft() for _ in range(len(self._texts)))
        if news:
            self._text += news
            found["text"] = news
        self._quiet += 1
        if found or self._quiet * LOOK_SECONDS >= PATIENCE_SECONDS:
            self._quiet = 0
            self._tell(event(found, "look") if found else STILL_HERE)


def _put(queue: asyncio.Queue[bytes | None], data: bytes | None) -> None:
    """Queue a message for one page; a page that is too far behind is disconnected."""
    if queue.full():
        while not queue.empty():
            queue.get_nowait()
        data = None
    queue.put_nowait(data)


def add_page(app: FastAPI, watching: Watching) -> set[str]:
    """Add the page and its events to an application. Return the paths of the page's files, which need no key: the page
    itself asks the user for the key."""

    @app.get("/watch")
    async def watch() -> Response:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        return StreamingResponse(watching.events(), media_type="text/event-stream", headers=headers)

    files = {f"/{path.name}": path for path in sorted(PAGE.iterdir()) if path.suffix in _KINDS}
    files["/"] = files.pop("/index.html")
    for address, path in files.items():
        app.add_api_route(address, _shows(path), methods=["GET", "HEAD"], include_in_schema=False)
    return set(files)


def _shows(path: Path) -> Callable[[], Any]:
    async def show() -> Response:
        return FileResponse(path, media_type=_KINDS[path.suffix], headers=HEADERS)

    return show
