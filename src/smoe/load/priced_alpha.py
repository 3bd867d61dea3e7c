"""The substitution threshold that a model has been priced for: the largest whose price its user accepts.

`smoe tune --max-perplexity-increase 1%` finds it and keeps it in the user's cache. A model's folder may bring one of
its own, `smoe-alpha.json`, as the embedded model's does. A price holds for the share of experts that were resident when
it was measured, and for larger ones; with fewer in memory more is replaced, at an unknown quality cost.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from smoe.config import DEFAULT_ALPHA
from smoe.user_cache import keep, of_model, read_stored

FILE_NAME = "smoe-alpha.json"
"""The file's name in a model's folder."""
_FORMAT = 1


@dataclass(frozen=True)
class PricedAlpha:
    """A threshold and its price: the change of perplexity against alpha 0, as a share (0.01 is one per cent more)."""

    alpha: float
    allowed_increase: float
    """What the upper bound of the change had to stay within."""
    low: float
    high: float
    """The interval of 95 % of the change."""
    resident_share: float
    """The share of the experts in memory during the measurement."""
    tokens: int
    text: str

    def __str__(self) -> str:
        return (
            f"perplexity {100 * self.low:+.2f} .. {100 * self.high:+.2f} % (interval of 95 %; {self.tokens} tokens of "
            f"{self.text}, {self.resident_share:.0%} of the experts resident)"
        )


def threshold_of(folder: Path, resident_share: float) -> tuple[float, str]:
    """The alpha for the model in `folder` with so many experts resident, and where it comes from."""
    own, brought = _read(_own_path(folder)), _read(folder / FILE_NAME)
    most = 1.0 if own is None else own.alpha  # never above the value found for this model
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


def remember(folder: Path, priced: PricedAlpha) -> Path:
    """Keep a price in the user's cache, whole or not at all; returns where. Raises `OSError`."""
    return keep(_own_path(folder), as_json(priced))


def as_json(priced: PricedAlpha) -> dict[str, Any]:
    """What a file holds."""
    return {"format": _FORMAT} | asdict(priced)


def _read(path: Path) -> PricedAlpha | None:
    """None where there is no such file, or none that this version understands."""
    try:
        priced = PricedAlpha(**(read_stored(path, _FORMAT) or {}))
        return priced if 0 <= priced.alpha <= 1 else None
    except TypeError:
        return None


def _own_path(folder: Path) -> Path:
    return of_model("priced", folder)
