"""Reads the JSON files of a checkpoint. They must be UTF-8 and of limited size, and every error contains the file's
name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from smoe.errors import CheckpointError

_MAX_BYTES = 100 * 2**20
"""The limit that safetensors sets for a header. An index of a million tensors takes as much."""


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raise `CheckpointError` if the file is too large or contains no JSON object."""
    check_regular(path)
    size = path.stat().st_size
    if size > _MAX_BYTES:
        raise CheckpointError(
            f"{path} has {size} bytes, more than such a file of a checkpoint ever has; download it again"
        )
    return parse_object(path.read_bytes(), path)


def parse_object(data: bytes, path: Path) -> dict[str, Any]:
    """Return the JSON object in `data`. Errors name the file `path`, from which the data come."""
    try:
        found = json.loads(data.decode("utf-8"))
    except RecursionError as error:
        raise CheckpointError(f"{path} is corrupt: it is nested too deeply; download it again") from error
    except ValueError as error:  # includes decoding errors and numbers of thousands of digits
        raise CheckpointError(f"{path} is corrupt: {error}; download it again") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} is corrupt: it is not a JSON object; download it again")
    return found


def check_regular(path: Path) -> None:
    """Raise `CheckpointError` unless `path` is a regular file or a link to one. (Opening a pipe, for example, could
    block.)"""
    if not path.is_file():
        if path.exists():
            raise CheckpointError(f"{path} is not an ordinary file; download the checkpoint again")
        raise CheckpointError(f"{path} is missing, or is a link to a missing file; download the checkpoint again")
