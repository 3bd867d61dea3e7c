"""GGUF files of llama.cpp's own converter, beside transformers' models from which they were made.

Oracle: the converter, for names, entries and the order of rows; transformers for the logits. `gguf_converted.py` spells
out what the converter does, so that the same comparison runs without its sources; here it is the converter itself.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from tests import convert_by_llama_cpp, published_folders
from tests import gguf_converted as converted
from tests.gguf_windowed import TOYS
from tests.models.test_gguf_quantised import PROMPT, steps

SOURCE = os.environ.get("SMOE_LLAMA_CPP")
IN_ANOTHER_FORM = {
    "bailingmoe",
    "bailingmoe3",
    "deepseek4",
    "gemma4",
    "glm4moe Solar-Open",
    "kimi-linear",
    "minimax-m3",
    "mistral4",
    "nemotron_h_moe Nano",
    "nemotron_h_moe Super",
}
"""Toys that transformers saves in another form than the published models, which the converter does not take."""
CONVERTED = {name: family for name, family in TOYS.items() if name not in IN_ANOTHER_FORM}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, tuple[PreTrainedModel, Path]]:
    """The models of 16 bits and their files of 32, converted in one process."""
    found = {}
    for name, family in CONVERTED.items():
        model = converted.make(family, torch.bfloat16)
        folder = tmp_path_factory.mktemp(re.sub(r"\W", "_", name))
        published_folders.save(family, model, folder)
        found[name] = (model, folder / "model.gguf")
    program = [sys.executable, convert_by_llama_cpp.__file__, str(SOURCE)]
    ran = subprocess.run(
        [*program, *(str(path.parent) for _, path in found.values())], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    return found


@pytest.mark.skipif(SOURCE is None, reason="SMOE_LLAMA_CPP names no folder with llama.cpp's sources")
@pytest.mark.parametrize("name", CONVERTED)
def test_every_bit_is_the_librarys(
    name: str, files: Mapping[str, tuple[PreTrainedModel, Path]], open_model: Callable[..., PreTrainedModel]
) -> None:
    model, path = files[name]
    assert all(map(torch.equal, steps(open_model(path, "half"), PROMPT), steps(model, PROMPT)))
