"""What is planned is what is loaded, to the byte: would catch a slot that is estimated where the files say its size, an
entry (read buffers) that only loading knows of, and a plan that needs the pack which it is to prepare."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from smoe import from_pretrained
from smoe.policy.budget import Ledger
from smoe.presets import configure
from smoe.report.forecast import forecast
from tests import gguf_toy, mxfp4_toy, oracle, zoo
from tests.packs import pack_folder

ASKED = {"context_tokens": oracle.CONTEXT, "device": "cpu", "resident_share": 0.5}


@pytest.fixture(autouse=True)
def nothing_is_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("smoe.machine.measure.measure_memory", lambda seconds, memory=None: 20e9)


def planned(model: Path, **switches: object) -> Ledger:
    return forecast(str(model), configure(**ASKED, **switches)).ledger


def loaded(model: Path, **switches: object) -> Ledger:
    with from_pretrained(model, **ASKED, **switches).offload as engine:
        ledger: Ledger = engine.ledger
        return ledger


def gguf_in_bf16(folder: Path) -> Path:
    return gguf_toy.write(folder / "toy.gguf", zoo.make("qwen2_moe", dtype=torch.bfloat16))


def gguf_quantised(folder: Path) -> Path:
    """Two sizes of slots, and three runs of bytes to an expert: each begins anywhere in a page."""
    return gguf_toy.quantised(folder / "toy.gguf", "Q4_K_M")[0]


def mxfp4(folder: Path) -> Path:
    mxfp4_toy.save(folder)
    return folder


def neighbours(folder: Path) -> Path:
    """Experts that are read straight into their slots."""
    zoo.save("qwen2_moe", folder, dtype=torch.bfloat16)
    return folder


def scattered(folder: Path) -> Path:
    """Experts that pass through read buffers."""
    zoo.save("mixtral", folder, dtype=torch.bfloat16)
    return folder


def packed(folder: Path) -> Path:
    pack_folder(scattered(folder))
    return folder


@pytest.mark.parametrize("make", [neighbours, scattered, packed, gguf_in_bf16, gguf_quantised, mxfp4])
def test_the_ledger_is_that_of_the_loaded_engine(make: Callable[[Path], Path], tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    model = make(tmp_path / "model")
    assert planned(model) == loaded(model)


@pytest.mark.parametrize("precision", ["int8", "int4", "int3", "int2"])
def test_a_precision_is_planned_before_it_is_packed(precision: str, tmp_path: Path) -> None:
    folder = scattered(tmp_path / "model")
    before = planned(folder, precision=precision)
    pack_folder(folder, precision=precision)
    assert before == planned(folder, precision=precision) == loaded(folder, precision=precision)


def test_from_the_configuration_alone_slots_are_never_too_many(tmp_path: Path, toy: Callable[..., Path]) -> None:
    """An estimate, but on the safe side where experts lie together."""
    folder = toy("qwen2_moe", dtype=torch.bfloat16)
    shutil.copy(folder / "config.json", tmp_path)
    estimate, exact = planned(tmp_path), planned(folder)
    assert estimate.demand.slot_bytes >= exact.demand.slot_bytes
    assert estimate.demand.fixed_entries() == exact.demand.fixed_entries()
