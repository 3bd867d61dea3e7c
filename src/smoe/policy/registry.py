"""Names of policies. Adding a policy is one file and one line here; unknown names raise and list what there is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from smoe.errors import ConfigError
from smoe.policy.eviction.base import Eviction
from smoe.policy.eviction.belady import Belady
from smoe.policy.eviction.lfu import LFU
from smoe.policy.eviction.lru import LRU
from smoe.policy.eviction.pools import LayerPools, SizePools
from smoe.policy.residency import PoolSize


def _score(window: int | None = None) -> Eviction:
    from smoe.policy.eviction.score import WINDOW, ScoreWindow  # brings NumPy, which `smoe --help` can do without

    return ScoreWindow(WINDOW if window is None else window)


def _adaptive() -> Eviction:
    from smoe.policy.eviction.auto import Adaptive  # NumPy, as above

    return Adaptive()


ONLINE_EVICTION: dict[str, Callable[[], Eviction]] = {"auto": _adaptive, "lru": LRU, "lfu": LFU, "score": _score}
"""Policies that can serve live requests."""

SCORED_EVICTION = ("score",)
"""Of these, the ones that need every expert's score."""

ORDERLESS_EVICTION = ("auto", "score")
"""Of these, the ones that rank by what the routers said alone, whatever order loads arrive in."""

EVICTION: dict[str, Callable[..., Eviction]] = {**ONLINE_EVICTION, "belady": Belady}
"""All policies, the offline ones (that need the future) included: for the simulator."""

PREFETCH = ("auto", "none", "next-gate", "look-ahead", "stacked-gates")
"""Predictors for later layers in decode: nothing; the next layer's router applied to this layer's input; its attention
and router run ahead on what the resident experts have given; the routers of several layers at once on this layer's
input; auto: what pays."""

SCORED_PREFETCH = ("stacked-gates",)
"""Of these, the ones that need to know how routers come from logits to a choice."""

PREFETCH_WHAT = ("top-score", "chosen")
"""SMoE's second version, and its first."""


POOLS = ("global", "layer")
"""One pool of slots for all layers, or a share for each."""


def make_eviction_for(
    name: str,
    pools: str,
    sizes: Sequence[PoolSize],
    experts: Mapping[int, int],
    score_window: int | None = None,
) -> Eviction:
    """A fresh online eviction policy over slots of these `sizes`; `experts` has the number of each layer's."""
    if len(sizes) == 1:
        return make_pools(name, pools, sizes[0].cache, len(experts), sum(experts.values()), score_window)
    by_layer: dict[int, Eviction] = {}
    for size in sizes:
        count = sum(experts[layer] for layer in size.layers)
        policy = make_pools(name, pools, size.cache, len(size.layers), count, score_window)
        by_layer |= dict.fromkeys(size.layers, policy)
    return SizePools(by_layer)


def make_pools(
    name: str,
    pools: str,
    cache_slots: int,
    layers: int,
    experts: int | None = None,
    score_window: int | None = None,
) -> Eviction:
    """A fresh online eviction policy over `cache_slots` slots of one size, of `layers` layers.

    Where all the layers' `experts` fit, nobody is ever forgotten: `auto` is then the policy that costs least.
    """
    if name == "auto" and experts is not None and cache_slots >= experts:
        return LRU()
    if pools == "global":
        return make_eviction(name, score_window)
    return LayerPools(partial(make_eviction, name, score_window), max(1, cache_slots // layers))


def make_eviction(name: str, score_window: int | None = None) -> Eviction:
    """A fresh online eviction policy by name; `score_window` is for the one that has one (None: the usual)."""
    if name not in ONLINE_EVICTION:
        known = ", ".join(ONLINE_EVICTION)
        hint = " (belady needs the future: use it in the simulator)" if name == "belady" else ""
        message = f"`eviction` is {name!r}{hint}; choose one of: {known}"
        raise ConfigError(message, setting="eviction", given=name, allowed=known)
    return _score(score_window) if name == "score" else ONLINE_EVICTION[name]()
