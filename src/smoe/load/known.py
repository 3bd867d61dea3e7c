"""Replaces settings that the user left out by tuned values of the model, and records where they come from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from smoe.config import EngineConfig
from smoe.errors import UnpreparedError
from smoe.load.cache_weights import cache_weights_of
from smoe.load.importance_profile import thresholds_by
from smoe.load.priced_alpha import threshold_of
from smoe.load.priced_answers import prices_of
from smoe.policy.prices import PriceTable
from smoe.policy.registry import eviction_kind


class ResolvedSettings(NamedTuple):
    """The settings of a model after tuned values have replaced the settings that the user left out."""

    config: EngineConfig
    reasons: dict[str, str]
    """The origin of each setting that the user left out, by its name."""
    prices: PriceTable | None = None
    """The quality costs of miss resolutions, if misses have a budget; else None."""


def known_of(config: EngineConfig, place: Path, resident_share: float) -> ResolvedSettings:
    """Return `config` with tuned values, for the model in `place`, of settings that the user left out.
    `resident_share`: the fraction of experts that fit into memory.

    Raises `ConfigError` if the resolution of misses has a quality budget and the model's quality costs have not been
    measured.
    """
    reasons: dict[str, str] = {}
    if config.precision_shares is not None:
        (low, skip), why = thresholds_by(place, config)
        config = replace(config, low_threshold=low, skip_threshold=skip, precision_shares=None)
        reasons["low_threshold"] = f"dropped beyond {skip:g}: {why}"
    if config.alpha_as_priced:
        alpha, reasons["alpha"] = threshold_of(place, resident_share)
        config = replace(config, alpha=alpha, alpha_as_priced=False)
    if config.cache_weights is None and "cache_weights" in eviction_kind(config.eviction).settings:
        weights, reasons["cache_weights"] = cache_weights_of(place)
        config = replace(config, cache_weights=weights)
    prices = _prices(config, place) if config.prices_answers else None
    return ResolvedSettings(config, reasons, prices)


def _prices(config: EngineConfig, place: Path) -> PriceTable:
    priced, budget = prices_of(place), "max_perplexity_increase" if config.tpot_seconds is None else "tpot_seconds"
    wanted = config.low_precision if config.has_low else None
    if priced is None or (wanted is not None and priced.low_precision not in (wanted, "none")):
        of_what = "" if wanted is None else f" with `low_precision={wanted}`"
        raise UnpreparedError(
            f"`{budget}`: the quality costs of this model{of_what} have not been measured yet; run smoe tune on it "
            f"with `prices`{of_what}, once",
            setting=budget,
            given=getattr(config, budget),
            allowed="for models whose quality costs have been measured",
        )
    return priced.table
