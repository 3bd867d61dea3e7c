"""Writing packed files: would catch a partial file taken for a whole one, a layer of other weights that is gone on
with, bytes that depend on where the writing was interrupted, and damage that nobody sees."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from smoe.errors import CheckpointError, DiskSpaceError
from smoe.models.packed import read_packed
from smoe.packing.writer import check_places, damaged_layers
from tests import zoo
from tests.packs import contents_of, pack_folder

EXPERTS_BEFORE = 19  # of 8 a layer: two layers are whole, the third is not


@pytest.fixture
def folder(toy: Callable[..., Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(toy("mixtral", dtype=torch.bfloat16), tmp_path / "model"))


def interrupt(folder: Path, precision: str | None) -> None:
    def strike(done: int, total: int) -> None:
        if done == EXPERTS_BEFORE:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pack_folder(folder, progress=strike, precision=precision)


def packed_again(folder: Path, precision: str | None) -> tuple[bytes, list[int]]:
    """The whole file, and the experts that were written in the end."""
    seen: list[int] = []
    path = pack_folder(folder, progress=lambda done, total: seen.append(done), precision=precision)
    return path.read_bytes(), seen


@pytest.mark.parametrize("precision", [None, "int4"])
def test_an_interrupted_pack_goes_on(folder: Path, precision: str | None) -> None:
    interrupt(folder, precision)
    contents = contents_of(folder, precision=precision)
    assert read_packed(folder, contents) is None, "a partial file was taken for a whole one"
    data, seen = packed_again(folder, precision)
    assert seen == list(range(17, 33)), "whole layers stay"
    contents.path(folder).unlink()
    assert packed_again(folder, precision) == (data, list(range(1, 33)))
    assert [path for path in folder.iterdir() if "partial" in path.name] == []


@pytest.mark.parametrize("place", [0, 1, 9, 16])
def test_what_is_damaged_meanwhile_is_written_again(folder: Path, place: int) -> None:
    """A bit of the header, of a whole layer, of the unfinished one."""
    whole, _ = packed_again(folder, "int4")
    contents = contents_of(folder, precision="int4")
    contents.path(folder).unlink()
    interrupt(folder, "int4")
    partial = folder / "experts.int4.smoe.partial"
    data = bytearray(partial.read_bytes())
    data[4096 * place + 5 if place else 3] ^= 1
    partial.write_bytes(data)
    assert packed_again(folder, "int4")[0] == whole


def test_notes_that_are_cut_short_are_not_believed(folder: Path) -> None:
    interrupt(folder, "int4")
    (folder / "experts.int4.smoe.partial.json").write_text('{"layers": [{"layer"')
    assert packed_again(folder, "int4")[1] == list(range(1, 33))


def test_other_weights_are_begun_with_anew(folder: Path) -> None:
    interrupt(folder, "int4")
    tensors = load_file(folder / "model.safetensors")
    key = zoo.expert_keys("mixtral", 0, 0)[0]
    tensors[key] += 1
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert packed_again(folder, "int4")[1] == list(range(1, 33))


def test_two_at_once_are_refused(folder: Path) -> None:
    errors: list[str] = []

    def second(done: int, total: int) -> None:
        if done == 3:
            with pytest.raises(CheckpointError, match="another process") as refusal:
                pack_folder(folder, precision="int4")
            errors.append(str(refusal.value))

    pack_folder(folder, progress=second, precision="int4")
    assert errors and read_packed(folder, contents_of(folder, precision="int4")) is not None


@pytest.mark.parametrize("name", ["experts.int4.smoe", "experts.int4.smoe.partial"])
def test_a_folder_in_its_place_is_named(folder: Path, name: str) -> None:
    (folder / name).mkdir()
    with pytest.raises(CheckpointError, match=rf"{name}, but something else than a file .* move it away"):
        pack_folder(folder, precision="int4")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_fills_up_can_be_gone_on_from(folder: Path, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def third_fails(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == 5:  # two for each layer: its bytes and its record
            raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", third_fails)
        with pytest.raises(DiskSpaceError, match="continues after the last complete layer"):
            pack_folder(folder, precision="int4")
    assert packed_again(folder, "int4")[1] == list(range(17, 33))


def test_what_is_there_needs_no_room_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for half a file and a spare: enough to go on, not to begin."""
    interrupt(folder, "int4")
    contents = contents_of(folder, precision="int4")
    free = 2**30 + contents.experts * contents.stride // 2
    monkeypatch.setattr("shutil.disk_usage", lambda where: type("Usage", (), {"free": free})())
    check_places(folder, [contents])
    with pytest.raises(DiskSpaceError):
        check_places(folder, [contents_of(folder, precision="int8")])


def test_damage_is_found_by_layer(folder: Path) -> None:
    path, contents = pack_folder(folder, precision="int4"), contents_of(folder, precision="int4")
    found = read_packed(folder, contents)
    assert found is not None and damaged_layers(found, contents, lambda *_: None) == []
    data = bytearray(path.read_bytes())
    data[found.start + 8 * contents.stride + 7] ^= 4
    path.write_bytes(data)
    found = read_packed(folder, contents)
    assert found is not None and damaged_layers(found, contents, lambda *_: None) == [1]


def test_the_records_say_what_quantising_cost(folder: Path) -> None:
    pack_folder(folder, precision="int2")
    pack_folder(folder)
    quantised = read_packed(folder, contents_of(folder, precision="int2"))
    plain = read_packed(folder, contents_of(folder))
    assert quantised is not None and plain is not None
    assert [record["layer"] for record in quantised.records] == [0, 1, 2, 3]
    assert all(0.1 < record["relative_error"] < 0.3 for record in quantised.records)
    assert not any("relative_error" in record for record in plain.records)
    assert json.dumps(plain.records)
