"""A budget that is too small is refused before the libraries are imported, in the words that loading has for it.

Would catch a refusal with other figures than the one by loading, and one of a budget that loading takes.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from smoe.errors import (
    BudgetError,
    CheckpointError,
    ClusterError,
    ConfigError,
    ModelError,
    UnpreparedError,
    UnsupportedModelError,
)
from smoe.load.pretrained import load
from smoe.presets import configure
from smoe.report.early_refusal import refuse_early, refuse_empty_prompts
from tests import gguf_toy
from tests.packs import pack_folder
from tests.rough_toys import new_folder

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


@pytest.mark.parametrize(
    "switches",
    [{"precision": "int4"}, {"precision": "int8", "low_precision": "int4"}, {"low_precision": "int4"}],
)
def test_a_missing_pack_is_refused(model: str, switches: dict[str, Any]) -> None:
    config = configure(memory_bytes=1 << 34, device="cpu", **switches)
    with pytest.raises(UnpreparedError) as early:
        refuse_early(model, config)
    with pytest.raises(UnpreparedError) as late:
        load(model, config)
    assert str(early.value) == str(late.value) and early.value.facts == late.value.facts


def test_a_pack_that_is_there_is_left_to_loading(toy: Any, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(toy("mixtral"), tmp_path / "model"))
    pack_folder(folder, precision="int4")
    refuse_early(str(folder), configure(memory_bytes=1 << 18, device="cpu", precision="int4"))


def test_a_cluster_that_does_not_exist_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("zmq")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    with pytest.raises(ClusterError, match="there is no cluster 'nowhere' on this machine"):
        refuse_early("demo", configure(cluster="nowhere"))
    with pytest.raises(UnpreparedError, match="needs a cluster"):
        refuse_early("demo", configure(placement="round-robin"))


@pytest.mark.parametrize("switches", [{}, {"device": "emulated", "profile": "rtx-4090"}])
def test_what_loading_has_to_decide_is_left_to_it(model: str, switches: dict[str, Any]) -> None:
    small = 1 << 18 if switches else None
    refuse_early(model, configure(memory_bytes=small or 1 << 34, **{"device": "cpu", **switches}))
    refuse_early(model, configure(resident_share=0.5, **{"device": "cpu", **switches}))


def test_a_family_that_only_the_library_knows(toy: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "jamba"}')
    refuse_early(str(tmp_path), configure(memory_bytes=1 << 18, device="cpu"))


def test_a_family_that_the_library_lacks_is_refused_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = new_folder(tmp_path)
    with monkeypatch.context() as changed, pytest.raises(UnsupportedModelError) as early:
        changed.delitem(sys.modules, "transformers")
        refuse_early(str(place), configure())
    with pytest.raises(UnsupportedModelError) as late:
        load(place, configure())
    assert str(early.value) == str(late.value)


def test_no_model_is_said_first() -> None:
    with pytest.raises(ModelError):
        refuse_early("/nothing/here", configure(memory_bytes=1 << 18))


@pytest.mark.parametrize(
    ("settings", "after", "is_refused"),
    [
        ({"tokenizer_class": "TokenizersBackend"}, None, True),
        ({"tokenizer_class": "PreTrainedTokenizerFast"}, {"type": "TemplateProcessing", "special_tokens": {}}, True),
        ({"tokenizer_class": "Qwen2Tokenizer", "bos_token": None}, {"type": "ByteLevel"}, True),
        ({"tokenizer_class": "GPT2Tokenizer"}, None, False),
        ({"tokenizer_class": "TokenizersBackend", "bos_token": "<s>"}, None, False),
        (
            {"tokenizer_class": "TokenizersBackend"},
            {"type": "TemplateProcessing", "special_tokens": {"<s>": {}}},
            False,
        ),
        ({"tokenizer_class": "TokenizersBackend"}, {"type": "Sequence", "processors": []}, False),
    ],
)
def test_an_empty_prompt_is_refused_where_files_show_that_no_token_begins_a_text(
    settings: dict[str, Any], after: Any, is_refused: bool, toy: Any, tmp_path: Path
) -> None:
    """Would catch a prompt that the tokenizer would have begun by itself."""
    folder = shutil.copytree(toy("mixtral"), tmp_path / "model")
    refuse_empty_prompts(str(folder), [""])  # no tokenizer here
    for name, content in (("tokenizer_config.json", settings), ("tokenizer.json", {"post_processor": after})):
        (folder / name).write_text(json.dumps(content))
    refuse_empty_prompts(str(folder), ["x", " "])
    if is_refused:
        with pytest.raises(ConfigError, match="prompt 2 is empty"):
            refuse_empty_prompts(str(folder), ["x", ""])
    else:
        refuse_empty_prompts(str(folder), ["x", ""])


def test_a_context_that_the_model_does_not_have_is_refused(model: str) -> None:
    config = configure(context_tokens=10**8)
    with pytest.raises(ConfigError, match=r"more than the \d+ positions") as early:
        refuse_early(model, config)
    with pytest.raises(ConfigError) as late:
        load(model, config)
    assert str(early.value) == str(late.value)


@pytest.mark.parametrize("name", ["model.gguf", "folder"])
def test_files_that_are_no_model_are_refused(name: str, toy: Any, tmp_path: Path) -> None:
    place = tmp_path / name
    if name == "folder":
        place.mkdir()
        shutil.copy(toy("mixtral") / "config.json", place)
    else:
        place.write_text("hello")
    with pytest.raises(CheckpointError) as early:
        refuse_early(str(place), configure())
    with pytest.raises(CheckpointError) as late:
        load(place, configure())
    assert str(early.value) == str(late.value)
