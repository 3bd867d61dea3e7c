"""The random gpt-oss of the benchmarks is one that smoe reads as it reads OpenAI's."""

from __future__ import annotations

from pathlib import Path

import torch

from bench.gpt_oss import Geometry, write_model
from smoe import from_pretrained
from smoe.memory.quantised_store import QuantisedStore
from smoe.models.read_spec import read_spec
from smoe.presets import configure

SMALL = Geometry(
    layers=2,
    experts=4,
    experts_per_token=2,
    hidden=64,
    inner=96,
    vocabulary=300,
    heads=4,
    key_value_heads=2,
    head_dim=16,
)


def test_a_small_one_is_read(tmp_path: Path) -> None:
    total = write_model(tmp_path, SMALL)
    spec = read_spec(tmp_path, configure(context_tokens=32))
    assert spec.expert_bytes == SMALL.expert_bytes
    assert total == spec.experts_bytes + sum(
        2 * weight.numel() for name, weight in spec.shell.named_parameters() if ".experts." not in name
    )
    model = from_pretrained(tmp_path, memory="64MiB", context_tokens=32)
    with model.offload:
        assert isinstance(model.offload.store, QuantisedStore)
        assert bool(model(torch.tensor([[5, 6, 7]])).logits.isfinite().all())


def test_the_defaults_are_those_of_the_release() -> None:
    assert Geometry().expert_bytes == 13_236_480
