"""The memory of packed rows. Would catch packed rows outside the budget, and memory that is reserved where torch
multiplies many rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from smoe.config import EngineConfig
from smoe.kernels.isa import AVX2
from smoe.kernels.many_rows import MOST_MANY_ROWS
from smoe.models import spec as spec_module
from smoe.models.read_spec import read_spec
from smoe.models.spec import ModelSpec


def packed(spec: ModelSpec, config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> int:
    """What the budget has more where the kernel is there."""
    found = []
    for isa in (AVX2, None):
        with monkeypatch.context() as patch:
            patch.setattr(spec_module, "instruction_set", lambda isa=isa: isa)
            found.append(spec.demand(config).fixed_bytes)
    return found[0] - found[1]


@pytest.mark.parametrize("inner", [96, 1024])
def test_packed_rows_are_in_the_budget(inner: int, toy: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(dtype="bfloat16")
    folder = toy("qwen3_moe", moe_intermediate_size=inner)
    spec = read_spec(folder, config)
    rows = 4 * MOST_MANY_ROWS * max(inner, int(spec.config.hidden_size))
    between = 2 * 3 * inner * MOST_MANY_ROWS  # gate, up, and their product
    assert packed(spec, config, monkeypatch) >= rows + between
    for other in ({"kernels": "torch"}, {"kernels": "native"}, {"reproducible": True}, {"dtype": "float32"}):
        changed = replace(config, **other)
        assert packed(read_spec(folder, changed), changed, monkeypatch) == 0, other
