"""The transfer format of a model's files: the manifest (list of files), chunks with checksums, pieces in messages.

    file     |c0............|c1............|c2......|     c: a chunk, 4 MiB, with its own SHA-256
    chunk    |p|p|p|p|...                                 p: a piece, 256 KiB, one message: other messages pass between

    files        header | JSON object     the worker's identity and state; its earlier requests are dropped
    manifest     header | JSON array of [name, bytes, SHA-256] | SHA-256 of every chunk, file after file [n, 32]
    summing      header | JSON object     bytes done and in all
    same         header
    piece        header with the piece's position as request number; from the coordinator: header | bytes

A manifest is checked completely before use: names are plain file names, within the user's folder, of data files only;
sizes have bounds, and there are as many checksums as chunks.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

from smoe.cluster import frames
from smoe.cluster.frames import Frame, FrameError, FrameKind

CHUNK_BYTES = 1 << 22
"""The size of a chunk in bytes. Each chunk has its own checksum, and is downloaded again if the checksum is wrong."""
PIECE_BYTES = 1 << 18
SUM_BYTES = hashlib.sha256().digest_size
MOST_BYTES = 1 << 26
"""The maximum number of bytes of a message part: the checksums of the chunks of 8 TiB of files."""
_MOST_TEXT = 1 << 20
_MOST_FILES = 4096
_MOST_FILE_BYTES = 1 << 43
_PIECE_BITS = 32
_NAME = re.compile(r"config\.json|model\.safetensors\.index\.json|[^.].*\.(safetensors|gguf|GGUF|smoe)")
_MOST_NAME_BYTES = 200
_SEPARATORS = frozenset('/\\:*?"<>|')
"""Characters that separate folders in file names of some operating system."""
_SUM = re.compile(r"[0-9a-f]{64}")


class SentFile(NamedTuple):
    """A file of a manifest, with its checksums."""

    name: str
    nbytes: int
    digest: str
    """The SHA-256 of the whole file, in hexadecimal."""
    sums: bytes
    """The SHA-256 of every chunk, concatenated."""

    @property
    def chunks(self) -> int:
        return len(self.sums) // SUM_BYTES

    @property
    def pieces(self) -> int:
        return -(-self.nbytes // PIECE_BYTES)

    def sum_of(self, chunk: int) -> bytes:
        return self.sums[chunk * SUM_BYTES : (chunk + 1) * SUM_BYTES]

    def chunk_bytes(self, chunk: int) -> int:
        return min(CHUNK_BYTES, self.nbytes - chunk * CHUNK_BYTES)

    def piece_bytes(self, piece: int) -> int:
        return min(PIECE_BYTES, self.nbytes - piece * PIECE_BYTES)


class Manifest:
    """The list of all files of a model that a worker needs, with their sizes and checksums."""

    def __init__(self, files: Sequence[SentFile]) -> None:
        self.files = tuple(files)

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in self.files)

    @cached_property
    def mark(self) -> str:
        """A checksum of the whole manifest, by which two manifests are compared."""
        return hashlib.sha256(b"".join(map(bytes, manifest(self)[1:]))).hexdigest()


class PiecePosition(NamedTuple):
    """The file and the piece within the file that a message is about; both are numbered from 0."""

    file: int
    piece: int

    @property
    def number(self) -> int:
        """The file number and the piece number packed into one integer, which a message carries as its request
        number."""
        return self.file << _PIECE_BITS | self.piece


def is_file_name(name: object) -> bool:
    """Return whether `name` is allowed for a model's file: no path, not hidden, and a data file."""
    return (
        isinstance(name, str)
        and _NAME.fullmatch(name) is not None
        and name.isprintable()
        and not _SEPARATORS & set(name)
        and len(name.encode("utf8", "replace")) <= _MOST_NAME_BYTES
    )


