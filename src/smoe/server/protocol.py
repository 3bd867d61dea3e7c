"""How bytes of a connection become requests: by the parser that is tested, whatever else is installed."""

from __future__ import annotations

from typing import Any

import uvicorn


def spoken_by(app: Any, http: Any = "h11", **given: Any) -> uvicorn.Config:
    """An app's settings: HTTP/1.1 by h11 (a pinned requirement; uvicorn would take httptools where it is installed), no
    WebSockets, Python's own event loop; no log, which is ours.

    `http`: a protocol class of uvicorn's that parses with h11, in the place of its own."""
    return uvicorn.Config(
        app,
        http=http,
        ws="none",
        loop="asyncio",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        **given,
    )
