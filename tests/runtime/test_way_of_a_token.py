"""Which files a token passes through: counted, and compared with the page that describes it.

Would catch a step that is spread over more and more files, and a page that names files which are no longer part of it.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import pytest
import torch

from smoe import from_pretrained
from smoe.runtime.engine import Engine

REPOSITORY = Path(__file__).parents[2]
PAGE = REPOSITORY / "docs" / "way-of-a-token.md"
MOST_OF_A_LAYER, MOST_OF_A_TOKEN = 34, 48
"""Files, those of reading threads among them; they may only become fewer."""
_CODE_OF_FUNCTION = 1
"""A flag of code objects: CO_OPTIMIZED, which module and class bodies do not have."""


class Passed(NamedTuple):
    """Files below src/smoe, in the order of their first entry, each once."""

    token: list[str]
    """By all threads, in one decode step."""
    layer: list[str]
    """From the experts' entry of one layer to its exit."""


class Watch:
    """Notes the file of every call of ours, on all threads that begin while it is set."""

    def __init__(self) -> None:
        self.files: dict[str, None] = {}

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_flags & _CODE_OF_FUNCTION and "/smoe/" in code.co_filename:
            self.files.setdefault(code.co_filename.rsplit("/smoe/", 1)[1])


@pytest.fixture(scope="module")
def passed() -> Iterator[Passed]:
    """The step that passes through most files, of the embedded model with a part of its experts in memory."""
    watch, layers = Watch(), list[list[str]]()
    original = Engine.run_experts

    def watched(self: Engine, *given: Any) -> torch.Tensor:
        before, watch.files = watch.files, {}
        try:
            return original(self, *given)
        finally:
            layers.append(list(watch.files))
            watch.files = before | watch.files

    threading.setprofile(watch)
    try:
        model = from_pretrained("demo", memory="15MiB", context_tokens=512, prefill_tokens=256)
        with model.offload as engine, torch.no_grad(), pytest.MonkeyPatch.context() as patch:
            cache, ids = engine.new_cache(), torch.arange(50, 80).unsqueeze(0)
            model(input_ids=ids[:, :10], past_key_values=cache, use_cache=True, logits_to_keep=1)
            patch.setattr(Engine, "run_experts", watched)
            tokens = []
            for n in range(10, 30):
                watch.files = {}
                sys.setprofile(watch)
                model(input_ids=ids[:, n : n + 1], past_key_values=cache, use_cache=True)
                sys.setprofile(None)
                tokens.append(list(watch.files))
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    yield Passed(max(tokens, key=len), max(layers, key=len))


def test_a_step_passes_through_no_more_files(passed: Passed) -> None:
    assert len(passed.layer) <= MOST_OF_A_LAYER, sorted(passed.layer)
    assert len(passed.token) <= MOST_OF_A_TOKEN, sorted(passed.token)


def test_the_page_names_files_that_exist() -> None:
    named = re.findall(r"`([\w/]+\.py)`", PAGE.read_text())
    assert len(named) > 30
    assert [name for name in named if not (REPOSITORY / "src" / "smoe" / name).exists()] == []


def test_the_page_names_what_a_layer_passes_through(passed: Passed) -> None:
    """All but a few that are less than a step of their own."""
    unnamed = [name for name in passed.layer if f"`{name}`" not in PAGE.read_text()]
    assert len(unnamed) <= 12, unnamed
