"""The names of policies and predictors, and where their classes are. The classes declare what they need.

A new policy is one file and one line here. A class is imported when its name is looked up, so that `--help` imports
neither NumPy nor torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from smoe.errors import ConfigError
from smoe.expert import EXACT
from smoe.plug_ins import Catalogue
from smoe.policy.eviction.base import Eviction, EvictionSettings
from smoe.policy.eviction.lru import LRU
from smoe.policy.eviction.policies import LIVE, REPLAYED
from smoe.policy.eviction.pools import FormPools, LayerPools, SizePools
from smoe.policy.prediction import Predictor, PredictorKind
from smoe.policy.residency import PoolSize

EVICTIONS: Catalogue[Eviction] = Catalogue("eviction", "smoe.evictions", Eviction, LIVE | REPLAYED)
"""All eviction policies. A replay can use any of them."""
LIVE_EVICTIONS: Catalogue[Eviction] = Catalogue("eviction", "smoe.evictions", Eviction, LIVE)
"""The eviction policies that can serve live requests."""
ONLINE_EVICTION = tuple(LIVE)
"""The names of the built-in eviction policies that can serve live requests."""
EVICTION = tuple(EVICTIONS.built_in)
"""The names of all built-in eviction policies, including those for comparisons in the simulator only."""
LEARNED = "learned"
"""The eviction policy that is trained on traces of the model."""

EXPERT_MLP = "expert-mlp"
"""The predictor that is a network, trained on recorded routing (DuoServe)."""
CORRECTED_GATES = "corrected-gates"
"""The predictor that runs later layers' routers with corrections learned from text."""
DRAFT = "draft-model"
"""The prefetch by a draft model, a copy of the model in fewer bits that decodes concurrently (OD-MoE)."""

_FITTED = {
    "popularity": "smoe.prediction.popularity:Popularity",
    "affinity": "smoe.prediction.affinity:Affinity",
    "activation-matrix": "smoe.prediction.activation_matrix:ActivationMatrix",
    EXPERT_MLP: "smoe.prediction.kinds:ExpertMLPKind",
}
FITTED = tuple(_FITTED)
"""The names of the built-in predictors that must be fitted on traces of the model."""
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
        **_FITTED,
    },
    derive_from=Predictor,
)
"""Predictors of later layers' experts in decode.

Without training: next-gate applies the next layer's router to this layer's input; look-ahead runs the next layer's
attention and router on the output of the resident experts; stacked-gates applies the routers of several later layers to
this layer's input; whole-layer predicts every expert of the next layer; draft-model is a draft model (a copy of the
model in fewer bits); previous-token repeats the layer's choice for the last token.

With training on text: corrected-gates is stacked-gates with learned corrections. Fitted to a trace of the model:
popularity predicts the experts that the layer chooses most often; affinity those that most often follow the experts of
the layer before; activation-matrix those of the most similar past sequence; expert-mlp is a network.
"""
NO_PREDICTOR = ("auto", "none")
"""Values of the setting `prefetch` that are not names of predictors. auto: the fastest; none: no predictions."""
PREFETCH = (*NO_PREDICTOR, *PREDICTORS.built_in)
_PREFETCHES = replace(PREDICTORS, others=NO_PREDICTOR)
"""The predictors, for the setting `prefetch`. A replay has no `auto` and `none`."""

PREFETCH_WHAT = ("top-score", "chosen")
"""Which predicted experts are prefetched. chosen: all (SMoE's first version); top-score: only those of high score (its
second version)."""


EXPERT_CACHE = ("budget", "top-k")
"""How many slots there are. budget: as many as the budget allows. top-k: as in systems without an expert cache, the
slots for one token's choice in one layer, and the staging slots."""
POOLS = ("global", "layer")
"""Which layers share slots. global: all; layer: none, each layer has an equal share."""


def eviction_kind(name: str) -> type[Eviction]:
    """Return the class of an eviction policy for live requests. Raise `ConfigError` if there is none of this name."""
    found = (EVICTIONS if name in REPLAYED else LIVE_EVICTIONS).find(name)
    if found.only_replayed:
        live = LIVE_EVICTIONS.allowed
        raise ConfigError(
            f"`eviction` is {name!r} ({name} {found.only_replayed}: use it in smoe replay); choose one of: {live}",
            setting="eviction",
            given=name,
            allowed=live,
        )
    return found


def predictor_kind(prefetch: str) -> type[PredictorKind]:
    """Return the class of the predictor that a value of the setting `prefetch` names. For `auto` and `none` it is a
    class that needs nothing."""
    return PredictorKind if prefetch in NO_PREDICTOR else _PREFETCHES.find(prefetch)


def make_eviction_for(wanted: EvictionSettings, sizes: Sequence[PoolSize], experts: Mapping[int, int]) -> Eviction:
    """Return a new eviction policy for live requests. `sizes`: the slots of each size; `experts`: {layer: number of
    experts}.

    If some slots hold low-precision copies, each format has its own policy.
    """
    forms = sorted({size.form for size in sizes})
    of_form = {form: _make_sizes(wanted, [size for size in sizes if size.form == form], experts) for form in forms}
    return of_form[EXACT] if forms == [EXACT] else FormPools(of_form)


def _make_sizes(wanted: EvictionSettings, sizes: Sequence[PoolSize], experts: Mapping[int, int]) -> Eviction:
    """Return a new policy for slots that hold copies of one format, in pools of one or several slot sizes."""
    if len(sizes) == 1:
        return make_pools(wanted, sizes[0].cache, len(experts), sum(experts.values()))
    by_layer: dict[int, Eviction] = {}
    for size in sizes:
        count = sum(experts[layer] for layer in size.layers)
        by_layer |= dict.fromkeys(size.layers, make_pools(wanted, size.cache, len(size.layers), count))
    return SizePools(by_layer)


def make_pools(wanted: EvictionSettings, cache_slots: int, layers: int, experts: int | None = None) -> Eviction:
    """Return a new eviction policy for live requests. Its `cache_slots` slots of one size are used by `layers` layers.

    `experts`: the number of experts of these layers. If all experts fit in the slots, nothing is ever evicted, and
    `auto` means the cheapest policy, LRU.
    """
    if wanted.name == "auto" and experts is not None and cache_slots >= experts:
        return LRU()
    if wanted.pools == "global":
        return _make(wanted)
    return LayerPools(partial(_make, wanted), max(1, cache_slots // layers))


def make_eviction(name: str) -> Eviction:
    """Return a new eviction policy for live requests by name, with default settings."""
    return _make(EvictionSettings(name))


def _make(wanted: EvictionSettings) -> Eviction:
    return eviction_kind(wanted.name).of_settings(wanted)
