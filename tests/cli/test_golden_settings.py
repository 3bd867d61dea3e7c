"""What users see of settings: options with their help, `--set help`, and errors, as in `golden_settings.txt`.

Would catch a text that changes unintentionally. After an intended change: `python -m tests.cli.test_golden_settings`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

from smoe.cli.options import EngineOptions
from smoe.cli.settings import listing, option_of
from smoe.config import EngineConfig
from smoe.errors import SmoeError
from smoe.presets import PRESETS, configure

GOLDEN = Path(__file__).with_name("golden_settings.txt")
TOGETHER: list[dict[str, Any]] = [
    {"memory_bytes": 1 << 30, "resident_share": 0.4},
    {"count": "process"},
    {"count": "process", "memory_bytes": 1 << 30, "device": "cuda"},
    {"dilation": 2.0},
    {"emulated_expert_bytes": 9},
    {"prefetch_depth": 2},
    {"prefetch_depth": 2, "prefetch": "next-gate"},
    {"prefetch_asked": "concurrent"},
    {"prefetch_asked": "concurrent", "prefetch": "draft-model"},
    {"draft_precision": "int4"},
    {"draft_start": "late"},
    {"draft_on": "coordinator"},
    {"draft_extra": 1},
    {"prefetch": "draft-model", "precision": "int4"},
    {"prefetch": "draft-model", "precision": "int4", "draft_precision": "int8"},
    {"cache_weights": (1.0, 0.0, 0.0, 0.0)},
    {"cache_records": "model", "eviction": "lru"},
    {"expert_cache": "top-k", "resident_share": 0.4},
    {"expert_cache": "top-k", "low_precision": "int4"},
    {"device": "cpu", "balance": "optimal"},
    {"reproducible": True, "alpha": 0.3, "eviction": "lru"},
    {"cluster": "home", "balance": "optimal"},
    {"cluster": "home", "reproducible": True, "alpha": 0.3, "eviction": "score"},
    {"cluster": "home", "device": "emulated"},
    {"cluster": "home", "max_perplexity_increase": 0.01},
    {"low_threshold": 0.5},
    {"precision_shares": (67.0, 30.0, 3.0)},
    {"low_meanwhile": True},
    {"upgrade": True},
    {"low_share": 0.5},
    {"low_precision": "int4", "precision": "int4"},
    {"low_precision": "int4", "low_threshold": 0.9, "skip_threshold": 0.5},
    {"max_perplexity_increase": 0.01, "tpot_seconds": 0.1},
    {"max_perplexity_increase": 0.01, "alpha": 0.3},
    {"tpot_seconds": 0.1, "reproducible": True},
    {"tpot_seconds": 0.1, "skip_threshold": 0.5},
    {"activations": "int8", "device": "cuda"},
    {"activations": "int8", "kernels": "torch"},
    {"activations": "int8", "dtype": "float32"},
    {"eviction": "belady"},
    {"eviction": "nothing:Here"},
    {"prefetch": "nothing:Here"},
]
"""Settings that do not go together."""
TYPED: list[dict[str, Any]] = [
    {"alpha": 0.3, "preset": "smoe-exact"},
    {"profile": "rtx-3090"},
    {"memory": "1GiB", "process_memory": "2GiB"},
    {"memory": "12"},
    {"resident": "140%"},
    {"low_precision": "int4", "low_share": "x"},
    {"low_precision": "int4", "precision_shares": "1,2"},
    {"low_precision": "int4", "precision_shares": "1,2,3"},
    {"low_precision": "int4", "precision_shares": "67,30,3", "low_threshold": 0.5},
    {"low_precision": "int4", "low_threshold": 0.9, "skip_threshold": 0.9},
    {"max_perplexity_increase": "60%"},
    {"max_perplexity_increase": "x"},
    {"preset": "nothing"},
    {"settings": ["nothing=1"]},
    {"settings": ["io_threads=two"]},
    {"settings": ["eviction=lru"]},
    {"context": 0},
]
"""Options that are refused."""
CONFIGURED: list[dict[str, Any]] = [
    {},
    {"preset": "hobbit", "prefetch": "none"},
    {"preset": "hobbit", "low_threshold": 0.5},
    {"preset": "hobbit", "skip_threshold": 0.95},
    {"preset": "hobbit", "precision_shares": (60.0, 30.0, 10.0)},
    {"preset": "smoe", "alpha": 0.2},
    {"preset": "balanced", "tpot_seconds": 0.1},
    {"preset": "duoserve", "prefetch": "next-gate"},
    {"preset": "od-moe", "prefetch": "auto"},
    {"activations": "dtype"},
]
"""Settings that change others of a preset."""


def lines() -> Iterator[str]:
    """What is compared."""
    yield "= options"
    hints = get_type_hints(EngineOptions, include_extras=True)
    for field in fields(EngineOptions):
        kind, option = get_args(hints[field.name])
        name = " ".join(option.param_decls or ["--" + field.name.replace("_", "-")])
        yield f"{name} <{option.metavar or kind}> [{option.rich_help_panel}] ({field.default}) {option.help}"
    yield "= --set help"
    yield from listing(100).splitlines()
    yield "= how each setting is given, and what it can be"
    for field in sorted(fields(EngineConfig), key=lambda field: field.name):
        yield f"{field.name} {option_of(field.name)} ({field.default})"
        if field.name not in ("device", "profile", "cluster"):
            yield refused(lambda name=field.name: EngineConfig(**{name: ["x"]}))
    yield "= settings that do not go together"
    for given in TOGETHER:
        yield refused(lambda given=given: EngineConfig(**given))
    yield "= options that are refused"
    for given in TYPED:
        yield refused(lambda given=given: EngineOptions(**given).config())
    yield "= presets and what changes them"
    for given in [{"preset": name} for name in PRESETS] + CONFIGURED:
        config = configure(**given)
        changed = {f.name: v for f in fields(config) if (v := getattr(config, f.name)) != f.default}
        yield f"{given}: {dict(sorted(changed.items()))}"


def refused(act: Any) -> str:
    """The error in a line, with what it says to programs."""
    try:
        act()
    except SmoeError as error:
        return f"    {type(error).__name__}: {error} {error.facts}"
    return "    nothing is refused"


def test_what_users_see_is_as_before() -> None:
    difference = difflib.unified_diff(GOLDEN.read_text(encoding="utf8").splitlines(), [*lines()], "was", "is", n=0)
    assert not [*difference]


if __name__ == "__main__":
    GOLDEN.write_text("\n".join(lines()) + "\n", encoding="utf8")
