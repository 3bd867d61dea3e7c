"""What files there are, as the coordinator says it: what comes is what was sent, and what could harm is no manifest.
Would catch a file that lands outside of the folder, or is more than data; memory taken by a number that a stranger
named.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest

from smoe.cluster import files, frames
from smoe.cluster.files import CHUNK_BYTES, PIECE_BYTES, Manifest, PiecePosition, SentFile
from smoe.cluster.frames import Frame, FrameError, FrameKind

DIGEST = "a" * 64


def sent(parts: list[Any]) -> Frame:
    return frames.parse([bytes(part) for part in parts])


def of(listed: Any, sums: bytes = bytes(32)) -> Frame:
    return sent([*frames.alone(FrameKind.MANIFEST), json.dumps(listed).encode(), sums])


MANIFEST = Manifest(
    [
        SentFile("model-00001-of-00002.safetensors", 2 * CHUNK_BYTES + 5, DIGEST, bytes(range(96))),
        SentFile("config.json", 7, DIGEST, bytes(32)),
    ]
)


def test_a_manifest_comes_as_it_was_sent() -> None:
    found = files.parse_manifest(sent(files.manifest(MANIFEST)))
    assert found.files == MANIFEST.files
    assert found.mark == MANIFEST.mark
    first = found.files[0]
    assert (first.chunks, first.pieces) == (3, 2 * CHUNK_BYTES // PIECE_BYTES + 1)
    assert [first.chunk_bytes(n) for n in range(3)] == [CHUNK_BYTES, CHUNK_BYTES, 5]
    assert first.sum_of(1) == bytes(range(32, 64))
    other = Manifest([MANIFEST.files[0]._replace(sums=hashlib.sha256(b"x").digest() * 3), MANIFEST.files[1]])
    assert other.mark != MANIFEST.mark


@pytest.mark.parametrize(
    "name",
    [
        "../config.json",
        "/etc/model.safetensors",
        "sub/model.safetensors",
        "sub\\model.safetensors",
        "C:model.safetensors",
        "..",
        ".",
        "",
        ".hidden.safetensors",
        ".safetensors",
        "model.safetensors.part",
        "modeling.py",
        "run.sh",
        "tokenizer.json",
        "a\n.safetensors",
        "a\0.safetensors",
        "\ud800.safetensors",
        "a" * 300 + ".gguf",
        7,
        None,
        ["config.json"],
    ],
)
def test_a_name_is_a_model_files_own(name: Any) -> None:
    assert not files.is_file_name(name)
    with pytest.raises(FrameError):
        files.parse_manifest(of([[name, 5, DIGEST]]))


@pytest.mark.parametrize(
    "name",
    ["config.json", "model.safetensors", "model.safetensors.index.json", "Q4 (K) é.gguf", "a.gguf.experts.int4.smoe"],
)
def test_models_may_be_called_so(name: str) -> None:
    assert files.parse_manifest(of([[name, 5, DIGEST]])).files[0].name == name


@pytest.mark.parametrize(
    "listed, sums",
    [
        ([], b""),
        ({}, b""),
        (7, b""),
        ([["config.json", 5]], bytes(32)),
        ([["config.json", 0, DIGEST]], b""),
        ([["config.json", -5, DIGEST]], b""),
        ([["config.json", True, DIGEST]], bytes(32)),
        ([["config.json", 5.0, DIGEST]], bytes(32)),
        ([["config.json", 1 << 60, DIGEST]], bytes(32)),
        ([["config.json", 5, "A" * 64]], bytes(32)),
        ([["config.json", 5, "a" * 63]], bytes(32)),
        ([["config.json", 5, DIGEST]], bytes(31)),
        ([["config.json", 5, DIGEST]], bytes(64)),
        ([["config.json", CHUNK_BYTES + 1, DIGEST]], bytes(32)),
        ([["a.gguf", 5, DIGEST], ["A.gguf", 5, DIGEST]], bytes(64)),
        ([[f"{n}.gguf", 1, DIGEST] for n in range(5000)], bytes(32 * 5000)),
    ],
)
def test_a_manifest_that_contradicts_itself_is_none(listed: Any, sums: bytes) -> None:
    with pytest.raises(FrameError):
        files.parse_manifest(of(listed, sums))


@pytest.mark.parametrize("body", [[], [b"[]"], [b"[" * 100_000, b""], [b"\xff", b""], [b" " * (1 << 21), b""]])
def test_what_is_no_manifest_is_refused(body: list[bytes]) -> None:
    with pytest.raises(FrameError):
        files.parse_manifest(sent([*frames.alone(FrameKind.MANIFEST), *body]))


def test_a_piece_comes_as_it_was_sent() -> None:
    last = PiecePosition(0, MANIFEST.files[0].pieces - 1)
    assert files.parse_place(sent(files.ask(last)), MANIFEST) == last
    place, data = files.parse_piece(sent(files.piece(last, b"12345")), MANIFEST)
    assert (place, bytes(data)) == (last, b"12345")


@pytest.mark.parametrize(
    "place, data",
    [
        (PiecePosition(2, 0), b"x"),
        (PiecePosition(0, 33), b"12345"),
        (PiecePosition(0, 32), b"1234"),
        (PiecePosition(1, 0), bytes(8)),
    ],
)
def test_a_piece_that_is_none_is_refused(place: PiecePosition, data: bytes) -> None:
    with pytest.raises(FrameError):
        files.parse_piece(sent(files.piece(place, data)), MANIFEST)
    with pytest.raises(FrameError):
        files.parse_piece(sent(files.ask(place)), MANIFEST)
