"""A GGUF model straight from the hub, its client stubbed: what is chosen, what is fetched of it, and what is said."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import huggingface_hub
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from huggingface_hub.errors import LocalEntryNotFoundError

from smoe import from_pretrained
from smoe.errors import CheckpointError, ModelError
from smoe.memory.gguf_header import read_gguf_header
from smoe.models import files, hub, hub_gguf
from smoe.models.gguf_names import labels_of, models_of
from smoe.models.read_spec import read_spec
from smoe.presets import configure
from tests import gguf_toy, oracle, zoo
from tests.models.test_gguf_quantised import assert_near, steps

REPOSITORY = "owner/Toy-GGUF"
NAMES = [
    "README.md",
    "Toy-Q4_K_M.gguf",
    "Toy-Q8_0.gguf",
    "Toy-UD-Q4_K_XL.gguf",
    "BF16/Toy-BF16-00001-of-00002.gguf",
    "BF16/Toy-BF16-00002-of-00002.gguf",
    "Toy-mxfp4.gguf",
    "mmproj-F16.gguf",
    "toy-gpt.gguf",
]


class StubbedHub:
    """What `huggingface_hub` is asked, answered from a folder of files; downloads go to a second one, its cache."""

    def __init__(self, folder: Path, cache: Path) -> None:
        self.folder, self.cache = folder, cache
        self.downloaded: list[tuple[str, str | None]] = []
        self.bytes_read = 0

    def model_info(self, _: Any, model: str, revision: str | None, files_metadata: bool) -> Any:
        assert model == REPOSITORY and files_metadata
        paths = (path for path in self.folder.rglob("*") if path.is_file())
        siblings = [
            SimpleNamespace(rfilename=path.relative_to(self.folder).as_posix(), size=path.stat().st_size)
            for path in paths
        ]
        return SimpleNamespace(siblings=siblings)

    def hf_hub_download(self, model: str, name: str, *, revision: str | None) -> str:
        assert model == REPOSITORY
        self.downloaded.append((name, revision))
        (self.cache / name).parent.mkdir(parents=True, exist_ok=True)
        return str(shutil.copy(self.folder / name, self.cache / name))

    def snapshot_download(self, model: str, *, revision: str | None, local_files_only: bool) -> str:
        assert model == REPOSITORY and local_files_only, "nothing but single files is downloaded"
        if not self.cache.exists():
            raise LocalEntryNotFoundError("nothing of it")
        return str(self.cache)

    @contextmanager
    def open(self, path: str, mode: str, revision: str | None) -> Iterator[BinaryIO]:
        with (self.folder / path.removeprefix(f"{REPOSITORY}/")).open(mode) as file:

            def read(count: int) -> bytes:
                data = file.read(count)
                self.bytes_read += len(data)
                return data

            yield SimpleNamespace(read=read)  # type: ignore[misc]


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StubbedHub:
    found = StubbedHub(tmp_path / "repository", tmp_path / "cache")
    found.folder.mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hub, "unreachable", lambda: None)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *args, **more: found.model_info(*args, **more))
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", found.hf_hub_download)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", found.snapshot_download)
    monkeypatch.setattr(huggingface_hub, "HfFileSystem", lambda: found)
    monkeypatch.setattr(hub_gguf, "_FIRST_BYTES", 1000)
    return found


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ("Q4_K_M", ["Toy-Q4_K_M.gguf"]),
        ("q8_0", ["Toy-Q8_0.gguf"]),
        ("UD-Q4_K_XL", ["Toy-UD-Q4_K_XL.gguf"]),
        ("Q4_K_XL", ["Toy-UD-Q4_K_XL.gguf"]),
        ("MXFP4", ["Toy-mxfp4.gguf"]),
        ("BF16", ["BF16/Toy-BF16-00001-of-00002.gguf"]),
        ("F16", []),
        ("K_M", ["Toy-Q4_K_M.gguf"]),
        ("Q4", []),
        ("Toy-Q8_0.gguf", ["Toy-Q8_0.gguf"]),
        ("BF16/Toy-BF16-00002-of-00002.gguf", ["BF16/Toy-BF16-00001-of-00002.gguf"]),
    ],
)
def test_a_quantisation_or_a_path_means_a_model(wanted: str, found: list[str]) -> None:
    assert models_of(wanted, NAMES) == found


def test_what_there_is_to_ask_for() -> None:
    assert labels_of(NAMES) == ["BF16", "Q4_K_M", "Q8_0", "UD-Q4_K_XL", "mxfp4", "toy-gpt.gguf"]
    assert labels_of(["a/x-Q8_0.gguf", "b/x-Q8_0.gguf"]) == ["a/x-Q8_0.gguf", "b/x-Q8_0.gguf"]


@pytest.mark.parametrize(
    ("model", "repository", "wanted"),
    [
        ("owner/name:Q4_K_M", "owner/name", "Q4_K_M"),
        ("owner/name/x.gguf", "owner/name", "x.gguf"),
        ("owner/name/folder/x.GGUF", "owner/name", "folder/x.GGUF"),
    ],
)
def test_a_name_says_what_is_wanted(model: str, repository: str, wanted: str, stub: StubbedHub) -> None:
    assert hub_gguf.named_gguf(model) == (repository, wanted)
    assert files.local_place(model) is None


@pytest.mark.parametrize("model", ["owner/name", "name:Q4_K_M", "owner/name:", "owner/x.gguf", "owner/name/../x.gguf"])
def test_other_names_are_none(model: str) -> None:
    assert hub_gguf.named_gguf(model) is None


def test_a_model_in_parts_is_fetched_whole_and_alone(stub: StubbedHub, tmp_path: Path) -> None:
    """And from then on taken from the cache, also where there is no network."""
    model = zoo.make("qwen3_moe", dtype=torch.bfloat16)
    gguf_toy.write(stub.folder / "toy-BF16.gguf", model, parts=2)
    gguf_toy.write(stub.folder / "toy-Q8_0.gguf", model, experts=Type.Q8_0)
    ours = from_pretrained(f"{REPOSITORY}:BF16", memory="64MiB", context_tokens=oracle.CONTEXT, revision="v2")
    oracle.assert_same_steps(oracle.greedy(ours), oracle.greedy(model))
    ours.offload.close()
    parts = [f"toy-BF16-0000{n}-of-00002.gguf" for n in (1, 2)]
    assert stub.downloaded == [(name, "v2") for name in parts]
    assert files.fetch(f"{REPOSITORY}/{parts[1]}", None) == stub.cache / parts[0]
    assert files.described_place(f"{REPOSITORY}:bf16", None) == stub.cache / parts[0]
    assert len(stub.downloaded) == 2


def test_a_quantised_model_is_read_from_what_was_downloaded(stub: StubbedHub, open_model: Callable[..., Any]) -> None:
    """Its dense weights, too: would catch those of the copy that has nothing but a header, all zeros."""
    _, theirs = gguf_toy.quantised(stub.folder / "toy-Q8_0.gguf", "Q8_0", dtype=torch.float32)
    ours = from_pretrained(f"{REPOSITORY}:Q8_0", memory="64MiB", context_tokens=oracle.CONTEXT, dtype="float32")
    assert_near(steps(ours, oracle.PROMPT), steps(theirs, oracle.PROMPT), 1e-4)
    ours.offload.close()


def test_a_plan_fetches_headers_alone(stub: StubbedHub) -> None:
    whole, _ = gguf_toy.quantised(stub.folder / "toy-Q4_K_M.gguf", "Q4_K_M")
    config = configure(context_tokens=32)
    spec = read_spec(f"{REPOSITORY}:Q4_K_M", config)
    assert spec.stored_bytes == read_spec(whole, config).stored_bytes
    assert spec.weights_bytes == read_spec(whole, config).weights_bytes
    header = read_gguf_header(whole).data_offset
    assert header > 2000, "or one read would do"
    assert header <= stub.bytes_read <= 2 * header + 2000 < whole.stat().st_size / 2
    assert not stub.downloaded and not stub.cache.exists()


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        (":Q5_K_M", r"no GGUF model of 'Q5_K_M'; there is Q8_0, b-mxfp4.gguf, c-mxfp4.gguf"),
        (":mxfp4", r"2 GGUF models of 'mxfp4'; there is b-mxfp4.gguf, c-mxfp4.gguf: give one, as .*/b-mxfp4.gguf"),
        ("/folder/a-Q8_0.gguf", r"no GGUF model of 'folder/a-Q8_0.gguf'"),
    ],
)
def test_what_is_not_there_or_twice_is_listed(wanted: str, said: str, stub: StubbedHub) -> None:
    for name in ("a-Q8_0.gguf", "b-mxfp4.gguf", "c-mxfp4.gguf", "mmproj-F16.gguf"):
        (stub.folder / name).touch()
    for call in (files.fetch, files.described_place):
        with pytest.raises(ModelError, match=said):
            call(REPOSITORY + wanted, None)
    assert not stub.downloaded


def test_a_repository_that_lacks_a_part_is_named(stub: StubbedHub) -> None:
    (stub.folder / "a-Q8_0-00002-of-00003.gguf").touch()
    with pytest.raises(
        CheckpointError, match=r"lacks 2 of 3 parts of the model, beginning with 'a-Q8_0-00001-of-00003.gguf'"
    ):
        files.fetch(f"{REPOSITORY}:Q8_0", None)


def test_what_is_no_gguf_file_is_said(stub: StubbedHub) -> None:
    (stub.folder / "a-Q8_0.gguf").write_bytes(b"<html>" * 1000)
    with pytest.raises(CheckpointError, match=r"a-Q8_0.gguf is not a GGUF file"):
        files.described_place(f"{REPOSITORY}:Q8_0", None)


def test_without_a_network_it_must_be_in_the_cache(stub: StubbedHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "unreachable", lambda: "there is no network")
    model = f"{REPOSITORY}:Q8_0"
    for call in (files.fetch, files.described_place, files.refuse_unknown):
        with pytest.raises(ModelError, match=r"neither a folder here nor in the hub's cache.*there is no network"):
            call(model, None)
    stub.cache.mkdir()
    (stub.cache / "toy-Q8_0.gguf").touch()
    files.refuse_unknown(model, None)
    assert files.fetch(model, None) == files.described_place(model, None) == stub.cache / "toy-Q8_0.gguf"
