"""Named sets of switches, papers and baselines, and the way from names and switches to an `EngineConfig`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from smoe.bounds import BF16, OWNERS, belongs_to
from smoe.config import DEFAULT_ALPHA, EngineConfig
from smoe.cpu_isa import max_cpu_isa
from smoe.errors import ConfigError
from smoe.policy.registry import EXPERT_MLP, SHADOW
from smoe.unknown_setting import SETTINGS, unknown_setting

PRESETS: dict[str, dict[str, Any]] = {
    "exact": {},
    "lru": {"eviction": "lru", "prefetch": "none"},
    "lfu": {"eviction": "lfu", "prefetch": "none"},
    "static": {"eviction": "lru", "prefetch": "none", "balance": "host"},
    "mixtral-offloading": {"eviction": "lru", "prefetch": "next-gate"},
    "hybrimoe": {"eviction": "score", "prefetch": "next-gate", "balance": "optimal"},
    "score": {"eviction": "score", "prefetch": "none"},
    "smoe": {
        "eviction": "score",
        "alpha": DEFAULT_ALPHA,
        "alpha_as_priced": True,
        "prefetch": "auto",
        "balance": "auto",
    },
    "smoe-exact": {"eviction": "score", "prefetch": "auto", "balance": "auto"},
    "balanced": {
        "low_precision": "int4",
        "max_perplexity_increase": 0.01,
        "prefetch": "auto",
        "balance": "auto",
    },
    "accelerate": {"expert_cache": "top-k", "eviction": "lru", "prefetch": "none"},
    "moesys": {"expert_cache": "top-k", "eviction": "lru", "prefetch": "whole-layer", "prefetch_trial": False},
    "duoserve": {
        "expert_cache": "top-k",
        "eviction": "lru",
        "prefetch": EXPERT_MLP,
        "prefetch_asked": "first-expert",
        "prefetch_trial": False,
    },
    "od-moe": {
        "placement": "round-robin",
        "eviction": "lru",
        "prefetch": SHADOW,
        "shadow_precision": "int8",
        "shadow_departure": "late",
        "prefetch_trial": False,
    },
    "cluster": {
        "placement": "finish",
        "prefetch": SHADOW,
        "shadow_precision": "int4",
        "prefetch_trial": False,
    },
    "hobbit": {
        "eviction": "multidimensional",
        "prefetch": "stacked-gates",
        "low_precision": "int4",
        "precision_shares": (67.0, 30.0, 3.0),
        "low_threshold": 0.6,
        "skip_threshold": 0.9,
    },
}
"""Named sets of switches: papers and baselines. Those with an `alpha` or thresholds are lossy.

`static` (llama.cpp's and Fiddler's split): what prefill has left on the device stays there, the CPU computes the rest.
`hybrimoe`: its score-aware cache, its schedule of CPU and device and a prefetch between layers (arXiv 2504.05897), as
far as our own parts make them up.
`duoserve` (DuoServe-MoE): the slots of one token's choice, a prompt that streams through two, in decode what a network
guesses concurrently with the experts, once it is trained on the user's own traces. `accelerate`, `moesys`: its
baselines (section 6.1), experts on demand, or all of the next layer's ahead.
`od-moe` (OD-MoE): a cluster whose main machine keeps no experts; groups of workers take turns at the layers, and are
informed in advance by a draft model in int8. `cluster`: ours; every expert where it is done first, and workers keep
what a shadow in int4 expects next.
`hobbit` (arXiv 2411.01433): its shares where the model has a profile, else the thresholds that it has for Mixtral."""
LOW_COPIES = (
    "low_precision",
    "low_share",
    "low_threshold",
    "skip_threshold",
    "precision_shares",
    "low_meanwhile",
    "upgrade",
)
"""Settings by which missing experts of little importance come in fewer bits, or not at all."""


def configure(preset: str = "exact", **switches: Any) -> EngineConfig:
    """A preset with single switches on top; switches that are None keep the preset's value.

    An alpha that is given is meant as it is, whatever the model has been priced for, and so are thresholds of
    importance, whatever its profile; shares that are given need a profile.
    """
    max_cpu_isa()  # what cannot be understood is refused also where nothing would ask
    if preset not in PRESETS:
        raise ConfigError.no_choice("preset", preset, PRESETS)
    for name in sorted(switches.keys() - SETTINGS):
        raise unknown_setting(name, switches[name])
    given = {name: value for name, value in switches.items() if value is not None}
    if given.get("activations") == "dtype":
        given["activations"] = BF16
    if "tpot_seconds" in given and "max_perplexity_increase" not in given:
        given = {"max_perplexity_increase": None} | given  # the preset's
    if "prefetch" in given:  # what the preset has for another one has no effect
        others = [name for name in PRESETS[preset] if OWNERS.get(name) == "prefetch"]
        given = {name: None for name in others if not belongs_to(name, given["prefetch"])} | given
    if "alpha" in given:
        given = {"alpha_as_priced": False} | given
    thresholds = [name for name in ("low_threshold", "skip_threshold") if name in given]
    if "precision_shares" in given and thresholds:
        raise ConfigError(
            f"`precision_shares` and `{thresholds[0]}` both choose the missing experts that are loaded as low copies; "
            "leave out one of the two",
            setting=thresholds[0],
            given=given[thresholds[0]],
            allowed="only without `precision_shares`",
        )
    if "precision_shares" in given:
        given = dict.fromkeys(("low_threshold", "skip_threshold"), 1.0) | given
    elif thresholds:
        given = {"precision_shares": None} | given
    return EngineConfig(**(PRESETS[preset] | given))


def without_low_copies(config: EngineConfig) -> EngineConfig:
    """The same, with every expert served by its own copy."""
    return replace(config, **{name: getattr(EngineConfig, name) for name in LOW_COPIES})
