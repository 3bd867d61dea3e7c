"""The allowed values of every setting of `EngineConfig`, and the settings that need another one."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from smoe.policy.balance import BALANCE, BALANCE_ORDER
from smoe.policy.placement import PLACEMENT
from smoe.policy.planner import PREFILL_KEEP
from smoe.policy.prediction import ASKED
from smoe.policy.registry import (
    CACHE_RECORDS,
    EXPERT_CACHE,
    ONLINE_EVICTION,
    POOLS,
    PREFETCH,
    PREFETCH_WHAT,
    are_cache_weights,
    eviction_kind,
    predictor_kind,
)

MOST_THREADS = 1024
"""The limit of computing threads. The largest machines have fewer cores, and torch ends the process if it cannot start
its threads."""
MOST_IO_THREADS = 64
"""The limit of reading threads; two saturate a disk."""
MOST_PREFETCH_DEPTH = 16
"""The limit of layers to predict in advance; the papers use up to three."""
DEFAULT_PREFETCH_DEPTH = 2
MOST_CORRECTED_LAYERS = 4
"""The number of layers in advance for which corrections are learned."""
DEFAULT_LOW_SHARE = 0.15
DEFAULT_SHADOW = "int4"
"""The default precision of the draft model."""
DEPARTURE = ("at-once", "late")
"""When the draft model begins the next token: at once, from its own prediction, or late, once the model has sampled
it."""
SHADOW_ON = ("main", "cluster")
"""Where the draft model runs: on a thread of the coordinator ("main"), or on a machine of the cluster."""
MOST_SHADOW_SPARES = 64
EMULATED = "emulated"
"""The device that is emulated on the CPU (`memory/emulation.py`)."""
DTYPES = ("auto", "bfloat16", "float16", "float32")
DIRECT_IO = ("auto", "on", "off")
KERNELS = ("auto", "native", "own-order", "torch")
DENSE_PRECISION = ("as-stored", "dtype")
PRECISION = ("auto", "int8", "int4", "int3", "int2")
LOW_PRECISION = ("none", *PRECISION[1:])
AUTO, INT8, BF16 = ACTIVATIONS = ("auto", "int8", "bf16")
SUBSTITUTES = ("replace", "drop")
SUBSTITUTE_WEIGHTS = ("own", "inherited")
COUNTS = ("budget", "process")
"""What `memory_bytes` limits: the budget, or the whole process with interpreter and libraries."""
CHOICES: dict[str, tuple[str, ...]] = {
    "count": COUNTS,
    "dtype": DTYPES,
    "eviction": ONLINE_EVICTION,
    "cache_records": CACHE_RECORDS,
    "pools": POOLS,
    "expert_cache": EXPERT_CACHE,
    "prefetch": PREFETCH,
    "prefetch_asked": tuple(ASKED),
    "prefetch_what": PREFETCH_WHAT,
    "balance": BALANCE,
    "balance_order": BALANCE_ORDER,
    "placement": PLACEMENT,
    "prefill_keep": PREFILL_KEEP,
    "dense_precision": DENSE_PRECISION,
    "precision": PRECISION,
    "low_precision": LOW_PRECISION,
    "shadow_precision": PRECISION[1:],
    "shadow_departure": DEPARTURE,
    "shadow_on": SHADOW_ON,
    "activations": ACTIVATIONS,
    "direct_io": DIRECT_IO,
    "kernels": KERNELS,
    "substitutes": SUBSTITUTES,
    "substitute_weights": SUBSTITUTE_WEIGHTS,
}
"""The allowed values of settings that are strings."""
LIMITS: dict[str, tuple[int, int | None]] = {
    "memory_bytes": (1, None),
    "host_memory_bytes": (1, None),
    "context_tokens": (1, None),
    "max_sequences": (1, None),
    "prefill_tokens": (1, None),
    "threads": (1, MOST_THREADS),
    "io_threads": (1, MOST_IO_THREADS),
    "prefetch_depth": (1, MOST_PREFETCH_DEPTH),
    "score_window": (0, None),
    "recent_costs": (1, None),
    "emulated_expert_bytes": (1, None),
    "cluster_workers": (0, 1000),
    "shadow_spares": (0, MOST_SHADOW_SPARES),
}
"""The least and greatest values (None: no limit) of settings that are integers."""
NUMBERS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "resident_share": ("a number above 0 and at most 1", lambda value: 0 < value <= 1),
    "dilation": ("a number of at least 1", lambda value: value >= 1),
    "alpha": ("a number from 0 (exact) to 1", lambda value: 0 <= value <= 1),
    "low_share": ("a number above 0 and below 1", lambda value: 0 < value < 1),
    "low_threshold": ("a number from 0 to 1 (exact)", lambda value: 0 <= value <= 1),
    "skip_threshold": ("a number from 0 to 1 (exact)", lambda value: 0 <= value <= 1),
    "max_perplexity_increase": ("a number above 0 and at most 1 (0.01 is 1 %)", lambda value: 0 < value <= 1),
    "tpot_seconds": ("a number of seconds above 0", lambda value: 0 < value < math.inf),
    "cluster_timeout_seconds": ("a number of seconds of at least 0", lambda value: 0 <= value < math.inf),
    "cluster_verify": ("a number from 0 (none) to 1 (all), as 1/64", lambda value: 0 <= value <= 1),
    "turn_timeout_seconds": ("a number of seconds of at least 0", lambda value: 0 <= value < math.inf),
    "cache_weights": ("four numbers of at least 0 whose sum is 1, for lru, lfu, lhu and fld", are_cache_weights),
    "precision_shares": (
        "three numbers whose sum is 100, for own copies, low copies (above 0) and none, as 67, 30, 3",
        lambda value: len(value) == 3 and min(value) >= 0 < value[1] and math.isclose(sum(value), 100),
    ),
}
KINDS: dict[str, Callable[[str], type[Any]]] = {"eviction": eviction_kind, "prefetch": predictor_kind}
"""For settings whose values name classes, the function that returns a value's class. Plug-ins add values. The attribute
`settings` of a class lists the settings that apply to it."""
OWNERS = {
    "dilation": "device",
    "emulated_expert_bytes": "device",
    "prefetch_depth": "prefetch",
    "prefetch_asked": "prefetch",
    "shadow_precision": "prefetch",
    "shadow_departure": "prefetch",
    "shadow_on": "prefetch",
    "shadow_spares": "prefetch",
    "cache_weights": "eviction",
    "cache_records": "eviction",
}
"""The settings that have an effect only with certain values of another setting, their owner."""


def belongs_to(setting: str, value: str) -> bool:
    """Return whether a setting of `OWNERS` has an effect if its owner has this value."""
    owner = OWNERS[setting]
    return setting in KINDS[owner](value).settings if owner in KINDS else value == EMULATED


def values_of_owner(setting: str) -> list[str]:
    """Return the owner's values with which a setting of `OWNERS` has an effect."""
    owner = OWNERS[setting]
    return [value for value in CHOICES.get(owner, (EMULATED,)) if belongs_to(setting, value)]


