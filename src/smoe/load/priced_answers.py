"""The quality costs of a model's miss resolutions, in its folder or in the user's cache.

`smoe tune --prices` measures them (`eval/answer_prices.py`) and stores them in the cache. A model's folder may contain
some, `smoe-prices.json`, as the embedded model's does; the user's own take precedence.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smoe.errors import ConfigError
from smoe.policy.prices import PriceTable
from smoe.user_cache import keep, of_model, read_stored

FILE_NAME = "smoe-prices.json"
"""The file's name in a model's folder."""
_FORMAT = 1


@dataclass(frozen=True)
class PricedAnswers:
    """A table of quality costs and the conditions of its measurement."""

    table: PriceTable
    errors: PriceTable
    """The standard errors of the table's values."""
    low_precision: str
    """The precision of the low copies. With `none` there were none, and a low copy costs as much as a dropped
    expert."""
    tokens: int
    text: str


def prices_of(folder: Path) -> PricedAnswers | None:
    """Return the quality costs of the model in `folder`, or None if unknown."""
    return _read(of_model("prices", folder)) or _read(folder / FILE_NAME)


def remember(folder: Path, priced: PricedAnswers) -> Path:
    """Store quality costs in the user's cache, atomically; return the path. Raises `OSError`."""
    return keep(of_model("prices", folder), as_json(priced))


def as_json(priced: PricedAnswers) -> dict[str, Any]:
    """Return quality costs as the object that their file contains."""
    return {
        "format": _FORMAT,
        "text": priced.text,
        "tokens": priced.tokens,
        "low_precision": priced.low_precision,
        **priced.table.as_json(),
        "standard_errors": priced.errors.as_json(),
    }


def _read(path: Path) -> PricedAnswers | None:
    """Return stored quality costs, or None if the file is missing or of another version."""
    stored = read_stored(path, _FORMAT)
    if stored is None:
        return None
    try:
        return PricedAnswers(
            table=PriceTable.from_json(stored),
            errors=PriceTable.from_json(stored["standard_errors"]),
            low_precision=stored["low_precision"],
            tokens=stored["tokens"],
            text=stored["text"],
        )
    except (ConfigError, KeyError):
        return None
