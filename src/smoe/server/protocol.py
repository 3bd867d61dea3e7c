"""uvicorn's settings for HTTP. h11 always parses HTTP, because only h11 is tested here, even if another parser is
installed."""

from __future__ import annotations

from typing import Any

import uvicorn


def spoken_by(app: Any, http: Any = "h11", **given: Any) -> uvicorn.Config:
    """Return uvicorn's settings for an application: HTTP/1.1 by h11 (uvicorn would use httptools where installed), no
    WebSockets, Python's event loop, and none of uvicorn's own logging.

    `http`: a protocol class that replaces uvicorn's h11 protocol.
    """
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
