"""The user's cache folder, where measurements are stored from one command to the next: profile, prices, tunings.

It is never needed: where it cannot be written, what was measured is shown and not remembered.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from smoe.whole_file import whole_file

PLACE = "XDG_CACHE_HOME"
"""The environment variable that says where the folder lies, on every system."""

_log = logging.getLogger(__name__)


def cache_folder() -> Path:
    """`smoe` in the folder that the user, or else the system, has for caches; it need not exist."""
    if os.environ.get(PLACE):
        base = Path(os.environ[PLACE])
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    elif sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA", str(Path.home() / "AppData" / "Local")))
    else:
        base = Path.home() / ".cache"
    return base / "smoe"


def check_writable() -> None:
    """Raises `OSError` where nothing can be stored: before a minute of measuring, not after it."""
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass


def of_model(kind: str, folder: Path) -> Path:
    """The file of something about the model in `folder`; `kind` names the sort of thing."""
    key = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]
    return cache_folder() / kind / f"{key}.json"


def read_stored(path: Path, form: int) -> dict[str, Any] | None:
    """What was stored in a file under the number `format`, without it; None where there is nothing of that format."""
    try:
        stored = json.loads(path.read_text(encoding="utf8"))
    except (OSError, ValueError):
        return None
    return stored if isinstance(stored, dict) and stored.pop("format", None) == form else None


def keep(path: Path, content: dict[str, Any]) -> Path:
    """Write an object to a file of the folder, whole or not at all; returns the path. Raises `OSError`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as file:
        file.write((json.dumps(content, indent=2) + "\n").encode())
    _log.info("stored %s", path)
    return path
