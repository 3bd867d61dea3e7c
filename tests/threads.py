"""The threads of engines."""

from __future__ import annotations

import threading


def engine_threads() -> set[threading.Thread]:
    """Those that live, once whatever engines of earlier tests were collected meanwhile have been given back."""
    for thread in threading.enumerate():
        if thread.name == "smoe-release":
            thread.join()
    return {thread for thread in threading.enumerate() if thread.name.startswith("smoe-")}
