"""Settings: bounds, unknown keys, presets."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields
from pathlib import Path
from typing import Any

import pytest

from smoe import config as module
from smoe.config import PRESETS, EngineConfig, configure
from smoe.errors import ConfigError

COUNTS = ["memory_bytes", "host_memory_bytes", "context_tokens", "max_sequences", "prefill_tokens", "threads"]


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "8"])
@pytest.mark.parametrize("name", [*COUNTS, "io_threads"])
def test_counts_are_whole_and_positive(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        EngineConfig(**{name: value})


def test_an_unknown_cpu_isa_is_refused_whatever_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMOE_MAX_CPU_ISA", "avx3")
    with pytest.raises(ConfigError, match="SMOE_MAX_CPU_ISA is 'avx3'; choose one of: none, avx2"):
        configure()
    monkeypatch.setenv("SMOE_MAX_CPU_ISA", " AVX2")
    configure()


@pytest.mark.parametrize("name", ["dtype", "eviction", "prefetch", "direct_io"])
def test_choices_are_listed(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is 'nonsense'; choose one of"):
        EngineConfig(**{name: "nonsense"})


def test_a_trial_is_on_off_or_left_to_the_prefetch() -> None:
    with pytest.raises(ConfigError, match="prefetch_trial is 'no'; it must be True, False or None"):
        EngineConfig(prefetch_trial="no")


@pytest.mark.parametrize(
    ("setting", "given", "allowed"),
    [("io_threads", 0, "a whole number of at least 1"), ("alpha", 2.0, "from 0"), ("eviction", "x", "auto, lru")],
)
def test_errors_carry_facts_for_programs(setting: str, given: Any, allowed: str) -> None:
    with pytest.raises(ConfigError) as error:
        EngineConfig(**{setting: given})
    facts = error.value.facts
    assert (facts["setting"], facts["given"]) == (setting, given) and allowed in str(facts["allowed"])
    assert ConfigError("two settings that cannot go together").facts == {}


def test_belady_cannot_serve() -> None:
    """It needs the future; would catch the offline policies slipping into the online ones."""
    with pytest.raises(ConfigError):
        EngineConfig(eviction="belady")


def test_unknown_settings_and_presets_are_refused() -> None:
    with pytest.raises(ConfigError, match="unknown setting 'memori_bytes'"):
        configure(memori_bytes=1)
    with pytest.raises(ConfigError, match="unknown preset 'fast'"):
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
    source = Path(module.__file__ or "").read_text(encoding="utf8").split("class EngineConfig", 1)[1]
    for field in fields(EngineConfig):
        after = source.split(f"    {field.name}: ", 1)[1].split("\n", 2)
        assert after[1].strip().startswith('"""'), f"{field.name} has no docstring"


def test_a_bad_setting_is_a_value_error() -> None:
    with pytest.raises(ValueError):
        EngineConfig(threads=0)
