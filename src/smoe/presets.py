"""Named sets of switches, papers and baselines, and the way from names and switches to an `EngineConfig`."""

from __future__ import annotations

from dataclasses import fields, replace
from difflib import get_close_matches
from typing import Any

from smoe.config import DEFAULT_ALPHA, EngineConfig, max_cpu_isa
from smoe.errors import ConfigError

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
    "hobbit": {
        "eviction": "multidimensional",
        "prefetch": "stacked-gates",
        "low_precision": "int4",
        "low_threshold": 0.6,
        "skip_threshold": 0.9,
    },
}
"""Named sets of switches: papers and baselines. Those with an `alpha` or thresholds are lossy.

`static` (llama.cpp's and Fiddler's split): what prefill has left on the device stays there, the CPU computes the rest.
`hybrimoe`: its score-aware cache, its schedule of CPU and device and a prefetch between layers (arXiv 2504.05897), as
far as our own parts make them up."""


def configure(preset: str = "exact", **switches: Any) -> EngineConfig:
    """A preset with single switches on top; switches that are None keep the preset's value.

    An alpha that is given is meant as it is, whatever the model has been priced for.
    """
    max_cpu_isa()  # what cannot be understood is refused also where nothing would ask
    if preset not in PRESETS:
        raise ConfigError.no_choice("preset", preset, PRESETS)
    known = {field.name for field in fields(EngineConfig)}
    unknown = sorted(switches.keys() - known)
    if unknown:
        near = get_close_matches(unknown[0], known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}? " if near else ""
        names = ", ".join(sorted(known))
        raise ConfigError(
            f"unknown setting {unknown[0]!r}; {hint}known settings are: {names}",
            setting=unknown[0],
            given=switches[unknown[0]],
            allowed=f"settings are {names}",
        )
    given = {name: value for name, value in switches.items() if value is not None}
    if "alpha" in given:
        given = {"alpha_as_priced": False} | given
    return replace(EngineConfig(**PRESETS[preset]), **given)
