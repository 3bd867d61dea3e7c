"""Handles Ctrl-C while smoe's modules are being imported: the process prints one line and exits with code 130.

    during Python's own start      a traceback
    during smoe's imports          one line, by `leave_on_interrupt`
    once the command line runs     an orderly end, by `cli/interrupts.py`

Like `safe_path.py`, this module imports only modules that Python has already loaded.
"""

import _signal  # type: ignore[import-not-found]  # `signal` without its enumerations, which take longer than all of this
import os
import sys


def leave_on_interrupt() -> None:
    """Make Ctrl-C end the process at once from now on, unless it is ignored."""
    if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
        _signal.signal(_signal.SIGINT, _leave)


def _leave(number: int, frame: object) -> None:
    """Print "interrupted" and exit with code 128 + `number`. `os.write` is used because other modules may be half
    imported."""
    try:
        if sys.stderr is not None:
            os.write(2, b"interrupted\n")
    finally:
        os._exit(128 + number)
