"""What a process takes beside the budget, by who computes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from smoe.kernels.isa import widest
from smoe.load.ledger import beside_of
from smoe.machine.process_memory import LIBRARY_CODE_BYTES, OWN_KERNELS_CODE_BYTES
from smoe.models.read_spec import read_spec
from smoe.presets import configure
from tests import gguf_toy

CODE = "their code, once they compute"


def test_the_libraries_need_less_where_our_kernels_compute(tmp_path: Path, toy: Callable[..., Path]) -> None:
    path, _ = gguf_toy.quantised(tmp_path / "toy.gguf", "Q4_K_M")

    def code_bytes(model: Path, **switches: str) -> int:
        config = configure(context_tokens=32, **switches)
        return beside_of(read_spec(model, config), config)[CODE]

    assert code_bytes(path) == (LIBRARY_CODE_BYTES if widest() is None else OWN_KERNELS_CODE_BYTES)
    assert code_bytes(path, kernels="torch") == LIBRARY_CODE_BYTES
    assert code_bytes(path, dense_precision="dtype") == LIBRARY_CODE_BYTES, "the library multiplies"
    assert code_bytes(toy("mixtral")) == LIBRARY_CODE_BYTES
