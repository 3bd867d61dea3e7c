"""Named combinations of settings, from papers or as baselines, and `configure`, which makes an `EngineConfig`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from smoe.config import DEFAULT_ALPHA, SETTINGS, EngineConfig, belongs_to
from smoe.cpu_isa import max_cpu_isa
from smoe.errors import ConfigError
from smoe.former_names import present_names
from smoe.policy.registry import DRAFT, EXPERT_MLP
from smoe.unknown_setting import unknown_setting

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
        "prefetch": DRAFT,
        "draft_precision": "int8",
        "draft_start": "late",
        "prefetch_trial": False,
    },
    "cluster": {
        "placement": "finish",
        "prefetch": DRAFT,
        "draft_precision": "int4",
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
"""Named combinations of settings, from papers or as baselines. Those with an `alpha` or thresholds are lossy.

`static` (the division of llama.cpp and Fiddler): experts that prefill has left on the device stay there, and the CPU
computes the others. `hybrimoe` (arXiv 2504.05897): a score-aware cache, a schedule for CPU and device and a prefetch
between layers, as far as smoe's own parts can imitate them.

`duoserve` (DuoServe-MoE): slots for one token's choices only; a prompt uses two slots in turn; in decode a network,
trained on the user's traces, predicts concurrently with the experts. `accelerate` and `moesys` are its baselines
(section 6.1): experts on demand, or all experts of the next layer in advance.

`od-moe` (OD-MoE): a cluster whose coordinator keeps no experts. Groups of workers take turns at the layers, and an int8
draft model predicts for them. `cluster`: smoe's own; every expert is computed where it will be finished first, and
workers keep the experts that an int4 draft model predicts.

`hobbit` (arXiv 2411.01433): its shares if the model has an importance profile, else its thresholds for Mixtral.
"""
LOW_COPIES = (
    "low_precision",
    "low_share",
    "low_threshold",
    "skip_threshold",
    "precision_shares",
    "low_meanwhile",
    "upgrade",
)
"""The names of the settings that decide which missing experts are computed in fewer bits, or dropped."""


def configure(preset: str = "exact", **switches: Any) -> EngineConfig:
    """Return the configuration of a preset, with the settings in `switches` in place of the preset's. A setting that is
    None stays as in the preset. Raise `ConfigError` for unknown names and values.

    A given `alpha` or threshold takes precedence over values measured for the model. Given `precision_shares` need an
    importance profile of the model.
    """
    max_cpu_isa()  # an invalid SMOE_MAX_CPU_ISA is refused even if nothing uses it
    if preset not in PRESETS:
        raise ConfigError.no_choice("preset", preset, PRESETS)
    switches = present_names(switches)
    for name in sorted(switches.keys() - SETTINGS):
        raise unknown_setting(name, switches[name])
    given = {name: value for name, value in switches.items() if value is not None}
    thresholds = [name for name in ("low_threshold", "skip_threshold") if name in given]
    if "precision_shares" in given and thresholds:
        raise ConfigError(
            f"`precision_shares` and `{thresholds[0]}` both choose the missing experts that are loaded as "
            "low-precision copies; leave out one of the two",
            setting=thresholds[0],
            given=given[thresholds[0]],
            allowed="only without `precision_shares`",
        )
    replaced: dict[str, Any] = {}
    for name in given:
        replaced |= SETTINGS[name].replaces
        replaced |= {other: None for other in PRESETS[preset] if _is_idle(other, name, given[name])}
    return EngineConfig(**(PRESETS[preset] | replaced | given))


def _is_idle(setting: str, owner: str, value: Any) -> bool:
    """Return whether a preset's setting has no effect, because `owner`, the setting that it belongs to, is given with
    `value`."""
    is_owned = SETTINGS[setting].owner == owner and owner in ("eviction", "prefetch")
    return is_owned and not belongs_to(setting, value)


def exact(config: EngineConfig) -> EngineConfig:
    """Return the configuration without low-precision copies and substitution."""
    return replace(without_low_copies(config), alpha=0.0, alpha_as_priced=False)


def without_low_copies(config: EngineConfig) -> EngineConfig:
    """Return the configuration without low-precision copies."""
    return replace(config, **{name: getattr(EngineConfig, name) for name in LOW_COPIES})
