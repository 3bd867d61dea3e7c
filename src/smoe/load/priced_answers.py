"""The quality costs of a model's miss resolutions, from its folder or from the user's cache.

`smoe tune --prices` measures the costs (`eval/answer_prices.py`) and stores them in the cache. The folder of a model
may contain some as well, `smoe-prices.json`, as that of the embedded model does. The user's own costs take precedence.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smoe.load.tuned import TunedValue
from smoe.policy.prices import PriceTable


@dataclass(frozen=True)
class PricedAnswers(TunedValue):
    """A table of the quality costs of miss resolutions, and the conditions under which they were measured."""

    kind = "prices"
    file_name = "smoe-prices.json"

    table: PriceTable
    errors: PriceTable
    """The standard error of each of the table's values."""
    low_precision: str
    """The precision of the low-precision copies. `none` means that there were none; a low-precision copy then costs as
    much as a dropped expert."""
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
    """Return the quality costs of the model in `folder`, or None if they have not been measured."""
    return PricedAnswers.stored(folder) or PricedAnswers.delivered(folder)
