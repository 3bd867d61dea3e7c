"""The same toy as safetensors, in memory and as a GGUF file: one model, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from tests import gguf_toy, oracle

Open = Callable[..., PreTrainedModel]
FAMILIES = tuple(gguf_toy.ARCHITECTURES)


@pytest.mark.parametrize("budget", ["full", "minimum"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_file_is_the_model_that_was_written(
    family: str, budget: str, toy: Callable[..., Path], tmp_path: Path, open_model: Open
) -> None:
    """bf16, beside the safetensors of the same weights; would catch gate and up exchanged, and a name mistaken."""
    folder = toy(family, dtype=torch.bfloat16)
    path = gguf_toy.write(tmp_path / "toy.gguf", oracle.reference(folder))
    theirs = oracle.reference_steps(folder)
    oracle.assert_same_steps(oracle.greedy(open_model(folder, budget)), theirs)
    oracle.assert_same_steps(oracle.greedy(open_model(path, budget)), theirs)
