"""Reads the texts on which quality is measured, and files with lines of JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from smoe.errors import ConfigError
from smoe.models.files import DEMO_FOLDER

_ALLOWED = {"questions": "a .jsonl file with 'prompt' and 'answer' in every line"}


def read_documents(path: Path | None, setting: str = "text") -> list[str]:
    """Return the documents of a text file (one) or of a `.jsonl` file (`text` or `prompt` of each line). `path`: None:
    the demo's stories. Errors name the `setting` that contains the file's path."""
    path = path or DEMO_FOLDER / "stories.jsonl"
    if path.suffix != ".jsonl":
        return [_read(path, setting)]
    documents = [record.get("text") or record.get("prompt") for record in records(path, setting)]
    if not all(isinstance(document, str) and document for document in documents):
        why = f"a line of {path} has no text; every line must have a string under 'text' or 'prompt'"
        raise unusable(path, setting, why)
    return [document for document in documents if document]


def records(path: Path, setting: str) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file with one JSON object in each line."""
    for number, line in enumerate(_read(path, setting).splitlines(), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            why = f"line {number} of {path} is no JSON ({error.msg}); every line must be a JSON object"
            raise unusable(path, setting, why) from error
        if not isinstance(record, dict):
            raise unusable(path, setting, f"line {number} of {path} is no JSON object; every line must be one")
        yield record


def _read(path: Path, setting: str) -> str:
    try:
        text = path.read_text(encoding="utf8")
    except (OSError, UnicodeDecodeError) as error:
        raise unread(path, setting, error) from error
    if not text.strip():
        raise unusable(path, setting, f"`{setting}={path}` is empty; give a file with some text")
    return text


def unread(path: Path, setting: str, error: OSError | UnicodeDecodeError) -> ConfigError:
    """Return the error for a user's file that cannot be read, with the reason and what to give instead."""
    why = error.strerror or error if isinstance(error, OSError) else f"its byte {error.start} is not UTF-8"
    return unusable(path, setting, f"cannot read `{setting}={path}`: {why}; give a file with text in UTF-8")


def unusable(path: Path, setting: str, why: str) -> ConfigError:
    """Return the error for a user's file with unsuitable content. `why`: the reason and what to change."""
    return ConfigError(
        why, setting=setting, given=str(path), allowed=_ALLOWED.get(setting, "a file with text in UTF-8")
    )
