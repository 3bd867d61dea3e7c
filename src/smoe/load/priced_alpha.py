"""The substitution threshold alpha of a model: the largest one whose quality cost its user accepts.

`smoe tune --max-perplexity-increase 1%` finds it and stores it in the user's cache. A model's folder may contain one,
`smoe-alpha.json`, as the embedded model's does. A quality cost is valid for the resident share of its measurement and
larger ones; with fewer resident experts more are replaced, at an unknown cost.
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
    """A threshold and its quality cost: the relative change of perplexity against alpha 0 (0.01 is one per cent
    more)."""

    alpha: float
    allowed_increase: float
    """The limit for the upper bound of the change."""
    low: float
    high: float
    """The bounds `low` and `high` of the change's 95 % interval."""
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
    """Return the alpha for the model in `folder` at this resident share, and its origin in words."""
    own, brought = _read(_own_path(folder)), _read(folder / FILE_NAME)
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


def remember(folder: Path, priced: PricedAlpha) -> Path:
    """Store an alpha in the user's cache, atomically; return the path. Raises `OSError`."""
    return keep(_own_path(folder), as_json(priced))


def as_json(priced: PricedAlpha) -> dict[str, Any]:
    """Return an alpha as the object that its file contains."""
    return {"format": _FORMAT} | asdict(priced)


def _read(path: Path) -> PricedAlpha | None:
    """Return a stored alpha, or None if the file is missing or of another version."""
    try:
        priced = PricedAlpha(**(read_stored(path, _FORMAT) or {}))
        return priced if 0 <= priced.alpha <= 1 else None
    except TypeError:
        return None


def _own_path(folder: Path) -> Path:
    return of_model("priced", folder)
