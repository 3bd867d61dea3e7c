"""How a configuration has experts replaced: what is decided, and what a substitute weighs."""

from __future__ import annotations

from typing import NamedTuple

from smoe.config import EngineConfig
from smoe.policy.importance import Thresholds
from smoe.policy.step import Switches


class Substitution(NamedTuple):
    """How experts are replaced: what is decided, and what a substitute weighs."""

    switches: Switches = Switches()
    inherits_weight: bool = False
    """A substitute weighs what the expert that it replaces would have; else its own score by the router's rule."""
    gaps_keep_weight: bool = False
    """Where a route is left out the others weigh what they would with it; else they share its weight by the rule."""


EXACTLY = Substitution()
"""Nothing is replaced."""


def substitution_of(config: EngineConfig) -> Substitution:
    """What a configuration asks for."""
    switches = Switches(
        alpha=config.alpha,
        drop=config.substitutes == "drop",
        share=config.share_substitutes,
        prefill_keep=config.prefill_keep,
        thresholds=Thresholds(config.low_threshold if config.has_low else config.skip_threshold, config.skip_threshold),
        low_use="meanwhile" if config.low_meanwhile else "asked",
    )
    return Substitution(switches, config.substitute_weights == "inherited", config.prices_answers)
