"""The built-in eviction policies: their names, where their classes are, and the settings that only one policy uses.

A new policy is one file and one line here. Each setting of its own is a field of `PolicySettings`. The classes are not
imported, so that `--help` imports no NumPy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from smoe.setting_declaration import Count, NumberTuple, OneOf, setting

LIVE = {
    "auto": "smoe.policy.eviction.auto:Adaptive",
    "lru": "smoe.policy.eviction.lru:LRU",
    "lfu": "smoe.policy.eviction.lfu:LFU",
    "score": "smoe.policy.eviction.score:ScoreWindow",
    "multidimensional": "smoe.policy.eviction.multidimensional:Multidimensional",
    "learned": "smoe.policy.eviction.learned:Learned",
}
"""{name: MODULE:CLASS} of the policies that can serve live requests."""
REPLAYED = {
    "random": "smoe.policy.eviction.random_choice:RandomChoice",
    "belady": "smoe.policy.eviction.belady:Belady",
}
"""{name: MODULE:CLASS} of the policies for comparisons in replays."""

CACHE_RECORDS = ("sequence", "model")
"""The period over which the multidimensional cache counts uses. sequence: since the start of the prompt; model: since
the model was loaded."""
_ROUNDING = 1e-3
"""How much the sum of the cache weights may differ from 1, since users write 0.33 for a third."""


def are_cache_weights(values: Sequence[float]) -> bool:
    """Return whether `values` can be the weights of the multidimensional cache: four numbers, none negative, with sum
    1."""
    are_numbers = all(isinstance(value, (int, float)) and value >= 0 for value in values)
    return len(values) == 4 and are_numbers and abs(sum(values) - 1) < _ROUNDING


@dataclass(frozen=True, kw_only=True)
class PolicySettings:
    """The settings that only one eviction policy uses. `EngineConfig` and `EvictionSettings` inherit them; the policy
    names them in its class attribute `settings`."""

    score_window: int = setting(
        64, Count(0), "With --eviction score: the number of steps over which scores are averaged."
    )
    """With `eviction` score: the number of earlier steps over which scores are averaged (the papers' n)."""
    cache_weights: tuple[float, ...] | None = setting(
        None,
        NumberTuple("four numbers of at least 0 whose sum is 1, for lru, lfu, lhu and fld", are_cache_weights),
        "With --eviction multidimensional: the weights of an expert's last use, uses, uses in high precision and layer "
        "distance, such as 0.4,0.3,0.2,0.1.",
        left_out="as smoe tune --cache found for the model, else the usual weights",
        owner="eviction",
    )
    """With `eviction` multidimensional: the weights of the last use (lru), the uses (lfu), the uses in high
    precision (lhu) and the distance to the layer (fld). None: those that `smoe tune --cache` found for this model, else
    the usual ones."""
    cache_records: str | None = setting(
        None,
        OneOf(*CACHE_RECORDS),
        "With --eviction multidimensional: count an expert's uses in the current sequence, or in the whole run.",
        left_out="sequence",
        owner="eviction",
    )
    """With `eviction` multidimensional: the period over which uses are counted. sequence (the default): since the
    start of the prompt; model: since the model was loaded."""
