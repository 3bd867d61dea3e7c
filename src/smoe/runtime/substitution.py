"""How missing experts are replaced, according to the settings."""

from __future__ import annotations

from typing import NamedTuple

from smoe.config import EngineConfig
from smoe.policy.importance import Thresholds
from smoe.policy.step import Switches


class Substitution(NamedTuple):
    """The settings by which missing experts are replaced, and by which substitutes get their routing weights."""

    switches: Switches = Switches()
    inherits_weight: bool = False
    """True: a substitute gets the weight of the expert that it replaces. False: the router's rule computes its weight
    from its own score."""
    gaps_keep_weight: bool = False
    """True: if a route is dropped, the other weights do not change. False: they share its weight by the router's
    rule."""


EXACTLY = Substitution()
"""No substitution."""


def substitution_of(config: EngineConfig) -> Substitution:
    """Return the substitution settings of a configuration."""
    switches = Switches(
        alpha=config.alpha,
        drop=config.substitutes == "drop",
        share=config.share_substitutes,
        prefill_keep=config.prefill_keep,
        thresholds=Thresholds(config.low_threshold if config.has_low else config.skip_threshold, config.skip_threshold),
        low_use="meanwhile" if config.low_meanwhile else "asked",
    )
    return Substitution(switches, config.substitute_weights == "inherited", config.prices_answers)
