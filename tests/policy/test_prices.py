"""The table of prices. Would catch: a price that does not fall with the weight, a table that comes back changed, one
that gives quality away for nothing or less.
"""

from __future__ import annotations

import json
from math import inf, nan
from typing import Any

import pytest

from smoe.errors import ConfigError
from smoe.policy.prices import LayerPrices, PriceTable, Resolution

TABLE = PriceTable({0: LayerPrices(1e-4, 2e-3, 3e-3), 11: LayerPrices(0.0, 0.5, 1.0)})


def test_it_comes_back_from_json() -> None:
    assert PriceTable.from_json(json.loads(json.dumps(TABLE.as_json()))) == TABLE


def test_prices_by_hand() -> None:
    prices = LayerPrices(low=1.0, substitute=2.0, skip=4.0)
    assert {answer: prices.price(answer, 0.25, 0.25) for answer in Resolution} == {
        Resolution.HIGH: 0.0,
        Resolution.HOST: 0.0,
        Resolution.LOW: 0.0625,
        Resolution.SUBSTITUTE: 0.1953125,
        Resolution.SKIP: 0.125,
    }
    assert {answer for answer in Resolution if prices.price(answer, 1.0, 1.0) == 0.0} == {
        Resolution.HIGH,
        Resolution.HOST,
    }


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        {},
        {"nats": None},
        {"nats": {"first": {"low": 1.0, "substitute": 1.0, "skip": 1.0}}},
        {"nats": {"0": {"low": 1.0, "substitute": 1.0}}},
        {"nats": {"0": {"low": 1.0, "substitute": 1.0, "skip": 1.0, "drop": 1.0}}},
        {"nats": {"0": [1.0, 1.0, 1.0]}},
    ],
)
def test_what_is_no_table_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="as_json"):
        PriceTable.from_json(value)


@pytest.mark.parametrize("nats", [-1e-9, nan, inf, "1", True, None])
def test_what_is_no_price_is_refused(nats: Any) -> None:
    with pytest.raises(ConfigError, match="layer 3: skip"):
        PriceTable.from_json({"nats": {"3": {"low": 1.0, "substitute": 1.0, "skip": nats}}})
