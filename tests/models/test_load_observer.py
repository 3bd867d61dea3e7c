"""What a program sees of loading. Would catch a total that is never reached, experts or an embedding on disk that count
as weights to read, and a budget that is known only after the weights were read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import pytest
from safetensors import safe_open

from smoe.load.pretrained import load
from smoe.models.load_observer import LoadObserver
from smoe.policy.budget import Ledger
from smoe.presets import configure
from tests import gguf_toy, released_toy
from tests.toy import save_toy


class Seen(LoadObserver):
    def __init__(self) -> None:
        self.events = list[str]()
        self.read = list[tuple[int, int]]()

    def examined(self) -> None:
        self.events.append("examined")

    def divided(self, ledger: Ledger) -> None:
        self.events.append("divided")

    def weight_bytes(self, done: int, total: int) -> None:
        self.events.append("weights")
        self.read.append((done, total))


def seen_of(model: Path, memory: int = 1 << 30) -> Seen:
    seen = Seen()
    with load(model, configure(memory_bytes=memory, context_tokens=64), observer=seen).offload:
        return seen


def of_folder(folder: Path) -> tuple[Path, int]:
    """A checkpoint, and the bytes of its weights without experts."""
    save_toy(folder)
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return folder, sum(file.get_tensor(key).nbytes for key in file.keys() if ".experts." not in key)  # noqa: SIM118


def of_gguf(folder: Path) -> tuple[Path, int]:
    folder.mkdir()
    path, _ = gguf_toy.quantised(folder / "toy.gguf", "Q4_K_M")
    return path, sum(int(each.n_bytes) for each in gguf.GGUFReader(path).tensors if "_exps" not in each.name)


@pytest.mark.parametrize("make", [of_folder, of_gguf])
def test_all_weights_but_the_experts_are_counted(make: Callable[[Path], tuple[Path, int]], tmp_path: Path) -> None:
    model, nbytes = make(tmp_path / "model")
    seen = seen_of(model)
    done = [each for each, _ in seen.read]
    assert seen.events[:3] == ["examined", "divided", "weights"]
    assert done == sorted(done) and len(set(done)) > 4 and done[-1] == nbytes
    assert {total for _, total in seen.read} == {nbytes}


def test_the_weights_of_a_released_checkpoint_are_counted(tmp_path: Path) -> None:
    released_toy.save(tmp_path / "model", released_toy.SCHEMES["fp8"])
    seen = seen_of(tmp_path / "model")
    assert len(seen.read) > 4 and seen.read[-1][0] == seen.read[-1][1]
