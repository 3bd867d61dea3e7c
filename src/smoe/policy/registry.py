"""The names of policies. A new policy is one file and one line here; unknown names raise an error that lists all
names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from smoe.errors import ConfigError
from smoe.expert import EXACT
from smoe.policy.eviction.base import Eviction
from smoe.policy.eviction.belady import Belady
from smoe.policy.eviction.lfu import LFU
from smoe.policy.eviction.lru import LRU
from smoe.policy.eviction.pools import FormPools, LayerPools, SizePools
from smoe.policy.residency import PoolSize

if TYPE_CHECKING:
    from smoe.policy.eviction.learned import NextUse


def _score(window: int | None = None) -> Eviction:
    from smoe.policy.eviction.score import WINDOW, ScoreWindow  # brings NumPy, which `smoe --help` can do without

    return ScoreWindow(WINDOW if window is None else window)


def _multidimensional(weights: Sequence[float] | None = None, records: str | None = None) -> Eviction:
    from smoe.policy.eviction.multidimensional import WEIGHTS, Multidimensional  # NumPy, as above

    return Multidimensional(weights or WEIGHTS, of_sequence=records != "model")


def _random() -> Eviction:
    from smoe.policy.eviction.random_choice import RandomChoice  # NumPy, as above

    return RandomChoice()


def _adaptive() -> Eviction:
    from smoe.policy.eviction.auto import Adaptive  # NumPy, as above

    return Adaptive()


def _learned(next_use: NextUse | None = None) -> Eviction:
    from smoe.policy.eviction.learned import Learned  # NumPy, as above

    return Learned(next_use)


MULTIDIMENSIONAL = "multidimensional"
"""The policy that combines four others (HOBBIT)."""
LEARNED = "learned"
"""The policy that is trained on traces of the model."""

ONLINE_EVICTION: dict[str, Callable[[], Eviction]] = {
    "auto": _adaptive,
    "lru": LRU,
    "lfu": LFU,
    "score": _score,
    MULTIDIMENSIONAL: _multidimensional,
    LEARNED: _learned,
}
"""Policies that can serve live requests."""

SCORED_EVICTION = ("score",)
"""The online policies that need every expert's score."""

ORDERLESS_EVICTION = ("auto", "score", MULTIDIMENSIONAL, LEARNED)
"""The online policies that depend only on the routers' choices, not on the order of loads."""

EVICTION: dict[str, Callable[..., Eviction]] = {**ONLINE_EVICTION, "random": _random, "belady": Belady}
"""All policies, including those for comparisons in the simulator only."""

_OFFLINE = {"random": "is what others are compared with", "belady": "needs the future"}

CACHE_RECORDS = ("sequence", "model")
"""The period over which the multidimensional cache counts uses: this sequence, or since the model was loaded."""

_ROUNDING = 1e-3
"""The amount by which cache weights may fail to sum to 1: people write 0.33."""

WHOLE_LAYER = "whole-layer"
"""The prefetch that loads all experts of the next layer."""

EXPERT_MLP = "expert-mlp"
"""The network that is trained on recorded paths (DuoServe)."""

FITTED_PREFETCH = ("popularity", "affinity", "activation-matrix", EXPERT_MLP)
"""Predictors that see only the history of routing, and must be fitted on a trace of the model: how often a layer
chooses an expert; which experts followed those of the layer before; the most similar past sequence; a network."""

SHADOW = "shadow"
"""The prefetch by a draft model, a copy of the model in fewer bits that decodes concurrently (OD-MoE)."""

HISTORY_PREFETCH = ("previous-token", *FITTED_PREFETCH)
"""Predictors that see only the routers' choices: any thread may run them."""

PREFETCH = (
    "auto",
    "none",
    "next-gate",
    "look-ahead",
    "stacked-gates",
    "corrected-gates",
    WHOLE_LAYER,
    SHADOW,
    *HISTORY_PREFETCH,
)
"""Predictors for later layers in decode. none: no predictions; next-gate: the next layer's router on this layer's
input; look-ahead: its attention and router on the output of the resident experts; stacked-gates: the routers of several
layers on this layer's input; corrected-gates: the same with learned corrections; whole-layer: every expert of the next
layer; shadow: a draft model; previous-token: the layer's choice for the last token; the fitted ones; auto: what is
fastest."""

