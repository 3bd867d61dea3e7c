"""The libraries that running a model takes: seconds of imports, which make 390,000 objects and hardly any garbage."""

from __future__ import annotations

import gc


def import_libraries() -> None:
    """Import them without Python's search for garbage, which is a fifth of what it takes (docs/log.md)."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        import smoe.cli.session  # noqa: F401
    finally:
        if was_enabled:
            gc.enable()
