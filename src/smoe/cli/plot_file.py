"""Checks the files of `--plot` and `--out`, before the work for them."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryFile

from smoe.errors import ConfigError


def check_plot(path: Path) -> None:
    """Raise `ConfigError` if the picture's file could not be written. Called before hours of measurements."""
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise _no_plot(path, "its name must end in .png, .svg or .pdf")
    if not path.absolute().parent.is_dir():
        raise _no_plot(path, f"the folder {path.absolute().parent} does not exist: create it, or give another")
    if path.is_dir() or not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise _no_plot(path, "it cannot be written; give another file")
    if not _can_draw():
        raise _no_plot(path, "a plot needs matplotlib: run pip install matplotlib, or leave --plot out")


def check_folder(path: Path, setting: str = "out") -> None:
    """Raise `ConfigError` if the folder for pictures cannot be used. It need not exist yet. Called before the
    measurements."""
    place = path if path.exists() else path.absolute().parent
    if not place.is_dir():
        why = (
            "it is a file; give a folder"
            if path.exists()
            else (f"the folder {place} does not exist; create it, or give another")
        )
        raise _no_folder(path, why, setting)
    if not _can_draw():
        raise ConfigError("pictures need matplotlib: pip install matplotlib")
    try:
        with TemporaryFile(dir=place):
            pass
    except OSError as error:
        why = f"nothing can be written in {place} ({error.strerror or error}); give another folder"
        raise _no_folder(path, why, setting) from error


def _can_draw() -> bool:
    return find_spec("matplotlib") is not None


def _no_folder(path: Path, why: str, setting: str) -> ConfigError:
    allowed = "a folder that can be written"
    return ConfigError(
        f"the folder for pictures, {str(path)!r} (`{setting}`), cannot be used: {why}",
        setting=setting,
        given=str(path),
        allowed=allowed,
    )


def _no_plot(path: Path, why: str) -> ConfigError:
    allowed = "a file that can be written and ends in .png, .svg or .pdf"
    return ConfigError(
        f"the plot cannot be written to {str(path)!r} (`plot`): {why}", setting="plot", given=str(path), allowed=allowed
    )
