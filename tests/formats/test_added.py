"""A format that a package adds for a type of GGUF files: read, computed and dequantized as a built-in one.

Would catch: a place that knows built-in formats alone, a package that is imported for a file without its type.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from smoe.errors import CheckpointError, ConfigError
from smoe.formats.added import GROUP, added_format
from smoe.formats.registry import FORMATS
from smoe.memory.gguf_header import read_gguf_header
from smoe.memory.gguf_index import BLOCKS
from tests import gguf_toy, oracle
from tests.installed import install

NUMBER = 144
"""A type that the gguf package does not know."""
SOURCE = """
from dataclasses import replace
from smoe.formats.registry import FORMATS
Q4 = replace(FORMATS["Q4_0"], name="Q4_TOO")
taken = FORMATS["Q4_0"]
nothing = 5
"""


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Installs a package whose format is what is named; afterwards all is as before."""
    (tmp_path / "formats_of_mine.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    yield lambda value: install(tmp_path, value.replace(":", "_"), GROUP, {str(NUMBER): value})
    added_format.cache_clear()
    FORMATS.pop("Q4_TOO", None)
    BLOCKS.pop("Q4_TOO", None)
    sys.modules.pop("formats_of_mine", None)


def renumbered(path: Path) -> Path:
    """The file, whose tensors of ggml's type 2 (Q4_0) say that they are of another type."""
    data = path.read_bytes()
    for entry in read_gguf_header(path).tensors:
        if entry.kind == 2:
            name, sizes = entry.name.encode(), entry.dimensions
            before = struct.pack(f"<Q{len(name)}sI{len(sizes)}Q", len(name), name, len(sizes), *sizes)
            assert data.count(before + struct.pack("<I", 2)) == 1
            data = data.replace(before + struct.pack("<I", 2), before + struct.pack("<I", NUMBER))
    path.write_bytes(data)
    return path


@torch.no_grad()
def test_a_model_in_an_added_format(
    tmp_path: Path, package: Callable[[str], None], open_model: Callable[..., PreTrainedModel]
) -> None:
    path, _ = gguf_toy.quantised(tmp_path / "toy.gguf", "Q4_0")
    built_in = open_model(path, "half")(oracle.PROMPT).logits
    assert "formats_of_mine" not in sys.modules
    package("formats_of_mine:Q4")
    model = open_model(renumbered(path), "half")
    assert {tensor.kind for tensor in read_gguf_header(path).tensors} >= {NUMBER} and "Q4_TOO" in FORMATS
    assert torch.equal(model(oracle.PROMPT).logits, built_in)


def test_a_type_that_no_package_offers(tmp_path: Path, open_model: Callable[..., PreTrainedModel]) -> None:
    path, _ = gguf_toy.quantised(tmp_path / "toy.gguf", "Q4_0")
    with pytest.raises(CheckpointError, match=f"type number {NUMBER}, which is unknown.* or needs a plug-in"):
        open_model(renumbered(path), "half")


@pytest.mark.parametrize(
    ("values", "why"),
    [
        (["formats_of_mine:nothing"], "it is no smoe.formats.base.Format"),
        (["formats_of_mine:taken"], "its name Q4_0 is that of a built-in format"),
        (["formats_of_mine:absent"], "importing it failed with AttributeError"),
        (["formats_of_mine:Q4", "formats_of_mine:taken"], "offer it; uninstall all packages but one"),
    ],
)
def test_what_cannot_be_used_is_refused(values: list[str], why: str, package: Callable[[str], None]) -> None:
    for value in values:
        package(value)
    with pytest.raises(ConfigError, match=why) as error:
        added_format(NUMBER)
    assert values[0] in str(error.value) and error.value.facts["setting"] == GROUP
