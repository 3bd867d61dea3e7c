"""Stores a measured result. If it cannot be stored, the user gets a warning before the measurement, and the result is
printed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from smoe.cli.console import warn_once
from smoe.user_cache import PLACE, cache_folder, check_writable


class ResultDestination:
    """The folder in which a result will be stored. The object is made before a long measurement, and warns at once if
    the folder cannot be written."""

    def __init__(self) -> None:
        self.can_keep = True
        """Whether the folder was writable when this object was made."""
        try:
            check_writable()
        except OSError as error:
            self.can_keep = False
            self._say("will not be stored", error)

    def keep(self, save: Callable[[], Path]) -> Path | None:
        """Store a result by calling `save`. Return the path that `save` returns; None if storing failed."""
        try:
            return save()
        except OSError as error:
            self._say("was not stored", error)
            return None

    def _say(self, outcome: str, error: OSError) -> None:
        _warn(f"the result {outcome}", error)


def warn_if_unwritable() -> None:
    """Warn if compiled kernels and measurements will not be stored, so that every command makes them again."""
    try:
        check_writable()
    except OSError as error:
        _warn("compiled kernels and measurements are not stored, and every run makes them again", error)


def _warn(consequence: str, error: OSError) -> None:
    warn_once(
        PLACE,
        f"{consequence}, because nothing can be written in {cache_folder()} ({error.strerror or error}); set {PLACE} "
        "to a writable folder",
    )
