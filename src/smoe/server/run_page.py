"""The browser page during a run of the command line: for this machine only, on a thread of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI

from smoe.report.watched import Watched
from smoe.runtime.engine import Engine
from smoe.server.guard import Guard
from smoe.server.listening_socket import address_of, bound
from smoe.server.protocol import spoken_by
from smoe.server.settings import ServerConfig
from smoe.server.watching import LOOK_SECONDS, Watching, add_page

_START_SECONDS = 10.0


class RunPage:
    """The browser page of one run."""

    def __init__(self, address: str, watching: Watching) -> None:
        self.address = address
        self.watching = watching

    def say(self, text: str) -> None:
        """Add text to the generated text that the page shows."""
        self.watching.say(text)

    def wait(self, seconds: float) -> bool:
        """Wait until a browser opens the page. Return False if none does so within `seconds`."""
        return self.watching.has_begun.wait(seconds)


@contextmanager
def shown(engine: Engine, name: str, port: int = 0) -> Iterator[RunPage]:
    """Yield the page of an engine, which is served during the `with` block. Afterwards open pages show that the run is
    over.

    Raises `ConfigError` if the port is in use.
    """
    config, phase = ServerConfig(port=port), {"running": 1}
    is_over = threading.Event()
    about = {"name": name, "talks": None, "context": engine.context_tokens}
    watching = Watching(Watched(engine), about, lambda: dict(phase), is_over.is_set)
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    guarded = Guard(app, config, frozenset(add_page(app, watching)), lambda path, status: None)
    with bound(config) as bound_socket:
        server = uvicorn.Server(spoken_by(guarded))
        thread = threading.Thread(target=server.run, args=([bound_socket],), name="smoe-page", daemon=True)
        thread.start()
        try:
            _wait_until_started(server)
            yield RunPage(address_of(bound_socket), watching)
        finally:
            phase |= {"running": 0, "over": 1}
            if watching.is_watched:
                time.sleep(3 * LOOK_SECONDS)  # one more look, which shows the end
            is_over.set()
            server.should_exit = True
            thread.join(_START_SECONDS)


def _wait_until_started(server: uvicorn.Server) -> None:
    end = time.monotonic() + _START_SECONDS
    while not server.started and time.monotonic() < end:
        time.sleep(0.01)
