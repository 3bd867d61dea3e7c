"""GGUF headers, beside the gguf package's own reader; and damaged files, which must be named and never believed."""

from __future__ import annotations

import os
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from smoe.errors import CheckpointError
from smoe.memory import gguf_header
from smoe.memory.gguf_header import GgufArray, is_gguf, part_paths, read_array, read_gguf_header
from smoe.memory.gguf_index import BLOCKS, index_gguf, is_readable, read_headers
from smoe.memory.gguf_tensors import plain_tensor, read_tensor
from smoe.memory.safetensors_index import StoredTensor
from smoe.memory.store import row_of

TYPES = [Type.F32, Type.F16, Type.BF16, Type.Q8_0, Type.Q4_0, Type.Q4_K, Type.Q6_K, Type.MXFP4]
TEXTS = ["a", "", "é" * 40, "token"]


def index(path: Path) -> dict[str, StoredTensor]:
    return index_gguf(read_headers(path))


def write(path: Path, *, parts: int = 1, alignment: int | None = None, **options: Any) -> Path:
    """A file with a tensor of every type and an entry of every kind."""
    writer = gguf.GGUFWriter(path, "toy", split_max_tensors=-(-len(TYPES) // parts) if parts > 1 else 0, **options)
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    writer.add_array("texts", TEXTS)
    writer.add_array("numbers", [1, 2, 3])
    writer.add_array("shares", [0.5, -1.0])
    writer.add_uint8("u8", 200)
    writer.add_int16("i16", -3)
    writer.add_uint64("u64", 2**40)
    writer.add_float64("f64", 0.1)
    writer.add_bool("yes", True)
    for kind in TYPES:
        writer.add_tensor(kind.name, stored(kind), raw_dtype=None if kind in (Type.F32, Type.F16) else kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def stored(kind: Type) -> np.ndarray[Any, Any]:
    """Three matrices of five rows of 256 as a type stores them; what the package cannot quantise is random scales."""
    numbers = np.random.default_rng(int(kind)).standard_normal((3, 5, 256)).astype(np.float32)
    try:
        return gguf.quants.quantize(numbers, kind)
    except NotImplementedError:
        elements, nbytes = BLOCKS[kind.name]
        shape = (3, 5, 256 // elements * nbytes)
        return np.random.default_rng(0).integers(0, 60, shape, dtype=np.uint8)  # no exponent of infinity among them


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("gguf") / "small.gguf")


@pytest.mark.parametrize("alignment", [None, 64, 1])
def test_the_packages_reader_finds_the_same(alignment: int | None, tmp_path: Path) -> None:
    """Would catch dimensions in ggml's order, and an offset that counts from elsewhere."""
    path = write(tmp_path / "a.gguf", alignment=alignment)
    theirs, ours, data = gguf.GGUFReader(path), index(path), path.read_bytes()
    assert list(ours) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        found = ours[tensor.name]
        assert (found.dtype, found.shape) == (tensor.tensor_type.name, tuple(reversed(tensor.shape.tolist())))
        assert (found.offset, found.nbytes) == (tensor.data_offset, tensor.n_bytes)
        assert data[found.offset : found.offset + found.nbytes] == tensor.data.tobytes()
        assert found.path == path and found.identity is not None


def test_metadata_is_what_was_written(small: Path) -> None:
    header = read_gguf_header(small)
    said = header.metadata
    assert (said["u8"], said["i16"], said["u64"], said["yes"]) == (200, -3, 2**40, True)
    assert said["f64"] == 0.1 and said["general.architecture"] == "toy"
    assert isinstance(said["texts"], GgufArray) and said["texts"].count == len(TEXTS)
    assert read_array(header, "texts") == TEXTS
    assert (read_array(header, "numbers"), read_array(header, "shares")) == ([1, 2, 3], [0.5, -1.0])
    with pytest.raises(CheckpointError, match="'u8' should be a list"):
        read_array(header, "u8")


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_numbers_are_those_of_the_package(kind: Type, small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole, by row and in small pieces; would catch a row that does not begin at a block."""
    monkeypatch.setattr("smoe.memory.gguf_tensors._PIECE_ELEMENTS", 3 * 256)
    tensor = index(small)[kind.name]
    expected = torch.from_numpy(gguf.quants.dequantize(stored(kind), kind))
    assert is_readable(kind.name) and torch.equal(plain_tensor(tensor).float(), expected)
    assert torch.equal(plain_tensor(row_of(tensor, 1)).float(), expected[1])
    target = torch.empty(3, 5, 256, dtype=torch.bfloat16)
    read_tensor(tensor, target)
    assert torch.equal(target, expected.bfloat16())


def test_what_the_package_cannot_dequantise_is_not_readable() -> None:
    assert not is_readable("I8") and not is_readable("Q8_K")


def test_a_file_that_was_written_anew_is_not_read(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf")
    tensor, header = index(path)["F32"], read_gguf_header(path)
    os.utime(path, ns=(1, 1))
    for read in (lambda: plain_tensor(tensor), lambda: read_array(header, "texts")):
        with pytest.raises(CheckpointError, match="written or replaced"):
            read()


def test_all_parts_are_read_from_any_of_them(tmp_path: Path, small: Path) -> None:
    write(tmp_path / "m.gguf", parts=3)
    parts = sorted(tmp_path.iterdir())
    assert [part.name for part in parts] == [f"m-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    for part in parts:
        assert part_paths(part) == parts
        found = index(part)
        assert set(found) == set(index(small)) and {tensor.path for tensor in found.values()} == set(parts)
        for key, tensor in index(small).items():
            assert torch.equal(plain_tensor(found[key]), plain_tensor(tensor))


def lose_a_part(parts: list[Path]) -> None:
    parts[1].unlink()


def exchange_parts(parts: list[Path]) -> None:
    first, second = parts[0].read_bytes(), parts[1].read_bytes()
    parts[0].write_bytes(second)
    parts[1].write_bytes(first)


def take_a_part_of_another_model(parts: list[Path]) -> None:
    (parts[0].parent / "other").mkdir()
    write(parts[0].parent / "other" / "m.gguf", parts=4)
    parts[1].write_bytes((parts[0].parent / "other" / "m-00002-of-00004.gguf").read_bytes())


def repeat_a_tensor(parts: list[Path]) -> None:
    parts[1].write_bytes(parts[1].read_bytes().replace(b"Q8_0", b"BF16").replace(b"Q4_0", b"F32\0"))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lose_a_part, "lacks 1 of 3 parts.*m-00002-of-00003.gguf"),
        (exchange_parts, "m-00001-of-00003.gguf contains part 1 .counted from 0."),
        (take_a_part_of_another_model, "m-00002-of-00003.gguf contains part 1 .* of 4"),
        (repeat_a_tensor, "'BF16' a second time"),
    ],
)
def test_parts_that_do_not_belong_together(damage: Callable[[list[Path]], None], said: str, tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", parts=3)
    parts = sorted(tmp_path.iterdir())
    damage(parts)
    with pytest.raises(CheckpointError, match=said):
        index(parts[0])


def test_a_part_under_another_name_is_not_a_model(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", parts=3)
    (tmp_path / "m-00001-of-00003.gguf").rename(tmp_path / "renamed.gguf")
    with pytest.raises(CheckpointError, match=r"part 0 .counted from 0. of 3"):
        index(tmp_path / "renamed.gguf")


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def entry(key: bytes, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: bytes = b"x", dimensions: tuple[int, ...] = (32, 2), kind: int = 0, offset: int = 0) -> bytes:
    count = len(dimensions)
    return text(name) + struct.pack(f"<I{count}QIQ", count, *dimensions, kind, offset)


def file(
    *tensors: bytes,
    entries: tuple[bytes, ...] = (),
    counts: tuple[int, int] | None = None,
    version: int = 3,
    magic: bytes = b"GGUF",
    data: int = 256,
) -> bytes:
    head = magic + struct.pack("<IQQ", version, *(counts or (len(tensors), len(entries))))
    head += b"".join(entries) + b"".join(tensors)
    return head + bytes(-len(head) % 32 + data)


HUGE = 2**62
DAMAGES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "bad.gguf is empty"),
    "another format": (b"PK\3\4" + bytes(100), "not a GGUF file"),
    "no text": (b"U\x94eg" + bytes(100), r"it begins with the bytes 'U\\x94eg', not with 'GGUF'"),
    "magic alone": (b"GGUF", "version ends behind"),
    "old": (file(version=1), "version 1"),
    "new": (file(version=9), "version 9"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "tensors without end": (file(counts=(HUGE, 0)), "too short for 46"),
    "entries without end": (file(counts=(0, HUGE)), "too short for 0 tensors"),
    "more tensors than said": (file(tensor(), counts=(9, 0), data=300), "damaged"),
    "a long name": (file(struct.pack("<Q", HUGE), counts=(1, 0)), "name of tensor 0 is 46"),
    "a name of no letters": (file(tensor(b"\xff\xfe")), "no text"),
    "five dimensions": (file(tensor(dimensions=(1,) * 5)), "'x' has 5 dimensions"),
    "no dimensions": (file(tensor(dimensions=())), "'x' has 0 dimensions"),
    "a type of no name": (file(tensor(kind=77)), "'x' is of ggml's type number 77"),
    "a type that was given up": (file(tensor(kind=4)), "'x' is of ggml's type number 4"),
    "half a block": (file(tensor(dimensions=(33, 1), kind=8)), "'x' has rows of 33"),
    "out of the file": (file(tensor(), data=255), "cut short.*'x' ends at"),
    "far out of the file": (file(tensor(dimensions=(HUGE, HUGE))), "cut short.*'x' ends at"),
    "twice": (file(tensor(), tensor(offset=256), data=512), "'x' a second time"),
    "overlapping": (file(tensor(), tensor(b"y", offset=128), data=512), "'y' overlaps 'x'"),
    "with a gap": (file(tensor(), tensor(b"y", offset=512), data=1024), "'y' does not follow 'x'"),
    "no gap before the first": (file(tensor(offset=32), data=512), "'x' does not follow the header"),
    "an entry twice": (file(entries=(entry(b"a", 0, b"1"),) * 2), "'a' occurs twice"),
    "an entry of no kind": (file(entries=(entry(b"a", 13, b"1"),)), "'a' is of kind 13"),
    "lists of lists": (file(entries=(entry(b"a", 9, struct.pack("<IQ", 9, 1)),)), "lists of lists"),
    "a list without end": (file(entries=(entry(b"a", 9, struct.pack("<IQ", 4, HUGE)),)), "'a' ends behind"),
    "texts without end": (file(entries=(entry(b"a", 9, struct.pack("<IQ", 8, HUGE)),)), "texts of 'a'"),
    "a text without end": (file(entries=(entry(b"a", 8, struct.pack("<Q", HUGE)),)), "'a' is 46"),
    "an odd alignment": (file(entries=(entry(b"general.alignment", 4, struct.pack("<I", 3)),)), "alignment' is 3"),
    "no alignment": (file(entries=(entry(b"general.alignment", 4, struct.pack("<I", 0)),)), "alignment' is 0"),
    "an alignment of a text": (file(entries=(entry(b"general.alignment", 8, text(b"x")),)), "alignment' is 'x'"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_named(name: str, tmp_path: Path) -> None:
    data, said = DAMAGES[name]
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=said) as error:
        index(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_the_hand_made_file_is_right_where_nothing_is_wrong(tmp_path: Path) -> None:
    """Or the damages above would be of files that nobody could read."""
    path = tmp_path / "good.gguf"
    path.write_bytes(file(tensor(), tensor(b"y", offset=256), entries=(entry(b"a", 0, b"1"),), data=512))
    assert set(index(path)) == {"x", "y"} == {found.name for found in gguf.GGUFReader(path).tensors}


def test_a_big_endian_file_of_the_package_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "big.gguf", endianess=gguf.GGUFEndian.BIG)
    with pytest.raises(CheckpointError, match="big-endian"):
        index(path)


def test_what_is_no_file_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(CheckpointError, match="ordinary file"):
        index(tmp_path / "pipe.gguf")


def test_a_file_is_known_by_its_name_or_its_beginning(small: Path, tmp_path: Path) -> None:
    (tmp_path / "sha256-1234").write_bytes(small.read_bytes())
    (tmp_path / "other").write_bytes(b"text")
    assert is_gguf(tmp_path / "sha256-1234") and is_gguf(Path("none.GGUF"))
    assert not is_gguf(tmp_path / "other") and not is_gguf(tmp_path) and not is_gguf(tmp_path / "model.safetensors")


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damage_anywhere_is_an_error_or_harmless(data: st.DataObject, small: Path, tmp_path: Path) -> None:
    """Cut anywhere, or with bytes changed anywhere in the header: no other error, no hang, no memory to speak of, and
    what is found lies in the file."""
    whole = small.read_bytes()
    end = read_gguf_header(small).data_offset
    changed = bytearray(whole[: data.draw(st.integers(0, len(whole)), "cut")] if data.draw(st.booleans()) else whole)
    for _ in range(data.draw(st.integers(0, 4), "flips")):
        if changed:
            place = data.draw(st.integers(0, min(end, len(changed)) - 1), "place")
            changed[place] = data.draw(st.integers(0, 255), "byte")
    path = tmp_path / "changed.gguf"
    path.write_bytes(changed)
    gguf_header._read_header.cache_clear()  # two examples within a tick of the clock look the same
    tracemalloc.start()
    try:
        found = index(path)
    except CheckpointError as error:
        assert str(path) in str(error)
    else:
        assert all(0 <= t.offset <= t.offset + t.nbytes <= len(changed) for t in found.values())
    finally:
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert most < 2**22
