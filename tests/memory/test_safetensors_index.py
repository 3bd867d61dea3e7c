"""Our header reader against safetensors' own, and every way in which a checkpoint can be broken."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from smoe.errors import CheckpointError
from smoe.memory.safetensors_index import ITEM_BYTES, index_checkpoint, read_header, shard_paths

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "I64": torch.int64, "U8": torch.uint8}
shapes = st.lists(st.integers(0, 5), max_size=3)
contents = st.dictionaries(
    st.text("abc.019_é", min_size=1, max_size=12), st.tuples(st.sampled_from(sorted(DTYPES)), shapes), max_size=6
)


@settings(max_examples=60, deadline=None)
@given(contents=contents, has_metadata=st.booleans())
def test_every_tensor_is_where_the_library_reads_it(
    contents: dict[str, tuple[str, list[int]]], has_metadata: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Bytes at our offsets equal the tensors that safetensors gives; scalars, empty tensors and metadata included."""
    path = tmp_path_factory.mktemp("random") / "model.safetensors"
    tensors = {key: torch.randint(0, 100, shape).to(DTYPES[dtype]) for key, (dtype, shape) in contents.items()}
    save_file(tensors, path, metadata={"format": "pt"} if has_metadata else None)
    stored, data = read_header(path), path.read_bytes()
    with safe_open(path, framework="pt") as file:
        assert set(stored) == set(file.keys())
        for key, place in stored.items():
            expected = file.get_tensor(key)
            assert (place.path, place.shape, DTYPES[place.dtype]) == (path, tuple(expected.shape), expected.dtype)
            assert place.nbytes == expected.numel() * ITEM_BYTES[place.dtype]
            raw = torch.frombuffer(
                bytearray(data[place.offset : place.offset + place.nbytes] or b"\0" * 8), dtype=expected.dtype
            )
            assert torch.equal(raw[: expected.numel()].reshape(expected.shape), expected)


TENSORS = {"a": torch.arange(12.0).reshape(3, 4), "b": torch.ones(5)}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / "model.safetensors")
    return tmp_path


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    save_file({"a": TENSORS["a"]}, tmp_path / "one.safetensors")
    save_file({"b": TENSORS["b"]}, tmp_path / "two.safetensors")
    write_index(tmp_path, {"a": "one.safetensors", "b": "two.safetensors"})
    return tmp_path


