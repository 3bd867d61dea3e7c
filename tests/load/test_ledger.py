"""What a process takes outside the budget, by who computes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from smoe.kernels.isa import widest
from smoe.load.ledger import make_ledger, outside_budget
from smoe.machine.device import CPU
from smoe.machine.process_memory import CODE, LIBRARY_CODE_BYTES, OWN_KERNELS_CODE_BYTES
from smoe.models.read_spec import read_spec
from smoe.presets import configure
from tests import gguf_toy


def test_the_libraries_need_less_where_our_kernels_compute(tmp_path: Path, toy: Callable[..., Path]) -> None:
    path, _ = gguf_toy.quantised(tmp_path / "toy.gguf", "Q4_K_M")

    def code_bytes(model: Path, **switches: str) -> int:
        config = configure(context_tokens=32, **switches)
        return outside_budget(read_spec(model, config), config)[CODE]

    assert code_bytes(path) == (LIBRARY_CODE_BYTES if widest() is None else OWN_KERNELS_CODE_BYTES)
    assert code_bytes(path, kernels="torch") == LIBRARY_CODE_BYTES
    assert code_bytes(path, dense_precision="dtype") == LIBRARY_CODE_BYTES, "the library multiplies"
    assert code_bytes(toy("mixtral")) == LIBRARY_CODE_BYTES


@pytest.mark.parametrize(("preset", "fits"), [("exact", True), ("accelerate", False)])
def test_a_model_fits_where_its_experts_stay(preset: str, fits: bool, toy: Callable[..., Path]) -> None:
    """A preset that keeps only a token's experts needs little, and has none of the others in memory."""
    config = configure(preset, context_tokens=32)
    _, reason = make_ledger(read_spec(toy("mixtral"), config), config, CPU)
    assert ("the whole model fits" in reason) is fits
