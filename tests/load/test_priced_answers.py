"""Prices of answers: whose word counts, and what is not believed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from smoe.load.priced_answers import PricedAnswers, prices_of
from smoe.models.files import DEMO_FOLDER
from smoe.policy.prices import LayerPrices, PriceTable, Resolution

PRICED = PricedAnswers(
    table=PriceTable({0: LayerPrices(1e-4, 2e-3, 3e-3), 2: LayerPrices(0.0, 0.5, 1.0)}),
    errors=PriceTable({0: LayerPrices(1e-5, 2e-4, 3e-4), 2: LayerPrices(0.0, 0.1, 0.2)}),
    low_precision="int4",
    tokens=2000,
    text="a book",
)


def test_the_users_own_come_before_the_folders(folder: Path) -> None:
    assert prices_of(folder) is None
    brought = PRICED.__class__(PRICED.table, PRICED.errors, "int2", 1, "another")
    (folder / PricedAnswers.file_name).write_text(json.dumps(brought.as_json()))
    assert prices_of(folder) == brought
    PRICED.store(folder)
    assert prices_of(folder) == PRICED


@pytest.mark.parametrize(
    "change",
    [{"nats": None}, {"nats": {"0": {"low": -1.0, "substitute": 1.0, "skip": 1.0}}}],
)
def test_what_is_not_understood_is_not_there(folder: Path, change: dict[str, object]) -> None:
    (folder / PricedAnswers.file_name).write_text(json.dumps(PRICED.as_json() | change))
    assert prices_of(folder) is None


def test_the_demo_brings_its_prices(folder: Path) -> None:
    """They were measured with its int4 copies, and every figure is well above its error."""
    priced = prices_of(DEMO_FOLDER)
    assert priced is not None and priced.low_precision == "int4" and sorted(priced.table.layers) == list(range(12))
    for layer, prices in priced.table.layers.items():
        low, substitute, skip = (
            prices.price(a, 1 / 8, 1.0) for a in (Resolution.LOW, Resolution.SUBSTITUTE, Resolution.SKIP)
        )
        assert 0 < low < 0.05 * skip
        assert 0.5 * skip < substitute < 2 * skip
        assert priced.errors.layers[layer].skip < 0.5 * prices.skip
