"""What all kinds of stored values have in common: where they are stored, in which form, and what is not read.

Would catch: a file that changes its place or form, so that users must measure again; another model's value; a broken or
newer file that is read.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from smoe.eval.tune import Tuning
from smoe.load.cache_weights import FittedWeights
from smoe.load.importance_profile import profile_of
from smoe.load.priced_alpha import PricedAlpha
from smoe.load.priced_answers import PricedAnswers
from smoe.load.tuned import TunedValue
from smoe.load.tuned_settings import Winner, Winners
from smoe.load.verified_packs import _Verified
from smoe.policy.prices import LayerPrices, PriceTable
from smoe.policy.tuning import Timing
from smoe.report.pace import _Runs
from smoe.user_cache import StoredValue, cache_folder

TABLE = PriceTable({0: LayerPrices(1e-4, 2e-3, 3e-3)})
KINDS: dict[str, tuple[StoredValue, int, set[str]]] = {
    "cache": (FittedWeights((0.5, 0.25, 0.25, 0.0), 0.4, 900), 1, {"weights", "resident_share", "decode_steps"}),
    "priced": (
        PricedAlpha(0.5, 0.01, -0.002, 0.004, 0.25, 2000, "a book"),
        1,
        {"alpha", "allowed_increase", "low", "high", "resident_share", "tokens", "text"},
    ),
    "prices": (
        PricedAnswers(TABLE, TABLE, "int4", 2000, "a book"),
        1,
        {"text", "tokens", "low_precision", "nats", "standard_errors"},
    ),
    "importance": (profile_of([0.0, 0.2, 0.9], 100, "a book"), 1, {"quantiles", "tokens", "text"}),
    "winners": (
        Winners({"prefetch": [], "eviction": [Winner("lfu", 0.1, "lru", 0.2, 0.5, "a text", "here")]}),
        3,
        {"eviction"},
    ),
    "tuned": (
        Tuning({"model": "a"}, [0.0, 0.1], [[Timing(0.2), Timing(0.1, bytes_per_second=1e9)]], 1e9),
        3,
        {"circumstances", "alphas", "rounds", "bytes_per_second"},
    ),
    "pace": (
        _Runs({"a processor | auto |  | direct": {"pace": {}, "last_run": None}}),
        4,
        {"a processor | auto |  | direct"},
    ),
    "verified-packs": (_Verified("experts.int4.smoe", [1, 2, 3]), 1, {"pack", "identity"}),
}
"""For each kind, named as its folder: a value, the version of the form, and the entries of the file."""


def place_of(value: StoredValue, folder: Path) -> Any:
    return value.circumstances if isinstance(value, Tuning) else folder


@pytest.mark.parametrize("kind", KINDS)
def test_a_value_is_stored_for_its_model(kind: str, folder: Path) -> None:
    value, version, entries = KINDS[kind]
    place = place_of(value, folder)
    assert value.stored(place) is None
    path = value.store(place)
    assert path.parent == cache_folder() / kind and path.suffix == ".json" and len(path.stem) == 16
    stored = json.loads(path.read_text())
    assert stored.pop("format") == version and stored.keys() == entries
    assert value.stored(place) == value
    assert value.stored({"model": "another"} if isinstance(value, Tuning) else folder.parent) is None


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_cannot_be_understood_is_not_read(kind: str, folder: Path) -> None:
    value, version, _ = KINDS[kind]
    place = place_of(value, folder)
    whole = json.loads(value.store(place).read_text())
    for content in ("", "[]", "{}", json.dumps(whole)[:-9], json.dumps(whole | {"format": version + 1})):
        value.path_of(place).write_text(content)
        assert value.stored(place) is None


def test_models_bring_values_under_these_names() -> None:
    values = [value for value, _, _ in KINDS.values() if isinstance(value, TunedValue)]
    brought = {value.kind: value.file_name for value in values if value.file_name}
    names = {"priced": "smoe-alpha.json", "prices": "smoe-prices.json", "importance": "smoe-thresholds.json"}
    assert brought == names
