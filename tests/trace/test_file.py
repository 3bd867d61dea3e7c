"""Traces on disk, against plain lists and plain NumPy.

Would catch: a field at the wrong place, rows of a failed step that stay, a file that is not whole and is read anyway.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smoe.errors import ConfigError, DiskSpaceError, TraceError
from smoe.routing import Phase
from smoe.trace.file import Trace, TraceWriter
from smoe.trace.record import TracedLayer, TraceHeader

RULE = {"score": "sigmoid", "weight": "share", "scale": 2.5, "bias": [0.1, 0.2, 0.3], "groups": None}
HEADER = TraceHeader("a model", "toy", 0.0, (TracedLayer(1, 3, 2, RULE), TracedLayer(4, 5, 1)))
"""Layers that differ in everything: rows are as wide as the widest."""
DOCUMENTATION = (Path(__file__).parents[2] / "docs" / "traces.md").read_text(encoding="utf8")
WORDS = re.search(r"runs this block -->\n```python\n(.*?)```", DOCUMENTATION, re.DOTALL)

half = st.integers(-0x7C00, 0x7C00).map(lambda bits: float(np.copysign(np.uint16(abs(bits)).view(np.float16), bits)))
"""Every float16 but NaN."""
weight = st.floats(width=32, allow_nan=False)


@st.composite
def passes(draw: Any) -> tuple[int, int, list[list[float]], list[list[int]], list[list[float]]]:
    """(layer, phase, logits [T, E], index [T, K], weights [T, K]) of one layer in one step."""
    layer = draw(st.sampled_from(HEADER.layers))
    tokens = draw(st.integers(1, 4))

    def table(values: Any, width: int) -> Any:
        return draw(st.lists(st.lists(values, min_size=width, max_size=width), min_size=tokens, max_size=tokens))

    experts, top_k = layer.experts, layer.top_k
    index = table(st.integers(0, experts), top_k)
    return layer.layer, draw(st.integers(0, 1)), table(half, experts), index, table(weight, top_k)


def rows_of(step: int, layer: int, phase: int, logits: Any, index: Any, weights: Any) -> np.ndarray:
    traced = next(entry for entry in HEADER.layers if entry.layer == layer)
    rows = HEADER.blank_rows(traced, len(index))
    rows["step"], rows["sequence"], rows["phase"] = step, range(len(index)), phase
    rows["router_logits"][:, : traced.experts] = logits
    rows["top_k_index"][:, : traced.top_k] = index
    rows["top_k_weights"][:, : traced.top_k] = weights
    return rows


@pytest.fixture
def written(tmp_path: Path) -> Callable[[int], Path]:
    """`written(steps)`: a trace of so many steps, two tokens each."""

    def write(steps: int) -> Path:
        path = tmp_path / "a.trace"
        with TraceWriter(path, HEADER, replace=True) as writer:
            for step in range(steps):
                writer.append(rows_of(step, 1, 1, [[1, 2, 3], [4, 5, 6]], [[2, 1], [0, 2]], [[0.7, 0.3]] * 2))
                writer.keep()
        return path

    return write


@settings(max_examples=60, deadline=None)
@given(steps=st.lists(passes(), max_size=8))
def test_what_is_written_is_read_by_plain_numpy(steps: list[Any], tmp_path_factory: pytest.TempPathFactory) -> None:
    """By the very words of the documentation, and by our reader; and a step that failed in between is not there."""
    path = tmp_path_factory.mktemp("trace") / "any.trace"
    with TraceWriter(path, HEADER) as writer:
        for number, step in enumerate(steps):
            writer.append(rows_of(77, *step))
            writer.drop()
            writer.append(rows_of(number, *step))
            writer.keep()
    trace = Trace(path)
    assert trace.header == HEADER
    tables = [trace.rows]
    if steps and WORDS is not None:  # NumPy maps no empty files
        scope: dict[str, Any] = {"path": path}
        exec(WORDS[1], scope)
        tables.append(scope["rows"])
    for table in tables:
        assert len(table) == sum(len(index) for *_, index, _ in steps)
        expected = [
            (number, token, layer, phase, logits[token], index[token], weights[token])
            for number, (layer, phase, logits, index, weights) in enumerate(steps)
            for token in range(len(index))
        ]
        for row, (number, token, layer, phase, logits, index, weights) in zip(table, expected, strict=True):
            assert (row["step"], row["sequence"], row["layer"], row["phase"]) == (number, token, layer, phase)
            experts, top_k = len(logits), len(index)
            assert row["router_logits"].tolist() == logits + [-np.inf] * (5 - experts)
            assert row["top_k_index"].tolist() == index + [experts] * (2 - top_k)
            assert row["top_k_weights"].tolist() == weights + [0.0] * (2 - top_k)
    routings = trace.routings()
    assert [(r.layer, r.experts, r.top_k_index, r.phase is Phase.DECODE) for r in routings] == [
        (layer, len(logits[0]), index, phase == 1) for layer, phase, logits, index, _ in steps
    ]
    assert list(routings[1:3]) == [routings[n] for n in range(len(steps))][1:3]


def test_sizes_of_experts_are_as_many_as_layers_or_unknown() -> None:
    """Traces of earlier versions say nothing of them."""
    old = {name: part for name, part in HEADER.as_json().items() if name != "expert_bytes"}
    assert TraceHeader.from_json(old) == HEADER and HEADER.expert_bytes is None
    known = replace(HEADER, expert_bytes=(4096, 8192))
    assert TraceHeader.from_json(known.as_json()) == known
    for sizes in ([4096], [4096, 0], "ab", 3):
        with pytest.raises((ValueError, TypeError)):
            TraceHeader.from_json(old | {"expert_bytes": sizes})


def test_the_documentation_has_its_block() -> None:
    assert WORDS is not None


def test_rows_are_not_loaded(written: Callable[[int], Path]) -> None:
    assert isinstance(Trace(written(3)).rows, np.memmap)


def test_a_file_cut_anywhere_is_refused(written: Callable[[int], Path], tmp_path: Path) -> None:
    whole = written(2).read_bytes()
    path = tmp_path / "cut.trace"
    for length in [*range(200), 4095, 4096, *range(4097, len(whole))]:
        path.write_bytes(whole[:length])
        with pytest.raises(TraceError):
            Trace(path)
    path.write_bytes(whole + b"\0")
    with pytest.raises(TraceError, match="truncated or damaged"):
        Trace(path)


@pytest.mark.parametrize(
    ("offset", "value", "words"),
    [
        (0, b"smoepack", "not a routing trace"),
        (8, struct.pack("<I", 2), "format 2, this smoe reads format 1"),
        (16, b"\xff" * 8, "never finished"),
        (16, struct.pack("<Q", 3), "truncated"),
        (24, b"[", "header"),
        (24, b'{"model": 1}  ', "header"),
    ],
)
def test_what_is_no_trace_says_why(offset: int, value: bytes, words: str, written: Callable[[int], Path]) -> None:
    path = written(2)
    content = bytearray(path.read_bytes())
    content[offset : offset + len(value)] = value
    path.write_bytes(content)
    with pytest.raises(TraceError, match=words):
        Trace(path)


def test_a_folder_and_a_missing_file(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(TraceError, match="cannot read"):
            Trace(path)


def test_after_an_error_nothing_is_there(tmp_path: Path) -> None:
    path = tmp_path / "a.trace"
    with pytest.raises(ZeroDivisionError), TraceWriter(path, HEADER) as writer:
        writer.append(HEADER.blank_rows(HEADER.layers[0], 4))
        writer.keep()
        (unfinished,) = tmp_path.iterdir()
        assert unfinished != path
        with pytest.raises(TraceError):
            Trace(unfinished)
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_there_stays(written: Callable[[int], Path]) -> None:
    path = written(1)
    before = path.read_bytes()
    with pytest.raises(ConfigError, match="`force`"):
        TraceWriter(path, HEADER)
    with pytest.raises(ZeroDivisionError), TraceWriter(path, HEADER, replace=True):
        raise ZeroDivisionError
    assert path.read_bytes() == before


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
@pytest.mark.parametrize(("name", "steps"), [("a model", 1), ("a model", 10_000), ("a model" * 100_000, 0)])
def test_a_full_disk(name: str, steps: int, tmp_path: Path) -> None:
    """Noticed at the header (where it is larger than the buffer), while writing, or when the buffer is written out."""
    header = replace(HEADER, model=name)
    path = tmp_path / "a.trace"
    path.with_name(f"a.trace.partial-{os.getpid()}").symlink_to("/dev/full")
    with pytest.raises(DiskSpaceError, match="was full"), TraceWriter(path, header) as writer:
        for _ in range(steps):
            writer.append(HEADER.blank_rows(HEADER.layers[0], 1))
            writer.keep()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot write"):
        TraceWriter(tmp_path / "nowhere" / "a.trace", HEADER)


def test_scores_of_a_router_without_a_rule_are_refused(written: Callable[[int], Path]) -> None:
    with pytest.raises(TraceError, match="layer 4"):
        Trace(written(1)).routings(with_scores=True)
