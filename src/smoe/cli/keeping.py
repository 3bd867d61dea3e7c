"""Remembering what a command has measured; where that cannot be: a warning before the work, and the result."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from smoe.cli.console import warn
from smoe.user_cache import PLACE, cache_folder, check_writable


class ResultDestination:
    """Made before a long measurement: says at once where its result will be shown but not remembered."""

    def __init__(self) -> None:
        self._is_printed = False
        self.can_keep = True
        """Whether the folder could be written when this was made."""
        try:
            check_writable()
        except OSError as error:
            self.can_keep = False
            self._say("will not be", error)

    def keep(self, save: Callable[[], Path]) -> Path | None:
        """Where `save` has put a result; None where it could not."""
        try:
            return save()
        except OSError as error:
            self._say("was not", error)
            return None

    def _say(self, verb: str, error: OSError) -> None:
        if not self._is_printed:
            warn(
                f"the result {verb} stored: {cache_folder()} cannot be written ({error.strerror or error}); set "
                f"{PLACE} to a writable folder"
            )
        self._is_printed = True
