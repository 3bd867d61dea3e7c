"""The log of the package on stderr, for users who ask for it: `-v`, `-vv`, or SMOE_LOG=info. Everything logs under
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
    """Writes to stderr as it is at the moment: a bar takes its place while it is shown."""

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError):  # a log that cannot be written, on a full disk, fails no command
            print(self.format(record), file=sys.stderr, flush=True)


@contextmanager
def logged(verbosity: int) -> Iterator[None]:
    """Inside, the package's log is shown: 1 for information, 2 for all of it; 0: what SMOE_LOG says, else nothing.

    Raises `ConfigError` for a level that SMOE_LOG cannot mean.
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
