"""What quality is measured on: documents to predict and questions with short answers."""

from __future__ import annotations

import json
import string
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smoe.errors import ConfigError
from smoe.models.files import DEMO_FOLDER


@dataclass(frozen=True)
class Question:
    """A prompt whose right answer is known."""

    prompt: str
    answers: tuple[str, ...]


def read_documents(path: Path | None) -> list[str]:
    """Documents of a text file (one) or a `.jsonl` file (`text` or `prompt` of each line); None: the demo's stories."""
    path = path or DEMO_FOLDER / "stories.jsonl"
    if path.suffix != ".jsonl":
        return [_read(path)]
    documents = [record.get("text") or record.get("prompt") for record in _records(path)]
    if not all(isinstance(document, str) and document for document in documents):
        raise ConfigError(f"a line of {path} has no text; every line must have a string under 'text' or 'prompt'")
    return [document for document in documents if document]


def read_questions(path: Path | None) -> list[Question]:
    """Questions of a `.jsonl` file with `prompt`, `answer` and, where there are more, `aliases`; None: the demo's.

    Lines without an answer are left out.
    """
    path = path or DEMO_FOLDER / "questions.jsonl"
    questions = []
    for record in _records(path):
        prompt, answer = record.get("prompt"), record.get("answer")
        if not isinstance(prompt, str):
            raise ConfigError(f"a line of {path} has no 'prompt'")
        if answer is not None:
            questions.append(Question(prompt, (str(answer), *map(str, record.get("aliases") or ()))))
    if not questions:
        raise ConfigError(f"{path} has no question with an answer")
    return questions


def is_right(text: str, question: Question) -> bool:
    """Whether the first line of `text` is one of the answers, but for case, punctuation and articles."""
    return _normal(text) in {_normal(answer) for answer in question.answers}


def _normal(answer: str) -> str:
    line = answer.strip().split("\n")[0].lower()
    words = line.translate(str.maketrans("", "", string.punctuation)).split()
    return " ".join(word for word in words if word not in {"a", "an", "the"})


def _records(path: Path) -> Iterator[dict[str, Any]]:
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
