"""A budget that is too small is refused before the libraries are imported, in the words that loading has for it.

Would catch a refusal with other figures than the one by loading, and one of a budget that loading takes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from smoe.errors import BudgetError, ModelError
from smoe.load.pretrained import load
from smoe.presets import configure
from smoe.report.early_refusal import refuse_early
from tests import gguf_toy

CASES = ["demo", "mixtral", "gpt_oss", "gguf"]


@pytest.fixture(params=CASES)
def model(request: pytest.FixtureRequest, toy: Any, tmp_path: Path) -> str:
    if request.param == "gguf":
        return str(gguf_toy.write(tmp_path / "toy.gguf", gguf_toy.make("olmoe")))
    return request.param if request.param == "demo" else str(toy(request.param))


@pytest.mark.parametrize("memory", ["100KiB", 1 << 18])
def test_it_says_what_loading_says(model: str, memory: Any) -> None:
    config = configure(memory_bytes=100 << 10 if isinstance(memory, str) else memory, device="cpu")
    with pytest.raises(BudgetError) as early:
        refuse_early(model, config)
    with pytest.raises(BudgetError) as late:
        load(model, config)
    assert str(early.value) == str(late.value)


@pytest.mark.parametrize("switches", [{}, {"precision": "int4"}, {"device": "emulated", "profile": "rtx-4090"}])
def test_what_loading_has_to_decide_is_left_to_it(model: str, switches: dict[str, Any]) -> None:
    small = 1 << 18 if switches else None
    refuse_early(model, configure(memory_bytes=small or 1 << 34, **{"device": "cpu", **switches}))
    refuse_early(model, configure(resident_share=0.5, **{"device": "cpu", **switches}))


def test_a_family_that_only_the_library_knows(toy: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "jamba"}')
    refuse_early(str(tmp_path), configure(memory_bytes=1 << 18, device="cpu"))


def test_no_model_is_said_first() -> None:
    with pytest.raises(ModelError):
        refuse_early("/nothing/here", configure(memory_bytes=1 << 18))
