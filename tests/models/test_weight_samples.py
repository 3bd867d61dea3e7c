"""Whose pack it is: would catch a pack that a copied or touched checkpoint loses, and one that is served beside other
weights. What samples cannot see is tried, too, so that the documentation stays true."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from smoe.errors import CheckpointError
from smoe.models.packed import MAGIC, header_bytes, read_packed
from smoe.models.weight_samples import APART_BYTES, SAMPLE_BYTES, sample_offsets
from tests.packs import contents_of, pack_folder


@pytest.fixture
def folder(toy: Callable[..., Path], tmp_path: Path) -> Path:
    """A packed checkpoint of 540 KB, of which 64 samples see less than half."""
    folder = Path(shutil.copytree(toy("mixtral", dtype=torch.bfloat16), tmp_path / "model"))
    pack_folder(folder, precision="int8")
    return folder


def is_accepted(folder: Path) -> bool:
    try:
        return read_packed(folder, contents_of(folder, precision="int8")) is not None
    except CheckpointError as error:
        is_damaged = "model.safetensors" in str(error)  # what is read before the pack is compared names the file
        assert is_damaged or "was packed from other weights" in str(error), error
        return False


def flip(folder: Path, place: int) -> None:
    """Change one byte, keeping size and times."""
    path = folder / "model.safetensors"
    times = path.stat().st_atime_ns, path.stat().st_mtime_ns
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=times)


def weights_of(folder: Path) -> tuple[int, int]:
    """Where the weights of its file begin and end, by the format's own description."""
    data = (folder / "model.safetensors").read_bytes()
    return 8 + int.from_bytes(data[:8], "little"), len(data)


def test_a_touched_checkpoint_keeps_its_pack(folder: Path) -> None:
    os.utime(folder / "model.safetensors", (1, 1))
    assert is_accepted(folder)


def test_a_copied_checkpoint_keeps_its_pack(folder: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "copy", copy_function=shutil.copyfile))
    before, now = (each.joinpath("model.safetensors").stat().st_mtime_ns for each in (folder, copy))
    assert before != now and is_accepted(copy)


def test_an_interrupted_pack_goes_on_in_a_copy(folder: Path, tmp_path: Path) -> None:
    whole = pack_folder(folder, precision="int4").read_bytes()

    def strike(done: int, total: int) -> None:
        if done == 19:
            raise KeyboardInterrupt

    (folder / "experts.int4.smoe").unlink()
    with pytest.raises(KeyboardInterrupt):
        pack_folder(folder, progress=strike, precision="int4")
    copy = Path(shutil.copytree(folder, tmp_path / "copy", copy_function=shutil.copyfile))
    seen: list[int] = []
    path = pack_folder(copy, progress=lambda done, total: seen.append(done), precision="int4")
    assert seen[0] == 17 and path.read_bytes() == whole


@pytest.mark.parametrize("place", ["length", "header", "first", "sampled", "last"])
def test_a_changed_byte_is_seen(place: str, folder: Path) -> None:
    """Though size and times are as they were. Of the header: in a name in its metadata, which changes no weight."""
    begin, end = weights_of(folder)
    data = (folder / "model.safetensors").read_bytes()
    step = (end - begin) // 64
    places = {
        "length": 0,
        "header": data.index(b'"pt"') + 1,
        "first": begin,
        "sampled": begin + 7 * step + 100,
        "last": end - 1,
    }
    flip(folder, places[place])
    assert not is_accepted(folder)
    flip(folder, places[place])
    assert is_accepted(folder)


def test_a_byte_between_samples_is_not_seen(folder: Path) -> None:
    begin, end = weights_of(folder)
    step = (end - begin) // 64
    assert step > SAMPLE_BYTES, "the toy is too small for this test"
    flip(folder, begin + 7 * step + SAMPLE_BYTES)
    assert is_accepted(folder)


def test_another_name_or_size_is_another_checkpoint(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.rename(folder / "model-1.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"any": "model-1.safetensors"}}))
    assert not is_accepted(folder)
    index.unlink()
    (folder / "model-1.safetensors").rename(path)
    assert is_accepted(folder)
    with path.open("ab") as file:
        file.write(bytes(8))
    assert not is_accepted(folder)


@pytest.mark.parametrize("version", [1, 2, 4, None])
def test_a_pack_of_another_version_says_so(version: int | None, folder: Path) -> None:
    contents = contents_of(folder, precision="int8")
    path = contents.path(folder)
    data = path.read_bytes()
    old = header_bytes(contents.header(folder) | {"version": version})
    assert data[:8] == MAGIC and len(old) <= 4096
    path.write_bytes(old + data[len(old) :])
    with pytest.raises(
        CheckpointError, match=f"a packed file of version {version}, and this smoe reads version 3: run smoe"
    ):
        read_packed(folder, contents)


@pytest.mark.parametrize("begin", [0, 9, 12345])
@pytest.mark.parametrize("count", [0, 1, 4096, 4097, 300_000, 10**7, 10**9, 5 * 2**30, 5 * 2**30 + 1])
def test_samples_are_in_order_near_each_other_and_reach_the_end(begin: int, count: int) -> None:
    offsets = list(sample_offsets(begin, begin + count))
    assert offsets[0] == begin and offsets[-1] == max(begin, begin + count - SAMPLE_BYTES)
    assert all(offset - before <= APART_BYTES for before, offset in itertools.pairwise(offsets))
    assert len(offsets) >= min(64, -(-count // SAMPLE_BYTES)) and len(offsets) <= 66 + count // APART_BYTES
