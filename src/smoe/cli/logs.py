"""Prints the package's log on stderr if the user requests it: `-v`, `-vv`, or SMOE_LOG=info. All loggers are below
`smoe`."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from smoe.errors import ConfigError

_LEVELS = ("debug", "info", "warning", "error")
_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class _ToStderr(logging.Handler):
    """A log handler that writes to the present stderr, which a progress bar replaces while it is shown."""

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError):  # a log that cannot be written, on a full disk, fails no command
            print(self.format(record), file=sys.stderr, flush=True)


@contextmanager
def logged(verbosity: int) -> Iterator[None]:
    """Show the package's log during the `with` block. `verbosity`: 1: information; 2: all messages; 0: the level in
    SMOE_LOG, or no messages.

    Raises `ConfigError` for an invalid level in SMOE_LOG.
    """
    level = _level(verbosity)
    if level is None:
        yield
        return
    logger, handler = logging.getLogger("smoe"), _ToStderr()
    handler.setFormatter(logging.Formatter(_FORMAT))
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


def _level(verbosity: int) -> int | None:
    if verbosity > 0:
        return logging.INFO if verbosity == 1 else logging.DEBUG
    asked = os.environ.get("SMOE_LOG", "").strip().lower()
    if not asked:
        return None
    if asked not in _LEVELS:
        levels = ", ".join(_LEVELS)
        message = f"SMOE_LOG is {asked!r}; set it to one of: {levels}, or unset it"
        raise ConfigError(message, setting="SMOE_LOG", given=asked, allowed=levels)
    return int(getattr(logging, asked.upper()))
