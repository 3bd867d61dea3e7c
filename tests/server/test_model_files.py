"""What a model's files say, for Ollama's clients. Would catch a format that is always safetensors, and the size or the
parameters of one part of several."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Type

from smoe import from_pretrained
from smoe.server.model_files import files_of
from smoe.server.ollama_models import _in_short
from tests import gguf_toy


@pytest.mark.parametrize(
    ("parts", "more", "quantisation"),
    [
        (1, {"general.file_type": int(gguf.LlamaFileType.MOSTLY_Q4_K_M)}, "Q4_K_M"),
        (1, {"general.file_type": int(gguf.LlamaFileType.GUESSED)}, "Q8_0"),
        (2, {}, "Q8_0"),
    ],
)
def test_a_gguf_file_says_what_it_is(tmp_path: Path, parts: int, more: dict[str, Any], quantisation: str) -> None:
    toy = gguf_toy.make("qwen3_moe", dtype=torch.bfloat16, **gguf_toy.SIZES)
    file = gguf_toy.write(tmp_path / "toy.gguf", toy, experts=Type.Q8_0, dense=Type.Q8_0, parts=parts, more=more)
    model = from_pretrained(file, memory="16MiB", context_tokens=64)
    with model.offload:
        found = files_of(model)
    written = sorted(tmp_path.glob("*.gguf"))
    assert len(written) == parts and found.nbytes == sum(path.stat().st_size for path in written)
    assert (found.format, found.architecture, found.quantisation) == ("gguf", "qwen3moe", quantisation)
    stored = [tensor for path in written for tensor in gguf.GGUFReader(path).tensors]
    assert found.parameters == sum(math.prod(tensor.shape.tolist()) for tensor in stored)


@pytest.mark.parametrize(
    ("number", "text"), [(30_532_122_624, "30.5B"), (8 * 10**9, "8B"), (136_730_000, "136.73M"), (999, "999")]
)
def test_numbers_have_ollamas_form(number: int, text: str) -> None:
    assert _in_short(number) == text
