"""Ctrl-C before the command line is there to answer it: one line and exit code 130, whatever is being imported.

    Python's own start | smoe/__init__.py, the command line's imports | cli/interrupts.py
    a traceback        | one line, by `leave_on_interrupt`            | an end in order

Like `safe_path.py` this module imports only what is loaded by then.
"""

import _signal  # type: ignore[import-not-found]  # `signal` without its enumerations, which take longer than all of this
import os
import sys


def leave_on_interrupt() -> None:
    """From now on a Ctrl-C ends the process at once. One that is to be ignored stays ignored."""
    if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
        _signal.signal(_signal.SIGINT, _leave)


def _leave(number: int, frame: object) -> None:
    """No library is asked to write: it may be what was cut."""
    try:
        if sys.stderr is not None:
            os.write(2, b"interrupted\n")
    finally:
        os._exit(128 + number)
