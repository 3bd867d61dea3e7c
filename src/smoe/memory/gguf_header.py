"""Reads the header of a GGUF file: its metadata and its table of tensors. Every length is checked.

    4 bytes "GGUF", u32 version, u64 number of tensors, u64 number of metadata entries
    every entry:     key (u64 length, bytes), u32 kind, value; an array is u32 kind, u64 count, values
    every tensor:    name, u32 number of dimensions, u64 each (innermost first), u32 type, u64 offset in the data
    zeros up to the alignment, then the data: the tensors' bytes

Nothing is memory-mapped, and no allocation exceeds the file's size. Arrays, such as a vocabulary of hundreds of
thousands of strings, are skipped and read on demand (`read_array`).
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, NoReturn

from smoe.errors import CheckpointError
from smoe.memory.checkpoint_json import check_regular
from smoe.memory.expert_files import FileIdentity, check_identity, identity_of

MAGIC = b"GGUF"
ALIGNMENT = "general.alignment"
_VERSIONS = (2, 3)
_WINDOW_BYTES = 2**20
_MAX_HEADER_BYTES = 2**28
"""The limit for the size of a header. One with a vocabulary of a million strings takes a tenth of it."""
_MAX_NAME_BYTES = 2**12
_MAX_TEXT_BYTES = 2**24
_MAX_DIMENSIONS = 4
_MAX_ALIGNMENT = 2**20
_STRING, _ARRAY = 8, 9
_PART = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<suffix>\.gguf)", re.IGNORECASE)
_MAX_PARTS = 10_000
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_LEAST_ENTRY_BYTES = 8 + 4 + 1
_LEAST_TENSOR_BYTES = 8 + 4 + 4 + 8


@dataclass(frozen=True)
class GgufArray:
    """The location of an array in the metadata of a GGUF file. Its values are read on demand."""

    offset: int
    """The offset of the first value in the file, in bytes."""
    kind: int
    count: int


Value = int | float | bool | str | GgufArray
"""The Python type of a metadata value."""


class TensorEntry(NamedTuple):
    """An entry in a GGUF file's table of tensors."""

    name: str
    dimensions: tuple[int, ...]
    """The dimensions, innermost first."""
    kind: int
    """The number of the tensor's type in ggml."""
    offset: int
    """The offset in bytes from the beginning of the data."""


@dataclass(frozen=True)
class GgufHeader:
    """The header of one GGUF file."""

    path: Path
    identity: FileIdentity
    metadata: Mapping[str, Value]
    tensors: tuple[TensorEntry, ...]
    data_offset: int
    """The offset in the file at which the tensors' bytes begin."""
    alignment: int


def is_gguf(path: Path) -> bool:
    """Return whether a path names a GGUF file. The extension decides; a file without one is recognized by its first
    bytes."""
    if path.suffix.lower() == ".gguf":
        return True
    if path.suffix or not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def part_stem(name: str) -> str:
    """Return the beginning that the file names of all files of a split GGUF model share, given one of the names. For a
    model in one file, return the whole name."""
    match = _PART.fullmatch(name)
    return name if match is None else match["stem"]


def part_names(name: str) -> list[str]:
    """Return the file names of all files of a split GGUF model in order, given one of the names. For a model in one
    file, return only its name.

    Raises `CheckpointError` if the number in the name exceeds the number of files.
    """
    match = _PART.fullmatch(name)
    if match is None:
        return [name]
    count = int(match["count"])
    if not 1 <= count <= _MAX_PARTS or not 1 <= int(match["number"]) <= count:
        raise CheckpointError(
            f"the file name {name} says part {match['number']} of {match['count']}, which is impossible; give the "
            "file the name under which it was published"
        )
    return [f"{match['stem']}-{number:05}-of-{match['count']}{match['suffix']}" for number in range(1, count + 1)]


def part_paths(path: Path) -> list[Path]:
    """Return the paths of all files of a model in order, given one of them. Raise `CheckpointError` if a file is
    missing."""
    paths = [path.with_name(name) for name in part_names(path.name)]
    if paths == [path]:
        return paths
    absent = [part.name for part in paths if not part.exists()]
    if absent:
        raise CheckpointError(
            f"{path.parent} lacks {len(absent)} of {len(paths)} parts of the model, beginning with {absent[0]}; "
            "download these parts again"
        )
    return paths


def read_gguf_header(path: Path) -> GgufHeader:
    """Return the header of a GGUF file. Raise `CheckpointError` if the file is of another kind, damaged or
    truncated."""
    check_regular(path)
    with path.open("rb", buffering=0) as file:
        identity = identity_of(file.fileno())
    return _read_header(path, identity)


