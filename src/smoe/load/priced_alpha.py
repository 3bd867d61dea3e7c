"""The substitution threshold alpha of a model: the largest one whose quality cost the user accepts.

`smoe tune --max-perplexity-increase 1%` finds the threshold and stores it in the user's cache. The folder of a model
may contain one as well, `smoe-alpha.json`, as that of the embedded model does. The quality cost is valid for the
resident share at which it was measured, and for larger ones. With fewer resident experts more experts are replaced, at
an unknown cost.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from smoe.config import DEFAULT_ALPHA, EngineConfig
from smoe.load.tuned import TunedValue


@dataclass(frozen=True)
class PricedAlpha(TunedValue):
    """A threshold alpha and its quality cost: the relative change of perplexity against alpha 0, where 0.01 means an
    increase of 1 %."""

    kind = "priced"
    file_name = "smoe-alpha.json"

    alpha: float
    allowed_increase: float
    """The limit that the upper bound of the change had to meet."""
    low: float
    high: float
    """The bounds, `low` and `high`, of the 95 % interval of the change."""
    resident_share: float
    """The fraction of experts in memory during the measurement."""
    tokens: int
    text: str

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise ValueError(self.alpha)

    @classmethod
    def apply(cls, config: EngineConfig, folder: Path, resident_share: float) -> tuple[EngineConfig, dict[str, str]]:
        alpha, origin = threshold_of(folder, resident_share)
        return replace(config, alpha=alpha, alpha_as_priced=False), {"alpha": origin}

    def __str__(self) -> str:
        return (
            f"perplexity {100 * self.low:+.2f} .. {100 * self.high:+.2f} % (interval of 95 %; {self.tokens} tokens of "
            f"{self.text}, {self.resident_share:.0%} of the experts resident)"
        )


def threshold_of(folder: Path, resident_share: float) -> tuple[float, str]:
    """Return the substitution threshold alpha for the model in `folder` at this resident share, and a text that says
    where the threshold comes from."""
    own, brought = PricedAlpha.stored(folder), PricedAlpha.delivered(folder)
    most = 1.0 if own is None else own.alpha  # never above the value measured for this model
    for priced, whose in ((own, "as you measured it"), (brought, "by the quality cost stored with the model")):
        if priced is not None and resident_share >= priced.resident_share and priced.alpha <= most:
            return priced.alpha, f"{whose}: {priced}"
    alpha, how = min(DEFAULT_ALPHA, most), "smoe tune --max-perplexity-increase 1% finds the largest alpha within 1%"
    known = own or brought
    if known is None:
        return alpha, f"the usual one: the quality cost of this model has not been measured; {how}"
    return alpha, (
        f"the usual one at most: {'your' if known is own else 'its'} quality cost is for {known.resident_share:.0%} "
        f"of the experts resident, and there are {resident_share:.0%}; {how}"
    )