SCORED_PREFETCH = ("stacked-gates", "corrected-gates", SHADOW)
"""The predictors that need the rule from router logits to a choice."""

PREFETCH_WHAT = ("top-score", "chosen")
"""chosen: SMoE's first version; top-score: its second."""


EXPERT_CACHE = ("budget", "top-k")
"""budget: as many slots as the budget allows; top-k: as in systems without an expert cache, the slots of one token's
choice in one layer and the staging slots."""
POOLS = ("global", "layer")
"""global: one pool of slots for all layers; layer: a share for each."""


def are_cache_weights(values: Sequence[float]) -> bool:
    """Return whether the values can be the weights of the multidimensional cache: four, not negative, with the sum
    1."""
    are_numbers = all(isinstance(value, (int, float)) and value >= 0 for value in values)
    return len(values) == 4 and are_numbers and abs(sum(values) - 1) < _ROUNDING


class EvictionSettings(NamedTuple):
    """The settings of `EngineConfig` that define an eviction policy; None: the default."""

    name: str
    pools: str = "global"
    score_window: int | None = None
    cache_weights: Sequence[float] | None = None
    cache_records: str | None = None
    next_use: NextUse | None = None
    """The learned parameters of `learned` for the model; None: there are none."""


def make_eviction_for(wanted: EvictionSettings, sizes: Sequence[PoolSize], experts: Mapping[int, int]) -> Eviction:
    """Return a new online eviction policy for slots of these `sizes`. `experts`: the number of experts of each layer.

    Where some slots hold low copies, each format has its own policy.
    """
    forms = sorted({size.form for size in sizes})
    of_form = {form: _make_sizes(wanted, [size for size in sizes if size.form == form], experts) for form in forms}
    return of_form[EXACT] if forms == [EXACT] else FormPools(of_form)


def _make_sizes(wanted: EvictionSettings, sizes: Sequence[PoolSize], experts: Mapping[int, int]) -> Eviction:
    """Make the policy for slots of one format."""
    if len(sizes) == 1:
        return make_pools(wanted, sizes[0].cache, len(experts), sum(experts.values()))
    by_layer: dict[int, Eviction] = {}
    for size in sizes:
        count = sum(experts[layer] for layer in size.layers)
        by_layer |= dict.fromkeys(size.layers, make_pools(wanted, size.cache, len(size.layers), count))
    return SizePools(by_layer)


def make_pools(wanted: EvictionSettings, cache_slots: int, layers: int, experts: int | None = None) -> Eviction:
    """Return a new online eviction policy for `cache_slots` slots of one size, used by `layers` layers.

    Where all `experts` of these layers fit, nothing is ever evicted: `auto` is then the cheapest policy.
    """
    if wanted.name == "auto" and experts is not None and cache_slots >= experts:
        return LRU()
    if wanted.pools == "global":
        return _make(wanted)
    return LayerPools(partial(_make, wanted), max(1, cache_slots // layers))


def make_eviction(name: str) -> Eviction:
    """Return a new online eviction policy by name, with default settings."""
    return _make(EvictionSettings(name))


def _make(wanted: EvictionSettings) -> Eviction:
    name = wanted.name
    if name not in ONLINE_EVICTION:
        known = ", ".join(ONLINE_EVICTION)
        hint = f" ({name} {_OFFLINE[name]}: use it in the simulator)" if name in _OFFLINE else ""
        message = f"`eviction` is {name!r}{hint}; choose one of: {known}"
        raise ConfigError(message, setting="eviction", given=name, allowed=known)
    if name == "score":
        return _score(wanted.score_window)
    if name == MULTIDIMENSIONAL:
        return _multidimensional(wanted.cache_weights, wanted.cache_records)
    if name == LEARNED:
        return _learned(wanted.next_use)
    return ONLINE_EVICTION[name]()
