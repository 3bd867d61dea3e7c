"""The declarations of eviction policies: names, and settings of their own."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from smoe.config import EngineConfig
from smoe.errors import ConfigError
from smoe.policy.eviction.base import EvictionSettings
from smoe.policy.eviction.lru import LRU
from smoe.policy.eviction.policies import PolicySettings
from smoe.policy.registry import EVICTION, EVICTIONS, make_pools


def test_every_setting_belongs_to_one_policy() -> None:
    """Would catch a field that no policy names, and a name without a field."""
    named = [name for policy in EVICTION for name in EVICTIONS.find(policy).settings]
    declared = {each.name for each in fields(PolicySettings)}
    assert len(named) == len(set(named)) and declared <= {*named} <= {each.name for each in fields(EvictionSettings)}


class Patient(LRU):
    settings = ("score_window",)

    def __init__(self, score_window: int) -> None:
        super().__init__()
        self.window = score_window


def test_a_value_reaches_the_constructor_of_the_policy() -> None:
    config = EngineConfig(eviction=f"{__name__}:Patient", score_window=7)
    policy: Any = make_pools(config.eviction_settings, 4, 2)
    assert policy.window == 7


def test_the_settings_of_a_policy_are_checked() -> None:
    with pytest.raises(ConfigError, match="`score_window` is -1; it must be a whole number of at least 0"):
        EngineConfig(score_window=-1)
    assert EvictionSettings("score").score_window == EngineConfig().score_window
