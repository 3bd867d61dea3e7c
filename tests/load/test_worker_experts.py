"""What a worker opens: a copy of the coordinator's folder. Would catch a pack or a GGUF file that it does not find."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import torch

from smoe.load.worker_experts import open_experts
from smoe.models.weight_samples import checksum
from smoe.presets import configure
from tests import gguf_toy
from tests.packs import pack_folder


def test_a_copied_folder_has_the_pack_of_its_precision(toy: Callable[..., Path], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(toy("qwen3_moe", dtype=torch.bfloat16), folder)
    pack_folder(folder, precision="int4")
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    served = open_experts(copy, 1 << 20, configure(precision="int4", threads=1))
    assert served.precision == "int4" and served.weights == checksum(folder)
    served.alone.close()


def test_a_gguf_model_is_opened_by_its_folder(tmp_path: Path) -> None:
    path, _ = gguf_toy.quantised(tmp_path / "toy.gguf", "Q8_0")
    copy = tmp_path / "copy"
    copy.mkdir()
    shutil.copy(path, copy)
    served = open_experts(copy, 1 << 20, configure(threads=1))
    assert served.weights == checksum(path)
    served.alone.close()
