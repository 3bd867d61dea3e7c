"""`--plot`: where a picture is drawn."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

from smoe.errors import ConfigError

_FILE, _FOLDER = "a file that can be written and ends in .png, .svg or .pdf", "a folder that can be written"
_NEEDS_LIBRARY = ", and a plot needs matplotlib: pip install matplotlib, or leave --plot out"


def check_plot(path: Path) -> None:
    """Refuse before hours of work what could not be drawn after them."""
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise _no_plot(path, "; it must end in .png, .svg or .pdf")
    if not path.absolute().parent.is_dir():
        raise _no_plot(path, f"; there is no folder {path.absolute().parent}: make it, or give another")
    if path.is_dir() or not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise _no_plot(path, ", which cannot be written; give another file")
    if find_spec("matplotlib") is None:
        raise _no_plot(path, _NEEDS_LIBRARY)


def check_plot_folder(path: Path) -> None:
    """The same for a folder that several pictures go to; it is made where it is not there."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _no_plot(path, f", where no folder can be made: {error.strerror}; give another", _FOLDER) from error
    if not os.access(path, os.W_OK):
        raise _no_plot(path, ", which cannot be written; give another folder", _FOLDER)
    if find_spec("matplotlib") is None:
        raise _no_plot(path, _NEEDS_LIBRARY, _FOLDER)


def _no_plot(path: Path, why: str, allowed: str = _FILE) -> ConfigError:
    return ConfigError(f"--plot is {str(path)!r}{why}", setting="plot", given=str(path), allowed=allowed)
