"""Names of policies. Adding a policy is one file and one line here; unknown names raise and list what there is."""

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
"""The one that combines four others (HOBBIT)."""
LEARNED = "learned"
"""The one that is trained on traces of the model."""

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
"""The ones of these that need every expert's score."""

ORDERLESS_EVICTION = ("auto", "score", MULTIDIMENSIONAL, LEARNED)
"""The ones of these that rank by what the routers chose alone, whatever order loads arrive in."""

EVICTION: dict[str, Callable[..., Eviction]] = {**ONLINE_EVICTION, "random": _random, "belady": Belady}
"""All policies, with those that only serve comparisons in the simulator."""

_OFFLINE = {"random": "is what others are compared with", "belady": "needs the future"}

CACHE_RECORDS = ("sequence", "model")
"""What the multidimensional cache counts: the uses in this sequence, or all since the model was loaded."""

_ROUNDING = 1e-3
"""The amount by which such weights may fail to sum to 1: people write 0.33."""

WHOLE_LAYER = "whole-layer"
"""The prefetch that brings in all experts of the next layer."""

EXPERT_MLP = "expert-mlp"
"""The network that is trained on recorded paths (DuoServe)."""

FITTED_PREFETCH = ("popularity", "affinity", "activation-matrix", EXPERT_MLP)
"""Predictors that see the history of routing alone, and have to be fitted on a trace of the model first: how often a
layer chooses an expert; what followed the experts of the layer before; the most similar past sequence; a network."""

SHADOW = "shadow"
"""The prefetch by a copy of the model in fewer bits that decodes concurrently (OD-MoE)."""

HISTORY_PREFETCH = ("previous-token", *FITTED_PREFETCH)
"""All that see nothing but what routers have chosen: any thread may ask them."""

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
"""Predictors for later layers in decode: nothing; the next layer's router applied to this layer's input; its attention
and router run ahead on what the resident experts have given; the routers of several layers at once on this layer's
input; the same with a correction learned from text; every expert of the next layer; a copy in fewer bits that runs
ahead; what the layer chose for the token before; the fitted ones; auto: what pays."""

SCORED_PREFETCH = ("stacked-gates", "corrected-gates", SHADOW)
"""The ones of these that need to know how routers come from logits to a choice."""

PREFETCH_WHAT = ("top-score", "chosen")
"""SMoE's second version, and its first."""


EXPERT_CACHE = ("budget", "top-k")
"""As many slots as the budget allows; or, as in systems without an expert cache, those of one token's choice in one
layer, and those through which others come."""
POOLS = ("global", "layer")
"""One pool of slots for all layers, or a share for each."""


def are_cache_weights(values: Sequence[float]) -> bool:
    """Whether these can be the weights of the multidimensional cache: four, none negative, together 1."""
    are_numbers = all(isinstance(value, (int, float)) and value >= 0 for value in values)
    return len(values) == 4 and are_numbers and abs(sum(values) - 1) < _ROUNDING


class EvictionSettings(NamedTuple):
    """The settings of `EngineConfig` that an eviction policy is made from; None: the usual."""

    name: str
    pools: str = "global"
    score_window: int | None = None
    cache_weights: Sequence[float] | None = None
    cache_records: str | None = None
    next_use: NextUse | None = None
    """What `learned` has learned of the model; None: nothing."""


def make_eviction_for(wanted: EvictionSettings, sizes: Sequence[PoolSize], experts: Mapping[int, int]) -> Eviction:
    """A fresh online eviction policy over slots of these `sizes`; `experts` has the number of each layer's.

    Where some slots hold low copies, there is a policy for each format.
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
    """A fresh online eviction policy over `cache_slots` slots of one size, of `layers` layers.

    Where all the layers' `experts` fit, nothing is ever evicted: `auto` is then the policy that costs least.
    """
    if wanted.name == "auto" and experts is not None and cache_slots >= experts:
        return LRU()
    if wanted.pools == "global":
        return _make(wanted)
    return LayerPools(partial(_make, wanted), max(1, cache_slots // layers))


def make_eviction(name: str) -> Eviction:
    """A fresh online eviction policy by name, with the usual settings."""
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
