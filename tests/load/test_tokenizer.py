"""The tokenizer of whatever `from_pretrained` takes."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from smoe import load_tokenizer
from smoe.errors import SmoeError
from smoe.models.checkpoint import whole_checkpoint
from smoe.models.files import DEMO_FOLDER
from tests import gguf_toy

TEXT = "Once upon a time"


def test_a_folders_is_the_librarys() -> None:
    library = AutoTokenizer.from_pretrained(DEMO_FOLDER)
    assert load_tokenizer("demo")(TEXT)["input_ids"] == library(TEXT)["input_ids"]


def test_a_gguf_files_is_in_the_file(tmp_path: Path) -> None:
    path, _ = gguf_toy.quantised(tmp_path / "toy.gguf", "Q8_0")
    ids = load_tokenizer(path)(TEXT)["input_ids"]
    assert ids and ids == whole_checkpoint(path, None).tokenizer()(TEXT)["input_ids"]


def test_a_template_replaces_the_models() -> None:
    tokenizer = load_tokenizer("demo", chat_template="{{ messages[0]['content'] }}!")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False) == "Hi!"


def test_files_without_one_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(SmoeError):
        load_tokenizer(tmp_path)