def manifest(sent: Manifest) -> list[Any]:
    """Return the MANIFEST message that lists the files `sent`."""
    text = json.dumps([[each.name, each.nbytes, each.digest] for each in sent.files]).encode()
    return [*frames.alone(FrameKind.MANIFEST), text, b"".join(each.sums for each in sent.files)]


def parse_manifest(frame: Frame) -> Manifest:
    """Return the manifest in a MANIFEST message. Raises `FrameError` if its fields contradict each other, or if a name
    is not allowed for a model's file."""
    if len(frame.body) != 2 or len(memoryview(frame.body[0])) > _MOST_TEXT:
        raise FrameError("not a manifest")
    text, sums = frame.body
    try:
        listed = json.loads(bytes(text))
    except (ValueError, RecursionError) as error:
        raise FrameError("the coordinator's list of files is not JSON") from error
    if not isinstance(listed, list) or not 1 <= len(listed) <= _MOST_FILES:
        raise FrameError(f"the coordinator's list of files is empty, or has more than {_MOST_FILES} files")
    for entry in listed:
        _check_entry(entry)
    if len({entry[0].casefold() for entry in listed}) < len(listed):
        raise FrameError("the coordinator's list of files has two files of the same name")
    chunks = [-(-entry[1] // CHUNK_BYTES) for entry in listed]
    if len(memoryview(sums)) != SUM_BYTES * sum(chunks):
        raise FrameError(
            f"the coordinator's list of files has {len(memoryview(sums))} bytes of checksums; "
            f"{SUM_BYTES * sum(chunks)} bytes are needed for its {sum(chunks)} chunks"
        )
    files, begin, all_sums = [], 0, bytes(sums)
    for (name, nbytes, digest), count in zip(listed, chunks, strict=True):
        end = begin + SUM_BYTES * count
        files.append(SentFile(name, nbytes, digest, all_sums[begin:end]))
        begin = end
    return Manifest(files)


def _check_entry(entry: object) -> None:
    if not isinstance(entry, list) or len(entry) != 3:
        raise FrameError(
            "every entry in the coordinator's list of files must be [name, bytes, checksum]; one entry is "
            f"{entry!r:.80}"
        )
    name, nbytes, digest = entry
    if not is_file_name(name):
        raise FrameError(
            f"the coordinator's list of files has a file named {name!r:.80}, which is not a name of a model's file"
        )
    if type(nbytes) is not int or not 1 <= nbytes <= _MOST_FILE_BYTES:
        raise FrameError(f"the coordinator's list of files has a file of {nbytes!r:.40} bytes, which is impossible")
    if not isinstance(digest, str) or not _SUM.fullmatch(digest):
        raise FrameError(f"the coordinator's list of files has {digest!r:.40} instead of a checksum")


def ask(place: PiecePosition) -> list[Any]:
    """Return the message by which a worker requests one piece of a file."""
    return frames.alone(FrameKind.PIECE, place.number)


def piece(place: PiecePosition, data: bytes) -> list[Any]:
    """Return the message in which the coordinator sends the bytes of one piece of a file."""
    return [*frames.alone(FrameKind.PIECE, place.number), data]


def parse_place(frame: Frame, sent: Manifest) -> PiecePosition:
    """Return the file number and piece number in a PIECE message. Raises `FrameError` for a piece that does not
    exist."""
    place = PiecePosition(frame.request >> _PIECE_BITS, frame.request & (1 << _PIECE_BITS) - 1)
    if place.file >= len(sent.files) or place.piece >= sent.files[place.file].pieces:
        raise FrameError(f"a worker requested piece {place.piece} of file {place.file}, and there is no such piece")
    return place


def parse_piece(frame: Frame, sent: Manifest) -> tuple[PiecePosition, memoryview]:
    """Return the position and the bytes of a received piece of a file. Raises `FrameError` if the number of bytes is
    wrong."""
    place = parse_place(frame, sent)
    data = memoryview(frame.body[0] if len(frame.body) == 1 else b"")
    if len(data) != sent.files[place.file].piece_bytes(place.piece):
        raise FrameError("a piece of the wrong size")
    return place, data
