"""`--plot`: where a picture is drawn."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

from smoe.errors import ConfigError


def check_plot(path: Path) -> None:
    """Refuse before hours of work what could not be drawn after them."""
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise _no_plot(path, "; it must end in .png, .svg or .pdf")
    if not path.absolute().parent.is_dir():
        raise _no_plot(path, f"; there is no folder {path.absolute().parent}: make it, or give another")
    if path.is_dir() or not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise _no_plot(path, ", which cannot be written; give another file")
    if find_spec("matplotlib") is None:
        raise _no_plot(path, ", and a plot needs matplotlib: pip install matplotlib, or leave --plot out")


def _no_plot(path: Path, why: str) -> ConfigError:
    allowed = "a file that can be written and ends in .png, .svg or .pdf"
    return ConfigError(f"--plot is {str(path)!r}{why}", setting="plot", given=str(path), allowed=allowed)
