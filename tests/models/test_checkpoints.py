"""Checkpoints in every form: shards, packed, another dtype. Outputs stay those of transformers on the same files."""

from __future__ import annotations

import json
import shutil
import struct
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from smoe.errors import CheckpointError, DiskSpaceError
from smoe.load import pretrained
from smoe.memory.store import PAGE
from smoe.models.checkpoint import checkpoint_at
from smoe.models.read_spec import read_spec
from smoe.models.reference import reference_parameters
from smoe.presets import configure
from tests import oracle, zoo
from tests.packs import pack_folder

Open = Callable[..., PreTrainedModel]
Disk = namedtuple("Disk", "total used free")


def copy_of(folder: Path, target: Path) -> Path:
    shutil.copytree(folder, target, dirs_exist_ok=True)
    return target


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss", "granitemoe"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_many_small_shards(family: str, dtype: torch.dtype, toy: Callable[..., Path], open_model: Open) -> None:
    folder = toy(family, dtype=dtype, max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 8
    oracle.assert_same_steps(oracle.greedy(open_model(folder, "fifth")), oracle.reference_steps(folder))


def test_an_expert_split_between_shards(toy: Callable[..., Path], open_model: Open, tmp_path: Path) -> None:
    """gate in one file, up in another, down in a third: staged, piece by piece from three files."""
    folder = copy_of(toy("qwen3_moe", dtype=torch.bfloat16), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    kinds = {"gate_proj": "a", "up_proj": "b", "down_proj": "c"}
    shard_of = {key: next((s for kind, s in kinds.items() if f"{kind}." in key), "a") for key in tensors}
    for shard in set(shard_of.values()):
        mine = {key: tensor for key, tensor in tensors.items() if shard_of[key] == shard}
        save_file(mine, folder / f"{shard}.safetensors", metadata={"format": "pt"})
    weight_map = {key: f"{shard}.safetensors" for key, shard in shard_of.items()}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    model = open_model(folder, "minimum")
    assert model.offload.store.is_staged
    assert len({piece.read.path for piece in model.offload.store.placement(0, 0).pieces}) == 3
    oracle.assert_same_steps(oracle.greedy(model), oracle.reference_steps(folder))


@pytest.mark.parametrize(
    ("stored", "wanted"), [(torch.float32, "bfloat16"), (torch.bfloat16, "float32"), (torch.float32, "float16")]
)
def test_another_dtype_is_converted_as_the_library_does(
    stored: torch.dtype, wanted: str, toy: Callable[..., Path], open_model: Open
) -> None:
    folder = toy("qwen2_moe", dtype=stored)
    model = open_model(folder, "fifth", dtype=wanted)
    assert model.dtype is getattr(torch, wanted)
    assert model.offload.store.is_staged
    oracle.assert_same_steps(oracle.greedy(model), oracle.reference_steps(folder, getattr(torch, wanted)))


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss", "phimoe"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_is_equal(
    family: str, dtype: torch.dtype, toy: Callable[..., Path], open_model: Open, tmp_path: Path
) -> None:
    folder = copy_of(toy(family, dtype=dtype), tmp_path)
    path = pack_folder(folder)
    model = open_model(folder, "fifth")
    store = model.offload.store
    assert store.paths() == [path], "the packed file was not used"
    assert not store.is_staged
    assert all(len(store.placement(*key).reads) == 1 for key in store.keys())  # noqa: SIM118
    assert max(store.slot_bytes.values()) < store.expert_bytes + 2 * PAGE
    oracle.assert_same_steps(oracle.greedy(model), oracle.reference_steps(toy(family, dtype=dtype)))


def test_packing_to_another_dtype(toy: Callable[..., Path], open_model: Open, tmp_path: Path) -> None:
    folder = copy_of(toy("mixtral"), tmp_path)
    path = pack_folder(folder, "bfloat16")
    model = open_model(folder, "half", dtype="bfloat16")
    assert model.offload.store.paths() == [path]
    oracle.assert_same_steps(oracle.greedy(model), oracle.reference_steps(toy("mixtral"), torch.bfloat16))
    assert path not in open_model(folder, "half").offload.store.paths(), "fp32 asked for, bf16 pack used"


@pytest.mark.parametrize("damage", ["truncated", "longer", "other weights", "magic", "header", "empty"])
def test_a_pack_that_does_not_fit_is_refused(
    damage: str, toy: Callable[..., Path], open_model: Open, tmp_path: Path
) -> None:
    folder = copy_of(toy("mixtral"), tmp_path)
    path = pack_folder(folder)
    data = path.read_bytes()
    if damage == "other weights":
        tensors = load_file(folder / "model.safetensors")
        save_file({**tensors, "more": torch.zeros(3)}, folder / "model.safetensors", metadata={"format": "pt"})
    else:
        changed = {
            "truncated": data[:-1],
            "longer": data + b"\0",
            "magic": b"PACKPACK" + data[8:],
            "header": data[:8] + struct.pack("<Q", 40) + b"{" * 40 + data[56:],
            "empty": b"",
        }
        path.write_bytes(changed[damage])
    with pytest.raises(CheckpointError, match=r"smoe pack"):
        open_model(folder, "half")


def test_a_flipped_bit_in_the_first_expert_fails_the_proof(
    toy: Callable[..., Path], open_model: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The self-test compares the packed experts with the checkpoint's own, in a pack that was verified before, too."""
    monkeypatch.setattr(pretrained, "verify_pack", lambda *_: None)
    folder = copy_of(toy("mixtral"), tmp_path)
    path = pack_folder(folder)
    data = bytearray(path.read_bytes())
    data[PAGE * -(-(16 + struct.unpack("<Q", data[8:16])[0]) // PAGE) + 3] ^= 0x40
    path.write_bytes(data)
    with pytest.raises(Exception, match="self-test"):
        open_model(folder, "half")


def test_a_full_disk_is_seen_before_packing(
    toy: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copy_of(toy("mixtral"), tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Disk(10**12, 10**12 - 10**6, 10**6))
    with pytest.raises(DiskSpaceError, match="packing"):
        pack_folder(folder)
    assert not list(folder.glob("*.smoe*")) + list(folder.glob("*.partial*"))


def test_an_expert_with_nan_is_not_packed(toy: Callable[..., Path], tmp_path: Path) -> None:
    folder = copy_of(toy("mixtral"), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    key = zoo.expert_keys("mixtral", 2, 5)[1]
    tensors[key][3, 4] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="expert 5 in layer 2"):
        pack_folder(folder)
    assert not list(folder.glob("*.smoe"))


@pytest.mark.parametrize("family", zoo.FAMILIES)
def test_the_index_finds_every_expert(family: str, toy: Callable[..., Path]) -> None:
    """Against the library's own loader, every expert of every layer: would catch renaming and order rules that
    changed.
    """
    folder = toy(family)
    plan = read_spec(folder, configure(context_tokens=oracle.CONTEXT))
    index, theirs = checkpoint_at(folder).experts(plan), dict(oracle.reference(folder).named_parameters())
    for site in plan.sites:
        parameters = reference_parameters(index[site.layer], list(range(site.experts)), torch.float32)
        assert set(parameters) == {part.name for part in site.parts}
        for name, value in parameters.items():
            assert torch.equal(value, theirs[f"{site.name}.{name}"]), (site.name, name)


@pytest.mark.parametrize("family", zoo.FAMILIES)
def test_the_spec_knows_the_sizes(family: str, toy: Callable[..., Path]) -> None:
    """From config.json alone: bytes of experts and of everything else, counted against the real parameters."""
    plan = read_spec(toy(family), configure(context_tokens=oracle.CONTEXT))
    named: dict[str, Any] = dict(oracle.reference(toy(family)).named_parameters())
    experts = {f"{site.name}.{part.name}" for site in plan.sites for part in site.parts}
    assert plan.experts_bytes == sum(4 * named[name].numel() for name in experts)
    others = sum(4 * p.numel() for name, p in named.items() if name not in experts)
    assert others <= plan.outline.dense_bytes(plan.dtype) <= others + 2**16
    assert plan.expert_bytes * zoo.EXPERTS * len(plan.sites) == plan.experts_bytes
    assert set(plan.anatomy.top_k) == {site.layer for site in plan.sites}