def write_index(folder: Path, weight_map: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def with_header(header: bytes, data: bytes = b"\0" * 68) -> bytes:
    return struct.pack("<Q", len(header)) + header + data


def entry(**changes: object) -> bytes:
    return json.dumps({"a": {"dtype": "F32", "shape": [3, 4], "data_offsets": [0, 48], **changes}}).encode()


BROKEN: dict[str, bytes] = {
    "empty": b"",
    "seven bytes": b"1234567",
    "length beyond the file": struct.pack("<Q", 10**6) + b"{}",
    "absurd length": struct.pack("<Q", 2**63) + b"{}" * 50,
    "zero length": struct.pack("<Q", 0) + b"{}",
    "not JSON": with_header(b"{'a': 1}"),
    "not text": with_header(b"\xff\xfe{}\x80"),
    "a list": with_header(b"[1, 2]"),
    "a number": with_header(b"17"),
    "entry is no object": with_header(b'{"a": 5}'),
    "entry is null": with_header(b'{"a": null}'),
    "no offsets": with_header(b'{"a": {"dtype": "F32", "shape": [3, 4]}}'),
    "no shape": with_header(b'{"a": {"dtype": "F32", "data_offsets": [0, 48]}}'),
    "three offsets": with_header(entry(data_offsets=[0, 24, 48])),
    "offsets are text": with_header(entry(data_offsets=["zero", "48"])),
    "too few bytes": with_header(entry(data_offsets=[0, 44])),
    "too many bytes": with_header(entry(data_offsets=[0, 52])),
    "reversed offsets": with_header(entry(data_offsets=[48, 0])),
    "before the data": with_header(entry(data_offsets=[-8, 40])),
    "beyond the end": with_header(entry(data_offsets=[1000, 1048])),
    "negative shape": with_header(entry(shape=[-3, -4])),
    "truncated data": with_header(entry(), b"\0" * 47),
    "more data": with_header(entry(), b"\0" * 49),
    "deep": with_header(b'{"a":' * 100_000),
    "deep lists": with_header(b"[" * 100_000 + b"]" * 100_000),
    "a number of thousands of digits": with_header(b'{"a": ' + b"9" * 6000 + b"}"),
    "UTF-16": with_header(entry().decode().encode("utf-16")),
    "no dtype of the format": with_header(entry(dtype="F33"), b"\0" * 48),
    "dtype is a list": with_header(entry(dtype=["F32"]), b"\0" * 48),
    "offsets are fractions": with_header(entry(data_offsets=[0.0, 48.0]), b"\0" * 48),
    "offsets are infinite": with_header(entry(data_offsets=[0, float("inf")]), b"\0" * 48),
    "shape of fractions": with_header(entry(shape=[3.5, 4]), b"\0" * 48),
    "shape of truths": with_header(entry(shape=[True, 12]), b"\0" * 48),
    "shape beyond counting": with_header(entry(shape=[2**64, 0], data_offsets=[0, 0]), b""),
    "metadata is a list": with_header(b'{"__metadata__": [1], ' + entry()[1:], b"\0" * 48),
    "overlap": with_header(entry()[:-1] + b", " + entry().replace(b'"a"', b'"b"')[1:], b"\0" * 48),
    "gap": with_header(entry(data_offsets=[8, 56]), b"\0" * 56),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_file_is_named(kind: str, tmp_path: Path) -> None:
    """Would catch a header that crashes us, or worse, offsets that are believed."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(BROKEN[kind])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        index_checkpoint(tmp_path)


def test_every_truncation_is_seen(checkpoint: Path) -> None:
    """Cut anywhere, an interrupted download is never taken for a checkpoint."""
    path = checkpoint / "model.safetensors"
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"model\.safetensors"):
            index_checkpoint(checkpoint)


def test_shards_are_put_together(sharded: Path) -> None:
    index = index_checkpoint(sharded)
    assert {key: tensor.path.name for key, tensor in index.items()} == {"a": "one.safetensors", "b": "two.safetensors"}
    assert [path.name for path in shard_paths(sharded)] == ["one.safetensors", "two.safetensors"]


def break_missing_shard(folder: Path) -> None:
    (folder / "two.safetensors").unlink()


def break_missing_key(folder: Path) -> None:
    write_index(folder, {"a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors"})


def break_index_json(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("{")


def break_empty_map(folder: Path) -> None:
    write_index(folder, {})


def break_map_is_a_list(folder: Path) -> None:
    write_index(folder, ["a"])


def break_map_deeply(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_bytes(b"[" * 100_000)


def break_map_leads_out(folder: Path) -> None:
    (folder.parent / "two.safetensors").write_bytes((folder / "two.safetensors").read_bytes())
    write_index(folder, {"a": "one.safetensors", "b": "../two.safetensors"})


def break_map_is_absolute(folder: Path) -> None:
    write_index(folder, {"a": "one.safetensors", "b": str(folder / "two.safetensors")})


def break_shard_is_a_folder(folder: Path) -> None:
    (folder / "two.safetensors").unlink()
    (folder / "two.safetensors").mkdir()


def break_shard_is_a_pipe(folder: Path) -> None:
    """Opening it would wait for ever."""
    (folder / "two.safetensors").unlink()
    os.mkfifo(folder / "two.safetensors")


def break_index_is_a_loop(folder: Path) -> None:
    (folder / "model.safetensors.index.json").unlink()
    (folder / "model.safetensors.index.json").symlink_to("model.safetensors.index.json")


def break_map_of_numbers(folder: Path) -> None:
    write_index(folder, {"a": 1, "b": "two.safetensors"})


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (break_missing_shard, "two.safetensors"),
        (break_missing_key, "'c'"),
        (break_index_json, "index.json"),
        (break_empty_map, "index.json"),
        (break_map_is_a_list, "index.json"),
        (break_map_of_numbers, "index.json"),
        (break_map_deeply, "index.json"),
        (break_map_leads_out, "index.json.*'b'"),
        (break_map_is_absolute, "index.json.*'b'"),
        (break_shard_is_a_folder, "two.safetensors"),
        (break_shard_is_a_pipe, "two.safetensors"),
        (break_index_is_a_loop, "index.json"),
    ],
)
def test_a_broken_index_is_named(damage: Callable[[Path], None], named: str, sharded: Path) -> None:
    damage(sharded)
    with pytest.raises(CheckpointError, match=named):
        index_checkpoint(sharded)


def test_no_checkpoint_at_all(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="safetensors"):
        index_checkpoint(tmp_path)
