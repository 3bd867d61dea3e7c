"""The names of policies, and where their classes are; the classes declare their needs.

A new policy is one file and one line here. A class is imported when its name is looked up, so that `--help` imports
neither NumPy nor torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from smoe.errors import ConfigError
from smoe.expert import EXACT
from smoe.plug_ins import Catalogue
from smoe.policy.eviction.base import Eviction, EvictionSettings
from smoe.policy.eviction.lru import LRU
from smoe.policy.eviction.pools import FormPools, LayerPools, SizePools
from smoe.policy.prediction import PredictorKind
from smoe.policy.residency import PoolSize

_LIVE = {
    "auto": "smoe.policy.eviction.auto:Adaptive",
    "lru": "smoe.policy.eviction.lru:LRU",
    "lfu": "smoe.policy.eviction.lfu:LFU",
    "score": "smoe.policy.eviction.score:ScoreWindow",
    "multidimensional": "smoe.policy.eviction.multidimensional:Multidimensional",
    "learned": "smoe.policy.eviction.learned:Learned",
}
_REPLAYED = {
    "random": "smoe.policy.eviction.random_choice:RandomChoice",
    "belady": "smoe.policy.eviction.belady:Belady",
}
EVICTIONS: Catalogue[Eviction] = Catalogue("eviction", "smoe.evictions", Eviction, _LIVE | _REPLAYED)
"""All policies: a replay can use any of them."""
LIVE_EVICTIONS: Catalogue[Eviction] = Catalogue("eviction", "smoe.evictions", Eviction, _LIVE)
"""The policies that can serve live requests."""
ONLINE_EVICTION = tuple(_LIVE)
"""The names of the built-in policies that can serve live requests."""
EVICTION = tuple(EVICTIONS.built_in)
"""The names of all built-in policies, including those for comparisons in the simulator only."""
LEARNED = "learned"
"""The policy that is trained on traces of the model."""

CACHE_RECORDS = ("sequence", "model")
"""The period over which the multidimensional cache counts uses: this sequence, or since the model was loaded."""

_ROUNDING = 1e-3
"""The amount by which cache weights may fail to sum to 1: people write 0.33."""

EXPERT_MLP = "expert-mlp"
"""The network that is trained on recorded paths (DuoServe)."""
CORRECTED_GATES = "corrected-gates"
"""The prefetch by routers of later layers with corrections that are learned from text."""
DRAFT = "draft-model"
"""The prefetch by a draft model, a copy of the model in fewer bits that decodes concurrently (OD-MoE)."""

PREDICTORS: Catalogue[PredictorKind] = Catalogue(
    "prefetch",
    "smoe.predictors",
    PredictorKind,
    {
        "next-gate": "smoe.prediction.kinds:NextGateKind",
        "look-ahead": "smoe.prediction.kinds:LookAheadKind",
        "stacked-gates": "smoe.prediction.kinds:StackedGatesKind",
        CORRECTED_GATES: "smoe.prediction.kinds:CorrectedGatesKind",
        "whole-layer": "smoe.prediction.whole_layer:WholeLayer",
        DRAFT: "smoe.prediction.kinds:DraftKind",
        "previous-token": "smoe.prediction.previous_token:PreviousToken",
        "popularity": "smoe.prediction.popularity:Popularity",
        "affinity": "smoe.prediction.affinity:Affinity",
        "activation-matrix": "smoe.prediction.activation_matrix:ActivationMatrix",
        EXPERT_MLP: "smoe.prediction.kinds:ExpertMLPKind",
    },
)
"""Predictors for later layers in decode. next-gate: the next layer's router on this layer's input; look-ahead: its
attention and router on the output of the resident experts; stacked-gates: the routers of several layers on this layer's
input; corrected-gates: the same with learned corrections; whole-layer: every expert of the next layer; draft: a draft
model; previous-token: the layer's choice for the last token. Those that must be fitted on a trace of the model predict
by how often a layer chooses an expert (popularity), by which experts followed those of the layer before (affinity), by
the most similar past sequence (activation-matrix), by a network (expert-mlp)."""
NO_PREDICTOR = ("auto", "none")
"""Values of the setting that name no predictor. auto: what is fastest; none: no predictions."""
PREFETCH = (*NO_PREDICTOR, *PREDICTORS.built_in)

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


def eviction_kind(name: str) -> type[Eviction]:
    """Return the class of a policy for live requests; raise `ConfigError` if there is none of that name."""
    found = (EVICTIONS if name in _REPLAYED else LIVE_EVICTIONS).find(name)
    if found.only_replayed:
        live = LIVE_EVICTIONS.allowed
        raise ConfigError(
            f"`eviction` is {name!r} ({name} {found.only_replayed}: use it in the simulator); choose one of: {live}",
            setting="eviction",
            given=name,
            allowed=live,
        )
    return found


def predictor_kind(prefetch: str) -> type[PredictorKind]:
    """Return the class for a value of the setting `prefetch`; `auto` and `none` have the class without needs."""
    return PredictorKind if prefetch in NO_PREDICTOR else PREDICTORS.find(prefetch)


def fitted_names() -> tuple[str, ...]:
    """Return the names of the built-in predictors that are fitted on traces of a model."""
    return tuple(name for name in PREDICTORS.built_in if PREDICTORS.find(name).is_fitted)


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
    return eviction_kind(wanted.name).of_settings(wanted)
