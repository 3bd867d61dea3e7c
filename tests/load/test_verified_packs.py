"""Packs are read against their checksums when they are first loaded, and not again.

Would catch: a damaged pack that is served, one that is read at every load, one that is not read after it was replaced.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from smoe.errors import CheckpointError
from smoe.load import pretrained, verified_packs
from smoe.models.load_observer import LoadObserver
from smoe.presets import configure
from smoe.user_cache import PLACE
from tests import oracle
from tests.packs import pack_folder

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture
def folder(toy: Callable[..., Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(toy("qwen3_moe"), tmp_path / "model"))


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The packs that were read against their checksums."""
    found: list[Path] = []

    def noted(packed, contents, progress):  # type: ignore[no-untyped-def]
        found.append(packed.path)
        return original(packed, contents, progress)

    original = verified_packs.damaged_layers
    monkeypatch.setattr(verified_packs, "damaged_layers", noted)
    return found


def opened(folder: Path, **switches: object) -> PreTrainedModel:
    model = oracle.open_model(folder, "minimum", **switches)
    model.offload.close()
    return model


def damage(path: Path, place: int = -5000) -> None:
    """One bit, with the time of the file as it was."""
    data, before = bytearray(path.read_bytes()), path.stat()
    data[place] ^= 4
    path.write_bytes(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))


@pytest.mark.parametrize("precision", [None, "int8"])
def test_a_pack_is_read_once(precision: str | None, folder: Path, read: list[Path]) -> None:
    path = pack_folder(folder, precision=precision)
    for _ in range(3):
        opened(folder, **({} if precision is None else {"precision": precision}))
    assert read == [path]


def test_without_a_pack_nothing_is_read(folder: Path, read: list[Path]) -> None:
    opened(folder)
    assert read == []


@pytest.mark.parametrize("precision", [None, "int8"])
def test_a_damaged_pack_is_refused_with_what_to_do(precision: str | None, folder: Path) -> None:
    path = pack_folder(folder, precision=precision)
    damage(path)
    asked = "" if precision is None else " with `precision=int8`"
    for _ in range(2):
        with pytest.raises(
            CheckpointError, match=rf"damaged in layer 3.*run smoe pack again{asked}, or copy"
        ) as caught:
            opened(folder, **({} if precision is None else {"precision": precision}))
        assert str(path) in str(caught.value)


def test_one_that_was_replaced_is_read_again(folder: Path, read: list[Path]) -> None:
    path = pack_folder(folder)
    opened(folder)
    copy = shutil.copy(path, path.with_suffix(".copy"))
    Path(copy).replace(path)
    opened(folder)
    assert read == [path, path]
    damage(path)
    with pytest.raises(CheckpointError, match="damaged"):
        opened(folder)


def test_low_copies_are_read_too(folder: Path, read: list[Path]) -> None:
    path = pack_folder(folder, precision="int4")
    model = pretrained.from_pretrained(folder, memory="64MiB", context_tokens=64, low_precision="int4")
    model.offload.close()
    assert read == [path]


def test_a_cache_that_cannot_be_written_is_no_error(
    folder: Path, read: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(PLACE, str(tmp_path / "file"))
    path = pack_folder(folder)
    for _ in range(2):
        opened(folder)
    assert read == [path, path] and "cannot be stored" in caplog.text


def test_how_far_it_is_can_be_heard(folder: Path) -> None:
    path, heard = pack_folder(folder), []
    config = configure(memory_bytes=64 << 20, context_tokens=64)

    class Observer(LoadObserver):
        def pack_bytes(self, done: int, total: int) -> None:
            heard.append((done, total))

    for _ in range(2):
        pretrained.load(folder, config, observer=Observer()).offload.close()
    assert [done for done, _ in heard] == sorted(done for done, _ in heard)
    assert heard[-1][0] == heard[-1][1] > path.stat().st_size * 0.9 and heard[0][0] == 0
    assert len(heard) == 5, "the second load reads nothing"