@lru_cache(maxsize=64)  # headers without arrays are small, and all readers of a model use them
def _read_header(path: Path, identity: FileIdentity) -> GgufHeader:
    with path.open("rb", buffering=0) as file:
        check_identity(path, file.fileno(), identity)
        reader = _Reader(path, file, identity.nbytes, 0)
        tensor_count, entry_count = _read_counts(reader)
        metadata: dict[str, Value] = {}
        for number in range(entry_count):
            key = reader.text(f"the name of metadata entry {number}", _MAX_NAME_BYTES)
            if key in metadata:
                reader.fail(f"the metadata entry {key!r} occurs twice")
            metadata[key] = _read_value(reader, key)
        tensors = tuple(_read_tensor(reader, number) for number in range(tensor_count))
        alignment = _alignment(reader, metadata)
        data_offset = -(-reader.position // alignment) * alignment
    return GgufHeader(path, identity, metadata, tensors, data_offset, alignment)


def read_array(header: GgufHeader, key: str) -> list[Any]:
    """Return the values of the metadata entry `key`, an array of numbers or strings. Raise `CheckpointError` if the
    entry is no array."""
    array = header.metadata.get(key)
    if not isinstance(array, GgufArray):
        raise CheckpointError(f"{header.path}: the metadata entry {key!r} should be a list; download the file again")
    with header.path.open("rb", buffering=0) as file:
        check_identity(header.path, file.fileno(), header.identity)
        reader = _Reader(header.path, file, header.identity.nbytes, array.offset)
        if array.kind == _STRING:
            return reader.texts(array.count, f"an entry of {key!r}", _MAX_TEXT_BYTES)
        size = array.count * struct.calcsize(_SCALARS[array.kind])
        return list(struct.unpack(f"<{array.count}{_SCALARS[array.kind]}", reader.take(size, repr(key))))


class _Reader:
    """Reads a GGUF file from beginning to end. If the file ends too early, it raises an error that says where."""

    def __init__(self, path: Path, file: BinaryIO, size: int, position: int) -> None:
        self.path = path
        self._file = file
        self._end = min(size, position + _MAX_HEADER_BYTES)
        self._is_cut = size <= position + _MAX_HEADER_BYTES
        self._window = b""
        self._begin = position
        """The offset of the buffered bytes in the file."""
        self.position = position

    @property
    def left(self) -> int:
        """The number of bytes of the file that remain to be read."""
        return self._end - self.position

    def take(self, count: int, what: str) -> bytes:
        """Return the next `count` bytes of the file. `what` describes these bytes in errors."""
        if count > self.left:
            self.fail(f"{what} ends behind the file's end" if self._is_cut else f"{what} makes the header too long")
        start = self.position - self._begin
        if not 0 <= start <= start + count <= len(self._window):
            self._file.seek(self.position)
            self._window, self._begin, start = self._read(max(count, min(_WINDOW_BYTES, self.left))), self.position, 0
            if len(self._window) < count:
                self.fail(f"{what} ends behind the file's end")
        self.position += count
        return self._window[start : start + count]

    def skip(self, count: int, what: str) -> None:
        """Skip the next `count` bytes of the file."""
        if count > self.left:
            self.take(count, what)  # raises the error
        self.position += count

    def skip_texts(self, count: int, what: str) -> None:
        """Skip `count` strings. A vocabulary has hundreds of thousands, so strings within the buffered bytes are
        skipped fast."""
        while count:
            count -= self._skip_buffered_texts(count)
            if count:
                self.skip(self.number("Q", what), what)  # it fills the buffer, or raises the error
                count -= 1
        self.skip(0, what)  # raises the error if the last string ends behind the file's end

    def _skip_buffered_texts(self, count: int) -> int:
        """Skip at most `count` strings whose lengths are within the buffered bytes. Return how many were skipped."""
        length_at, window, start = struct.Struct("<Q").unpack_from, self._window, self.position - self._begin
        last = len(window) - 8
        for done in range(count):
            if start > last:
                count = done
                break
            start += 8 + length_at(window, start)[0]
        self.position = self._begin + start
        return count

    def number(self, form: str, what: str) -> Any:
        """Return one number in the format `form` of Python's struct module: an int, a float or a bool."""
        return struct.unpack(f"<{form}", self.take(struct.calcsize(form), what))[0]

    def text(self, what: str, most: int) -> str:
        """Return a string that follows its length in bytes, which may be at most `most`."""
        length = self.number("Q", what)
        if length > most:
            self.fail(f"{what} is {length} bytes long")
        try:
            return self.take(length, what).decode("utf-8")
        except UnicodeDecodeError as error:
            self.fail(f"{what} is no text: {error.reason}")

    def texts(self, count: int, what: str, most: int) -> list[str]:
        """Return `count` strings. Like `skip_texts`, this is fast for strings within the buffered bytes."""
        found: list[str] = []
        while len(found) < count:
            found += self._buffered_texts(count - len(found), most)
            if len(found) < count:
                found.append(self.text(what, most))  # it fills the buffer, or raises the error
        return found

    def _buffered_texts(self, count: int, most: int) -> list[str]:
        """Return the next strings that are whole within the buffered bytes, `count` at most. Stop before a string that
        is too long or no text."""
        length_at, window, start = struct.Struct("<Q").unpack_from, self._window, self.position - self._begin
        found: list[str] = []
        try:
            while len(found) < count and start + 8 <= len(window):
                end = start + 8 + length_at(window, start)[0]
                if end > len(window) or end - start - 8 > most:
                    break
                found.append(window[start + 8 : end].decode("utf-8"))
                start = end
        except UnicodeDecodeError:
            pass  # `text` raises an error with the file's name
        self.position = self._begin + start
        return found

    def fail(self, why: str) -> NoReturn:
        raise CheckpointError(f"{self.path} is damaged or cut short: {why}; download it again")

    def _read(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            more = self._file.read(count - len(data))
            if not more:
                break
            data += more
        return data


def _read_counts(reader: _Reader) -> tuple[int, int]:
    """Return the numbers of tensors and of metadata entries, after checking the beginning of the file."""
    path = reader.path
    start = reader.take(min(4, reader.left), "its first word")
    if not start:
        raise CheckpointError(f"{path} is empty; its download has probably failed: download the file again")
    if start != MAGIC:
        found = repr(start).removeprefix("b")
        raise CheckpointError(
            f"{path} is not a GGUF file: it begins with the bytes {found}, not with {MAGIC.decode()!r}; it is a file "
            "of another kind, or its download has failed: give another file, or download this one again"
        )
    version = reader.number("I", "the version")
    if version and version & 0xFFFF == 0:
        raise CheckpointError(
            f"{path} is a big-endian GGUF file; smoe reads only little-endian files: download a little-endian file, "
            "which nearly all publishers have"
        )
    if version not in _VERSIONS:
        raise CheckpointError(
            f"{path} is GGUF of version {version}; smoe reads the versions {' and '.join(map(str, _VERSIONS))}: use "
            "a newer file"
        )
    tensors, entries = (reader.number("Q", f"the number of {what}") for what in ("tensors", "metadata entries"))
    if tensors * _LEAST_TENSOR_BYTES + entries * _LEAST_ENTRY_BYTES > reader.left:
        reader.fail(f"it is too short for {tensors} tensors and {entries} metadata entries")
    return tensors, entries


def _read_value(reader: _Reader, key: str) -> Value:
    kind = reader.number("I", repr(key))
    if kind == _STRING:
        return reader.text(repr(key), _MAX_TEXT_BYTES)
    if kind != _ARRAY:
        value: int | float | bool = reader.number(_scalar(reader, kind, key), repr(key))
        return value
    kind, count = reader.number("I", repr(key)), reader.number("Q", repr(key))
    array = GgufArray(reader.position, kind, count)
    if kind != _STRING:
        reader.skip(count * struct.calcsize(_scalar(reader, kind, key)), repr(key))
        return array
    if count * 8 > reader.left:
        reader.fail(f"it is too short for the {count} texts of {key!r}")
    reader.skip_texts(count, repr(key))
    return array


def _scalar(reader: _Reader, kind: int, key: str) -> str:
    if kind not in _SCALARS:
        reader.fail(f"the metadata entry {key!r} is of kind {kind}, which does not exist, or of lists of lists")
    return _SCALARS[kind]


def _read_tensor(reader: _Reader, number: int) -> TensorEntry:
    name = reader.text(f"the name of tensor {number}", _MAX_NAME_BYTES)
    count = reader.number("I", repr(name))
    if not 1 <= count <= _MAX_DIMENSIONS:
        reader.fail(f"tensor {name!r} has {count} dimensions")
    dimensions = struct.unpack(f"<{count}Q", reader.take(8 * count, repr(name)))
    return TensorEntry(name, dimensions, reader.number("I", repr(name)), reader.number("Q", repr(name)))


def _alignment(reader: _Reader, metadata: Mapping[str, Value]) -> int:
    alignment = metadata.get(ALIGNMENT, 32)
    is_power = isinstance(alignment, int) and 0 < alignment <= _MAX_ALIGNMENT and alignment & (alignment - 1) == 0
    if not is_power or not isinstance(alignment, int) or isinstance(alignment, bool):
        reader.fail(f"{ALIGNMENT!r} is {alignment!r:.40}, no power of two")
    return alignment
