"""Which files a worker is sent: all that it opens. Would catch a pack too few, a tokenizer too much, a name that a
worker does not look for.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from smoe.errors import CheckpointError
from smoe.load.worker_experts import open_experts
from smoe.load.worker_files import worker_files
from smoe.models.checkpoint import checkpoint_at
from smoe.models.read_spec import read_spec
from smoe.models.weight_samples import checksum
from smoe.presets import configure
from tests import gguf_toy
from tests.packs import pack_folder


def files_of(folder: Path, precision: str = "auto") -> dict[str, Path]:
    return worker_files(checkpoint_at(folder), read_spec(folder, configure(precision=precision)))


@pytest.fixture
def model(toy: Callable[..., Path], tmp_path: Path) -> Path:
    """With a tokenizer's file, and something of the user's."""
    folder = tmp_path / "model"
    shutil.copytree(toy("qwen3_moe", dtype=torch.bfloat16), folder)
    for name in ("tokenizer.json", "notes.txt"):
        (folder / name).write_text("{}")
    return folder


def test_the_pack_goes_with_its_precision(model: Path, tmp_path: Path) -> None:
    assert list(files_of(model)) == ["model.safetensors", "config.json"]
    pack_folder(model, precision="int4")
    assert list(files_of(model)) == ["model.safetensors", "config.json"]
    found = files_of(model, "int4")
    assert list(found) == ["model.safetensors", "experts.int4.smoe", "config.json"]
    there = tmp_path / "there"
    there.mkdir()
    for name, path in found.items():
        shutil.copy(path, there / name)
    served = open_experts(there, 1 << 20, configure(precision="int4", threads=1))
    assert served.precision == "int4"
    served.alone.close()
    pack_folder(model)
    assert list(files_of(model)) == ["model.safetensors", "experts.bf16.smoe", "config.json"]


@pytest.mark.skipif(os.name == "nt", reason="POSIX permissions")
@pytest.mark.usefixtures("own_cache")
def test_a_pack_in_the_cache_travels_under_the_name_it_has_beside_weights(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("smoe.models.packed.os.access", lambda *_: False)
    path = pack_folder(model, precision="int4")
    assert path.parent != model
    assert files_of(model, "int4")["experts.int4.smoe"] == path


def test_shards_and_their_index_go(toy: Callable[..., Path]) -> None:
    folder = toy("qwen3_moe", dtype=torch.bfloat16, max_shard_size="20KB")
    found = list(files_of(folder))
    assert found[-2:] == ["model.safetensors.index.json", "config.json"]
    assert len(found) > 4 and all(name.endswith(".safetensors") for name in found[:-2])


def test_of_a_gguf_model_its_file_goes(tmp_path: Path) -> None:
    path, _ = gguf_toy.quantised(tmp_path / "toy.gguf", "Q8_0")
    assert files_of(path) == {"toy.gguf": path}
    there = tmp_path / "there"
    there.mkdir()
    shutil.copy(path, there)
    served = open_experts(there, 1 << 20, configure(threads=1))  # by its folder, as join --fetch has it
    assert served.weights == checksum(path)
    served.alone.close()


def test_what_is_not_whole_is_not_sent(model: Path) -> None:
    (model / "model.safetensors").unlink()
    with pytest.raises(CheckpointError):
        files_of(model)
