"""Thresholds of importance by name: what goes together, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from smoe.config import EngineConfig
from smoe.errors import ConfigError
from smoe.presets import LOW_COPIES, configure, without_low_copies


def test_shares_stand_in_the_place_of_thresholds_and_these_in_theirs() -> None:
    """Would catch a share that the preset's thresholds overrule, or thresholds that a profile does."""
    preset = configure("hobbit")
    assert (preset.precision_shares, preset.low_threshold, preset.skip_threshold) == ((67, 30, 3), 0.6, 0.9)
    shares = configure("hobbit", precision_shares=(50.0, 50.0, 0.0))
    assert (shares.precision_shares, shares.low_threshold, shares.skip_threshold) == ((50, 50, 0), 1, 1)
    for name, value in (("low_threshold", 0.5), ("skip_threshold", 0.95)):
        given = configure("hobbit", **{name: value})
        assert given.precision_shares is None and getattr(given, name) == value
    with pytest.raises(ConfigError, match="`precision_shares` and `low_threshold` both choose"):
        configure("hobbit", precision_shares=(50.0, 50.0, 0.0), low_threshold=0.5)


@pytest.mark.parametrize(
    "shares", [(67, 30), (67, 30, 4), (100, 0, 0), (97, 0, 3), (80, 30, -10), (50, float("nan"), 50), 67]
)
def test_shares_that_are_none(shares: Any) -> None:
    with pytest.raises(ConfigError, match="three numbers whose sum is 100, for own copies, low copies"):
        EngineConfig(low_precision="int4", precision_shares=shares)


def test_shares_need_low_copies() -> None:
    with pytest.raises(ConfigError, match="`precision_shares` has an effect only with `low_precision=int4`"):
        configure(precision_shares=(67.0, 30.0, 3.0))


def test_lossy_before_the_thresholds_are_known() -> None:
    assert configure("hobbit").lossy == ["missing experts in int4 by shares"]


def test_a_configuration_without_low_copies_is_exact_again() -> None:
    """Would catch a new setting of low copies that nobody takes back."""
    whole = configure("hobbit", low_share=0.3, low_meanwhile=True, upgrade=True, memory_bytes=10**9)
    plain = without_low_copies(whole)
    assert plain == EngineConfig(memory_bytes=10**9, eviction="multidimensional", prefetch="stacked-gates")
    assert all(getattr(whole, name) != getattr(EngineConfig, name) for name in LOW_COPIES)
