"""What a paper says of its system, what the same setting gives here, and whether that is the same."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Any

NEAR = 0.9
"""Part of the paper's least gain that a claim must reach to hold."""


@dataclass(frozen=True)
class Claim:
    """How many times better one system is than another, in the paper and here; or, with `within`, any figure."""

    where: str
    """Figure or table of the paper."""
    what: str
    paper: tuple[float, float]
    """(least, most), as the paper gives it."""
    ours: tuple[float, float]
    remark: str = ""
    case: str = ""
    """Under which it was looked at, where there are several."""
    within: tuple[float, float | None] | None = None
    """(least, most) that a figure may be to hold; None for the most: there is none."""

    @property
    def verdict(self) -> str:
        """In words: of the ranges, what the least figures gain is compared; with `within`, whether they lie there."""
        if self.within is not None:
            least, most = self.within[0], inf if self.within[1] is None else self.within[1]
            if least <= self.ours[0] and self.ours[1] <= most:
                return "holds"
            return "holds in part" if self.ours[1] >= least and self.ours[0] <= most else "does not hold"
        gain = self.paper[0] - 1.0
        bound = 1.0 + (NEAR * gain if gain > 0 else gain)
        if self.ours[0] >= bound:
            return "holds"
        if self.ours[1] >= bound:
            return "holds in part"
        return "holds, by less" if self.ours[0] > 1.0 else "does not hold"

    def as_json(self) -> dict[str, Any]:
        return {
            "where": self.where,
            "what": self.what,
            "paper": list(self.paper),
            "ours": list(self.ours),
            "verdict": self.verdict,
            "remark": self.remark,
            "case": self.case,
            "within": None if self.within is None else list(self.within),
        }


@dataclass(frozen=True)
class Setting:
    """One row of what was simulated."""

    name: str
    system: str
    ttft_seconds: float
    seconds_per_token: float
    new_tokens: int
    memory_bytes: float

    @property
    def end_to_end_seconds(self) -> float:
        return self.ttft_seconds + self.new_tokens * self.seconds_per_token

    def as_json(self) -> dict[str, Any]:
        return vars(self) | {"end_to_end_seconds": self.end_to_end_seconds}


@dataclass(frozen=True)
class Cell:
    """What one setting of a sweep gives, with every system."""

    settings: list[Setting]
    figures: dict[str, float]
    """What a paper's claims are about in addition to times and bytes, by names of its own."""


@dataclass(frozen=True)
class Reproduction:
    """A paper's claims, and what they were taken from."""

    paper: str
    settings: tuple[Setting, ...]
    claims: tuple[Claim, ...]
    remarks: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        return {
            "paper": self.paper,
            "settings": [setting.as_json() for setting in self.settings],
            "claims": [claim.as_json() for claim in self.claims],
            "remarks": list(self.remarks),
        }


def span(values: list[float]) -> tuple[float, float]:
    return min(values), max(values)