SWITCHES = (
    "preload",
    "lend_reserve",
    "prefetch_trial",
    "prefill_balance",
    "alpha_as_priced",
    "share_substitutes",
    "low_meanwhile",
    "upgrade",
    "reproducible",
)
"""The settings that are true or false."""


def allowed_of(setting: str) -> str:
    """Return a description of the allowed values of a setting of `EngineConfig`."""
    if setting in CHOICES:
        return ", ".join(CHOICES[setting])
    if setting in LIMITS:
        least, most = LIMITS[setting]
        of_bytes = " of bytes" if setting.endswith("_bytes") else ""
        return f"a whole number{of_bytes} " + (f"of at least {least}" if most is None else f"from {least} to {most}")
    return "true or false" if setting in SWITCHES else NUMBERS[setting][0]


def is_allowed(setting: str, value: Any) -> bool:
    """Return whether a setting of `EngineConfig` may have a value. Whether None is allowed depends on the setting's
    default, which is not checked here."""
    if setting in CHOICES:
        return value in CHOICES[setting]
    if setting in SWITCHES:
        return isinstance(value, bool)
    if isinstance(value, bool):
        return False
    if setting in LIMITS:
        least, most = LIMITS[setting]
        return isinstance(value, int) and least <= value and (most is None or value <= most)
    kind = tuple if setting in ("cache_weights", "precision_shares") else (int, float)
    return isinstance(value, kind) and NUMBERS[setting][1](value)
