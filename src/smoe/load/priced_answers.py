"""The quality costs of a model's miss resolutions, in its folder or in the user's cache.

`smoe tune --prices` measures them (`eval/answer_prices.py`) and stores them in the cache. A model's folder may contain
some, `smoe-prices.json`, as the embedded model's does; the user's own take precedence.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smoe.load.tuned import TunedValue
from smoe.policy.prices import PriceTable


@dataclass(frozen=True)
class PricedAnswers(TunedValue):
    """A table of quality costs and the conditions of its measurement."""

    kind = "prices"
    file_name = "smoe-prices.json"

    table: PriceTable
    errors: PriceTable
    """The standard errors of the table's values."""
    low_precision: str
    """The precision of the low copies. With `none` there were none, and a low copy costs as much as a dropped
    expert."""
    tokens: int
    text: str

    @classmethod
    def of_fields(cls, fields: dict[str, Any]) -> PricedAnswers:
        return cls(
            table=PriceTable.from_json(fields),
            errors=PriceTable.from_json(fields["standard_errors"]),
            low_precision=fields["low_precision"],
            tokens=fields["tokens"],
            text=fields["text"],
        )

    def fields(self) -> dict[str, Any]:
        return {
            "text": self.text,
            "tokens": self.tokens,
            "low_precision": self.low_precision,
            **self.table.as_json(),
            "standard_errors": self.errors.as_json(),
        }


def prices_of(folder: Path) -> PricedAnswers | None:
    """Return the quality costs of the model in `folder`, or None if unknown."""
    return PricedAnswers.measured(folder) or PricedAnswers.delivered(folder)
