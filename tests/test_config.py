"""Settings: bounds, unknown keys, presets."""

from __future__ import annotations

import ast
import inspect
from dataclasses import FrozenInstanceError, fields
from itertools import pairwise
from typing import Any

import pytest

from smoe.config import SETTINGS, EngineConfig
from smoe.cpu_isa import CPU_ISA
from smoe.errors import ConfigError
from smoe.presets import PRESETS, configure
from smoe.setting_declaration import Switch

COUNTS = ["memory_bytes", "host_memory_bytes", "context_tokens", "max_sequences", "prefill_tokens", "threads"]


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "8"])
@pytest.mark.parametrize("name", [*COUNTS, "io_threads"])
def test_counts_are_whole_and_positive(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        EngineConfig(**{name: value})


def test_an_unknown_cpu_isa_is_refused_whatever_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMOE_MAX_CPU_ISA", "avx3")
    with pytest.raises(ConfigError, match=f"SMOE_MAX_CPU_ISA is 'avx3'; choose one of: none, {CPU_ISA[1]}"):
        configure()
    monkeypatch.setenv("SMOE_MAX_CPU_ISA", f" {CPU_ISA[1].upper()}")
    configure()


@pytest.mark.parametrize("name", ["dtype", "eviction", "prefetch", "direct_io"])
def test_choices_are_listed(name: str) -> None:
    with pytest.raises(ConfigError, match=f"`{name}` is 'nonsense'; choose one of"):
        EngineConfig(**{name: "nonsense"})


def test_a_trial_is_on_off_or_left_to_the_prefetch() -> None:
    with pytest.raises(ConfigError, match="`prefetch_trial` is 'no'; it must be true or false"):
        EngineConfig(prefetch_trial="no")
    assert EngineConfig(prefetch_trial=None).prefetch_trial is None


@pytest.mark.parametrize("depth", [0, 17, 2.0, True])
def test_the_depth_of_a_prefetch_has_bounds(depth: Any) -> None:
    with pytest.raises(ConfigError, match=f"`prefetch_depth` is {depth}; it must be a whole number from 1 to 16"):
        EngineConfig(prefetch="stacked-gates", prefetch_depth=depth)


def test_only_what_sees_routing_alone_is_asked_beside_the_experts() -> None:
    """A gate is a part of the model, and the computing thread's; the preset's choice goes with its predictor."""
    refusal = "`prefetch_asked` has an effect only with `prefetch=previous-token` or popularity or affinity"
    for prefetch in ("auto", "none", "next-gate", "look-ahead", "whole-layer"):
        with pytest.raises(ConfigError, match=refusal):
            configure(prefetch=prefetch, prefetch_asked="concurrent")
        assert configure("duoserve", prefetch=prefetch).prefetch_asked is None
    assert configure("duoserve", prefetch="affinity").prefetch_asked == "first-expert"
    assert configure("duoserve", prefetch_asked="before").prefetch_asked == "before"
    assert configure(prefetch="expert-mlp").prefetch_asked is None


@pytest.mark.parametrize("preset", PRESETS)
def test_a_depth_without_the_prefetch_that_has_one_is_refused(preset: str) -> None:
    """Whatever the preset prefetches; would catch a depth that is silently without effect."""
    refusal = "`prefetch_depth` has an effect only with `prefetch=stacked-gates` or corrected-gates; add that"
    has_one = PRESETS[preset].get("prefetch") == "stacked-gates"
    for switches in ({"prefetch": "none"} if has_one else {}, {"prefetch": "look-ahead"}, {"prefetch": "auto"}):
        with pytest.raises(ConfigError, match=refusal) as error:
            configure(preset, prefetch_depth=3, **switches)
        assert error.value.facts["given"] == 3
    assert configure(preset, prefetch="stacked-gates", prefetch_depth=3).prefetch_depth == 3
    assert configure(preset, prefetch="stacked-gates").prefetch_depth is None


def test_who_asks_for_scores_is_known_beforehand() -> None:
    """Would catch a predictor that ranks by rules which nobody has looked for."""
    assert not EngineConfig().needs_scores and not EngineConfig(prefetch="next-gate").needs_scores
    for switches in ({"alpha": 0.1}, {"eviction": "score"}, {"prefetch": "stacked-gates"}):
        assert EngineConfig(**switches).needs_scores


@pytest.mark.parametrize("name", [name for name, each in SETTINGS.items() if isinstance(each.allowed, Switch)])
def test_a_switch_is_true_or_false(name: str) -> None:
    """Would catch the word "no", which Python takes for true."""
    with pytest.raises(ConfigError, match=f"`{name}` is 'no'"):
        EngineConfig(**{name: "no"})


@pytest.mark.parametrize(("name", "most"), [("threads", 1024), ("io_threads", 64)])
def test_threads_have_an_upper_bound(name: str, most: int) -> None:
    """A process dies of a million threads."""
    assert getattr(EngineConfig(**{name: most}), name) == most
    with pytest.raises(ConfigError, match=f"`{name}` is {most + 1}; it must be a whole number from 1 to {most}"):
        EngineConfig(**{name: most + 1})


def test_only_settings_with_such_a_default_can_be_left_out() -> None:
    for field in fields(EngineConfig):
        if field.default is None or field.name in ("device", "profile", "cluster"):
            continue
        with pytest.raises(ConfigError, match=field.name):
            EngineConfig(**{field.name: None})


NAMES = {"device", "profile", "cluster"}
"""Settings that can be what machines, files and people are called."""


@pytest.mark.parametrize("name", sorted({field.name for field in fields(EngineConfig)} - NAMES))
def test_what_is_allowed_can_be_said_of_every_setting(name: str) -> None:
    assert SETTINGS[name].allowed.words
    with pytest.raises(ConfigError) as error:
        EngineConfig(**{name: object()})
    assert error.value.facts["allowed"] == SETTINGS[name].allowed.words


@pytest.mark.parametrize(
    ("setting", "given", "allowed"),
    [("io_threads", 0, "a whole number from 1 to 64"), ("alpha", 2.0, "from 0"), ("eviction", "x", "auto, lru")],
)
def test_errors_carry_facts_for_programs(setting: str, given: Any, allowed: str) -> None:
    with pytest.raises(ConfigError) as error:
        EngineConfig(**{setting: given})
    facts = error.value.facts
    assert (facts["setting"], facts["given"]) == (setting, given) and allowed in str(facts["allowed"])
    assert ConfigError("nothing in particular").facts == {}


def test_facts_are_plain() -> None:
    """Would catch what no JSON can hold: numbers that are none, objects."""
    for value in (float("nan"), float("inf"), object()):
        with pytest.raises(ConfigError) as error:
            EngineConfig(alpha=value)  # type: ignore[arg-type]
        assert error.value.facts["given"] == repr(value)


@pytest.mark.parametrize(
    ("switches", "setting", "allowed"),
    [
        ({"memory_bytes": 2**20, "resident_share": 0.5}, "resident_share", "only without `memory`"),
        ({"dilation": 3.0}, "dilation", "only with `device=emulated`"),
        ({"device": "cpu", "balance": "host"}, "balance", "auto or none"),
        ({"alpha": 0.2, "reproducible": True, "eviction": "lru"}, "eviction", "auto or score"),
        ({"evicton": "lru"}, "evicton", "settings are activations, alpha, "),
        ({"preset": "fast"}, "preset", "exact, lru"),
    ],
)
def test_settings_that_do_not_go_together_name_the_one_to_change(
    switches: dict[str, Any], setting: str, allowed: str
) -> None:
    with pytest.raises(ConfigError) as error:
        configure(**switches)
    facts = error.value.facts
    assert facts["setting"] == setting and facts["given"] == switches[setting] and allowed in str(facts["allowed"])


def test_belady_cannot_serve() -> None:
    """It needs the future; would catch the offline policies slipping into the online ones."""
    with pytest.raises(ConfigError):
        EngineConfig(eviction="belady")


def test_unknown_settings_and_presets_are_refused() -> None:
    with pytest.raises(ConfigError, match="unknown setting 'memori_bytes'"):
        configure(memori_bytes=1)
    with pytest.raises(ConfigError, match="`preset` is 'fast'; choose one of: exact, lru"):
        configure("fast")


@pytest.mark.parametrize("preset", PRESETS)
def test_switches_go_over_presets_and_none_means_not_given(preset: str) -> None:
    assert configure(preset) == EngineConfig(**PRESETS[preset])
    assert configure(preset, eviction=None, threads=None) == configure(preset)
    assert configure(preset, eviction="lfu", io_threads=5).eviction == "lfu"


def test_frozen_and_documented() -> None:
    """Nothing found at run time is written back; every field says what it is."""
    with pytest.raises(FrozenInstanceError):
        EngineConfig().threads = 3  # type: ignore[misc]
    (declared,) = ast.parse(inspect.getsource(EngineConfig)).body
    assert isinstance(declared, ast.ClassDef)
    for field, after in pairwise(declared.body):
        if isinstance(field, ast.AnnAssign):
            is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            assert is_text and isinstance(after.value.value, str), ast.unparse(field.target)


def test_a_bad_setting_is_a_value_error() -> None:
    with pytest.raises(ValueError):
        EngineConfig(threads=0)
