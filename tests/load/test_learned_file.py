"""What was learned of a model: kept for its weights, refused where anything is not as its header says.

Would catch: tensors of other weights believed, a file cut short or changed that is read as if whole, a new format, two
files of the same content that differ.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from smoe.load.learned_file import NotLearnedError, keep_learned, learned, path_of
from tests import zoo

TENSORS = {
    "first": torch.arange(12.0).reshape(3, 4),
    "second": torch.zeros(2, dtype=torch.int64),
    "third": torch.ones(3, 2, dtype=torch.bfloat16).t(),
    "none": torch.zeros(0, 2),
}

PLAIN = {name: tensor.contiguous() for name, tensor in TENSORS.items()}


@pytest.fixture
def folder(tmp_path: Path, own_cache: None) -> Path:
    zoo.save("mixtral", tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def path(folder: Path) -> Path:
    return keep_learned("guess", 3, folder, TENSORS, {"tokens": 50})


def test_what_is_kept_comes_back(folder: Path, path: Path) -> None:
    assert path == path_of("guess", folder) and path.suffix == ".safetensors"
    tensors, said = learned("guess", 3, folder)
    assert said["tokens"] == 50 and tensors.keys() == TENSORS.keys()
    assert all(torch.equal(tensors[name], TENSORS[name]) for name in TENSORS)
    written = path.read_bytes()
    assert keep_learned("guess", 3, folder, TENSORS, {"tokens": 50}).read_bytes() == written, "the same every time"


def test_other_kinds_and_other_models_have_none(folder: Path, path: Path, toy: Callable[..., Path]) -> None:
    for kind, other in (("another", folder), ("guess", toy("mixtral"))):
        with pytest.raises(NotLearnedError, match="no tuned values are stored for the model in"):
            learned(kind, 3, other)


def test_other_weights_in_the_same_place_are_refused(folder: Path, path: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in weights.items()}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(NotLearnedError, match="was made for other weights than those in"):
        learned("guess", 3, folder)


@pytest.mark.parametrize("kept", [0.99, 0.5, 0.001, 0.0])
def test_a_file_that_was_cut_short_is_refused(kept: float, folder: Path, path: Path) -> None:
    whole = path.read_bytes()
    path.write_bytes(whole[: int(kept * len(whole))])
    with pytest.raises(NotLearnedError, match="truncated, damaged or not readable"):
        learned("guess", 3, folder)


def test_another_format_is_refused(folder: Path, path: Path) -> None:
    with pytest.raises(NotLearnedError, match="has format 3; this version of smoe reads format 4"):
        learned("guess", 4, folder)


@pytest.mark.parametrize("change", [{"tensors": "0"}, {"checkpoint": "0"}, {"format": None}])
def test_what_says_that_it_is_something_else_is_refused(change: dict[str, object], folder: Path, path: Path) -> None:
    with safe_open(path, "pt") as file:
        said = json.loads(file.metadata()["smoe"])
    save_file(PLAIN, path, {"smoe": json.dumps(said | change)})
    with pytest.raises(NotLearnedError):
        learned("guess", 3, folder)


def test_tensors_that_were_changed_are_refused(folder: Path, path: Path) -> None:
    with safe_open(path, "pt") as file:
        said = file.metadata()
    save_file(PLAIN | {"first": TENSORS["first"] + 1}, path, said)
    with pytest.raises(NotLearnedError, match="its tensors do not match its header"):
        learned("guess", 3, folder)


def test_a_file_of_somebody_else_is_refused(folder: Path, path: Path) -> None:
    save_file(PLAIN, path)
    with pytest.raises(NotLearnedError, match="has format None"):
        learned("guess", 3, folder)
