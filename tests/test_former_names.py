"""Former names of settings work and name the present ones. Would catch a name that is lost, and a hint for each use."""

from __future__ import annotations

import logging

import pytest

from smoe import former_names
from smoe.cli.settings import settings_of
from smoe.config import SETTINGS
from smoe.presets import configure


@pytest.fixture(autouse=True)
def fresh_hints() -> None:
    former_names._hint.cache_clear()


def test_former_settings_work_with_one_hint_each(caplog: pytest.LogCaptureFixture) -> None:
    former = {"prefetch": "shadow", "shadow_precision": "int4", "shadow_departure": "late", "shadow_spares": 1}
    present = {"prefetch": "draft-model", "draft_precision": "int4", "draft_start": "late", "draft_extra": 1}
    with caplog.at_level(logging.WARNING):
        assert configure(**former) == configure(**former) == configure(**present)
    assert sorted(each.message.split(";")[0] for each in caplog.records) == [
        "`prefetch=shadow` is now `prefetch=draft-model`",
        "`shadow_departure` is now `draft_start`",
        "`shadow_precision` is now `draft_precision`",
        "`shadow_spares` is now `draft_extra`",
    ]


def test_former_names_work_on_the_command_line() -> None:
    assert settings_of(["shadow_on=main", "prefetch_asked=beside"]) == {
        "draft_on": "coordinator",
        "prefetch_asked": "concurrent",
    }


def test_present_names_are_settings() -> None:
    """And no former one is."""
    assert set(former_names._SETTINGS.values()) <= SETTINGS.keys()
    assert former_names._SETTINGS.keys().isdisjoint(SETTINGS)
    for (setting, former), present in former_names._VALUES.items():
        allowed = SETTINGS[setting].allowed
        assert allowed.admits(present) and former not in allowed.words.split(", ")


def test_other_names_pass_unchanged(caplog: pytest.LogCaptureFixture) -> None:
    assert former_names.present_names({"eviction": "lru", "alpha": 0.5}) == {"eviction": "lru", "alpha": 0.5}
    assert not caplog.records
