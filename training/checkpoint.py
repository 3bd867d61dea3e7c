"""Checkpoints that are whole or absent: written under a temporary name, synced, then renamed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Write `state` so that `path` always holds a complete checkpoint, the old one or the new one."""
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def load_checkpoint(path: Path) -> dict[str, Any] | None:
    """The checkpoint at `path`, or None when there is none yet."""
    if not path.exists():
        return None
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return state
