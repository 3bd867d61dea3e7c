"""What is missing, what to type, and when it would not be pleasant.

Would catch a command that asks for another budget, a preset that is not recognised as itself, a pack that is there and
said to be missing, a warning about a model that is fast.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from smoe.policy.budget import full_bytes
from smoe.presets import PRESETS, configure
from smoe.report.forecast import forecast
from smoe.report.on_clock import FIRST_TOKENS
from smoe.report.outlook import Outlook, budget_to_type, preset_of, with_preset
from smoe.units import enough_to_type, parse_bytes, size_to_type
from tests import oracle
from tests.packs import pack_folder

pytestmark = pytest.mark.usefixtures("measured_in_full")


@pytest.fixture
def folder(toy: Callable[..., Path], tmp_path: Path) -> Path:
    """Of a checkpoint, to write into."""
    return Path(shutil.copytree(toy("qwen2_moe", dtype=torch.bfloat16), tmp_path / "model"))


def looked_at(model: Path, preset: str = "exact", profile: str = "rtx-4060-ti", **switches: Any) -> Outlook:
    asked = {"resident_share": 0.5} | switches
    config = configure(preset, context_tokens=oracle.CONTEXT, device="emulated", profile=profile, **asked)
    found = forecast(str(model), config).outlook
    assert found is not None
    return found


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_is_recognised(preset: str) -> None:
    assert preset_of(configure(preset, memory_bytes=5, device="emulated")) == preset
    other = with_preset(configure("smoe", memory_bytes=5, device="emulated"), preset, "auto")
    assert other == configure(preset, memory_bytes=5, device="emulated")
    assert preset_of(configure("smoe", alpha=0.123)) == "own"


@pytest.mark.parametrize("nbytes", [5000, 3 * 2**20 + 7, 8 * 2**30, 21_600_000_000])
def test_a_size_to_type_is_no_more_than_there_is(nbytes: int) -> None:
    assert 0.99 * nbytes <= parse_bytes(size_to_type(nbytes)) <= nbytes
    assert nbytes <= parse_bytes(enough_to_type(nbytes)) <= 1.01 * nbytes
    assert len(enough_to_type(nbytes).rstrip("MGiB").replace(".", "")) <= 4


def test_the_typed_budget_holds_the_whole_model_if_the_plan_does(folder: Path) -> None:
    config = configure(
        "exact", context_tokens=oracle.CONTEXT, device="emulated", profile="rtx-4060-ti", resident_share=1
    )
    ledger = forecast(str(folder), config).ledger
    least = full_bytes(ledger.demand)
    assert parse_bytes(budget_to_type(replace(ledger, budget_bytes=least))) >= least
    assert parse_bytes(budget_to_type(replace(ledger, budget_bytes=least - 1))) < least


def test_a_pack_is_missing_until_it_is_there(folder: Path) -> None:
    (line,) = looked_at(folder, precision="int4").asked.missing
    assert "experts.int4.smoe" in line and f"smoe pack --precision int4 {folder}" in line
    pack_folder(folder, precision="int4")
    assert looked_at(folder, precision="int4").asked.missing == []


def test_of_a_configuration_alone_no_file_is_named(folder: Path, tmp_path: Path) -> None:
    shutil.copy(folder / "config.json", tmp_path)
    (line,) = looked_at(tmp_path, precision="int4").asked.missing
    assert line == f"experts in int4: smoe pack --precision int4 {tmp_path}"


def test_without_prices_a_budget_of_quality_is_simulated_exactly(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    found = looked_at(folder, "balanced")
    assert any("smoe tune" in line and "--prices" in line for line in found.asked.missing)
    assert found.asked.lossy and found.asked.preset == "balanced"


def test_the_settings_ask_for_what_was_planned(folder: Path) -> None:
    found = looked_at(folder, "smoe", precision="int8", resident_share=None, memory_bytes=3 * 2**20)
    context = str(oracle.CONTEXT)
    assert found.settings == {"memory": "3MiB", "context": context, "preset": "smoe", "precision": "int8"}


def test_others_and_budgets_are_compared(folder: Path) -> None:
    found = looked_at(folder)
    assert {(case.preset, case.precision) for case in found.others} >= {("smoe", "auto"), ("exact", "int4")}
    assert all(case.lossy for case in found.others) and not found.asked.lossy
    shares = [case.resident_share for case in found.curve]
    assert shares == sorted(shares) and found.asked in found.curve
    slowest, fastest = found.tokens_per_second
    assert slowest <= found.asked.run.tokens_per_second <= fastest
    assert "synthetic" in found.as_json()["routing"]


def test_one_sentence_says_what_to_expect(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The toy has no room for a prompt of 2,000 tokens."""
    found = looked_at(folder)
    run = replace(found.asked.run, seconds_per_token=0.3, beginning_seconds=0.3 * (FIRST_TOKENS - 1))
    found = replace(found, asked=replace(found.asked, run=run), spread=(1, 1))
    assert found.plainly() == "A 200-word answer takes about a minute."
    found = replace(found, long_prompt_seconds=180.0, spread=(0.5, 1.5))
    assert found.plainly() == (
        "A 200-word answer takes 55 seconds to 3 minutes, reading a prompt of 2,000 tokens 2 to 6 minutes."
    )
    assert found.as_json()["answer_seconds"] == pytest.approx(80 - 0.3)


def test_what_is_not_pleasant_is_said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert looked_at(folder).warnings == [], "some KiB an expert"
    monkeypatch.setattr("smoe.report.outlook.LEAST_PLEASANT", 1e6)
    monkeypatch.setattr("smoe.report.outlook.MOST_PLEASANT", 0.0)
    slow, late = looked_at(folder).warnings
    assert "tokens/s are slower than reading speed" in slow and "the first token of a prompt" in late
