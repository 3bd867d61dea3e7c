"""Which files a token passes through: counted, and compared with the page that describes it.

Would catch a step that is spread over more and more files, and a page that names files which are no longer part of it.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from smoe import from_pretrained
from smoe.runtime.passes import Passes
from tests.entered_files import Watch

REPOSITORY = Path(__file__).parents[2]
PAGE = REPOSITORY / "docs" / "way-of-a-token.md"
MOST_OF_A_LAYER, MOST_OF_A_TOKEN = 19, 36
"""Files, those of reading threads among them; they may only become fewer."""
FIRST_LOAD = {"compute/expert_math.py", "kernels/matrix.py", "memory/arena.py"}
"""Where the first load into a slot makes its views, in addition."""
READERS = {"memory/movers.py", "memory/expert_files.py", "memory/store.py"}
"""What reading threads use, at any time."""


class Passed(NamedTuple):
    """Files below src/smoe, in the order of their first entry, each once, without `FIRST_LOAD`."""

    token: list[str]
    """By all threads, in one decode step."""
    layer: list[str]
    """From the experts' entry of one layer to its exit."""


@pytest.fixture(scope="module")
def passed() -> Iterator[Passed]:
    """The step that passes through most files, of the embedded model with a part of its experts in memory. By our
    kernels, which not every CPU uses by itself."""
    watch, layers = Watch(), list[list[str]]()
    original = Passes.run_experts

    def watched(self: Passes, *given: Any) -> torch.Tensor:
        before, watch.files = watch.files, {}
        try:
            return original(self, *given)
        finally:
            layers.append(list(watch.files))
            watch.files = before | watch.files

    threading.setprofile(watch)
    try:
        model = from_pretrained("demo", memory="16MiB", context_tokens=512, prefill_tokens=256, kernels="own-order")
        with model.offload as engine, torch.no_grad(), pytest.MonkeyPatch.context() as patch:
            cache, ids = engine.new_cache(), torch.arange(50, 80).unsqueeze(0)
            model(input_ids=ids[:, :10], past_key_values=cache, use_cache=True, logits_to_keep=1)
            patch.setattr(Passes, "run_experts", watched)
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
    yield Passed(*(max((without(FIRST_LOAD, of) for of in every), key=len) for every in (tokens, layers)))


def without(those: set[str], files: list[str]) -> list[str]:
    return [file for file in files if file not in those]


def test_a_step_passes_through_no_more_files(passed: Passed) -> None:
    assert len(passed.layer) <= MOST_OF_A_LAYER, sorted(passed.layer)
    assert len(passed.token) <= MOST_OF_A_TOKEN, sorted(passed.token)


def test_the_page_names_files_that_exist() -> None:
    named = re.findall(r"`([\w/]+\.py)`", PAGE.read_text())
    assert len(named) > 30
    assert [name for name in named if not (REPOSITORY / "src" / "smoe" / name).exists()] == []


def test_the_page_names_what_a_layer_passes_through(passed: Passed) -> None:
    assert [name for name in passed.layer if f"`{name}`" not in PAGE.read_text()] == ["metrics.py"]


def test_the_page_follows_the_order_of_the_computing_thread(passed: Passed) -> None:
    _, section = PAGE.read_text().split("## 3.")
    named = list(dict.fromkeys(re.findall(r"`([\w/]+\.py)`", section.split("## 4.")[0])))
    order = [name for name in passed.layer if name in named and name not in READERS]
    assert [name for name in named if name in order] == order
