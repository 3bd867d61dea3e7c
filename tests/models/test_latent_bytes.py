"""The memory of the copies with which single tokens attend to latent vectors. Would catch copies outside the budget,
and memory that is reserved for copies that no load makes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from smoe.config import EngineConfig
from smoe.models import spec as spec_module
from smoe.models.read_spec import read_spec

KERNELS = ("auto", "own-order", "native", "torch")


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("has_torchs_bits", [True, False])
@pytest.mark.parametrize("reproducible", [True, False])
def test_copies_are_in_the_budget(
    kernels: str,
    has_torchs_bits: bool,
    reproducible: bool,
    toy: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(spec_module, "is_supported", lambda: has_torchs_bits)
    monkeypatch.setattr(spec_module, "widest", lambda: object())
    monkeypatch.setattr(spec_module, "instruction_set", lambda: None)
    config = EngineConfig(kernels=kernels, reproducible=reproducible, dtype="bfloat16")
    spec = read_spec(toy("deepseek_v3"), config)
    weights = [each for name, each in spec.outline.weights.items() if name.endswith("kv_b_proj.weight")]
    assert len(weights) == spec.config.num_hidden_layers
    rounds = kernels == "own-order" or (kernels == "auto" and not reproducible and not has_torchs_bits)
    expected = rounds * 2 * sum(each.numbers for each in weights)
    assert spec.latent_bytes(config) == expected
    torchs = EngineConfig(kernels="torch", dtype="bfloat16")
    assert spec.demand(config).fixed_bytes - spec.demand(torchs).fixed_bytes == expected
    assert replace(config, device="cuda") and spec.latent_bytes(replace(config, device="cuda")) == 0
    spec.config._attn_implementation = "eager"
    assert spec.latent_bytes(config) == 0


def test_other_attention_has_none(toy: Callable[..., Path]) -> None:
    config = EngineConfig(kernels="own-order", dtype="bfloat16")
    assert read_spec(toy("qwen3_moe"), config).latent_bytes(config) == 0
