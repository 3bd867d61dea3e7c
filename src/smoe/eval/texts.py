"""Text that quality is measured on, and lines of JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from smoe.errors import ConfigError
from smoe.models.files import DEMO_FOLDER


def read_documents(path: Path | None) -> list[str]:
    """Documents of a text file (one) or a `.jsonl` file (`text` or `prompt` of each line); None: the demo's stories."""
    path = path or DEMO_FOLDER / "stories.jsonl"
    if path.suffix != ".jsonl":
        return [_read(path)]
    documents = [record.get("text") or record.get("prompt") for record in records(path)]
    if not all(isinstance(document, str) and document for document in documents):
        raise ConfigError(f"a line of {path} has no text; every line must have a string under 'text' or 'prompt'")
    return [document for document in documents if document]


def records(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file with one a line."""
    for number, line in enumerate(_read(path).splitlines(), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ConfigError(f"line {number} of {path} is no JSON: {error.msg}") from error
        if not isinstance(record, dict):
            raise ConfigError(f"line {number} of {path} is no JSON object")
        yield record


def _read(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    if not text.strip():
        raise ConfigError(f"{path} is empty")
    return text
