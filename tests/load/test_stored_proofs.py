"""Results of proofs that an earlier load has stored: used while all that they depend on is the same, and never else.

Would catch a load that repeats proofs, and, which is worse, a kernel that is used because it was right for other files,
another machine, other settings or another version.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from smoe.errors import UnsupportedModelError
from smoe.kernels import object_cache
from smoe.kernels.isa import widest
from smoe.load import stored_proofs
from smoe.load.stored_proofs import PROOFS
from tests import gguf_toy, oracle, promised
from tests.entered_files import Watch

pytestmark = [
    pytest.mark.skipif(sys.platform == "win32", reason="results are stored where files have an owner"),
    pytest.mark.usefixtures("proven_once"),
]
Load = Callable[..., str]
REFERENCES = {"models/reference.py", "kernels/proof.py", "fastpath/attention_proof.py"}
"""What runs only to compare with the library."""


@pytest.fixture
def folder(toy: Callable[..., Path], tmp_path: Path) -> Path:
    """A model whose files a test may change."""
    sizes = {"hidden_size": 256, "head_dim": 64, "moe_intermediate_size": 64}  # such that our kernels may compute it
    return Path(shutil.copytree(toy("qwen3_moe", dtype=torch.bfloat16, **sizes), tmp_path / "model"))


@pytest.fixture
def tested(folder: Path, open_model: Callable[..., Any]) -> Load:
    """Load the model, with torch's kernels unless `switches` say otherwise: when it was tested."""

    def load(budget: str | int = "half", **switches: Any) -> str:
        model = open_model(folder, budget, **{"kernels": "torch", **switches})
        try:
            return str(model.offload.self_test)
        finally:
            model.offload.close()

    return load


def test_a_later_load_takes_the_results(tested: Load) -> None:
    assert tested() == "now"
    assert tested() == "earlier"
    assert tested("full") == "earlier", "how much memory there is changes no result"


@pytest.mark.parametrize("kind", ["bf16", "quantised"])
def test_a_load_with_stored_results_enters_no_reference(
    kind: str, folder: Path, tmp_path: Path, open_model: Callable[..., Any]
) -> None:
    """And it computes the same, with the same kernels."""
    promised.needs(widest() is not None and not promised.disagreeing, promised.MACHINE_CODE)
    place = folder if kind == "bf16" else gguf_toy.quantised(tmp_path / "toy.gguf", "Q4_K_M", head_dim=64)[0]
    switches = {"kernels": "own-order"}  # nothing is measured, so both loads decide alike
    models, entered = [], []
    for _ in range(2):
        watch = Watch()
        threading.setprofile(watch)
        sys.setprofile(watch)
        try:
            models.append(open_model(place, "half", **switches))
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
        entered.append(set(watch.files))
    first, second = (model.offload for model in models)
    assert (first.self_test, second.self_test) == ("now", "earlier")
    assert entered[0] >= REFERENCES
    assert not REFERENCES & entered[1]
    assert first.arithmetic == second.arithmetic == "own-order"
    modules = zip(*(model.modules() for model in models), strict=True)
    assert all(vars(one).keys() == vars(other).keys() for one, other in modules), "the same forward functions"
    oracle.assert_same_steps(*(oracle.greedy(model) for model in models))


def test_interleaved_experts_are_tested_themselves(tmp_path: Path, open_model: Callable[..., Any]) -> None:
    """Rows of experts are interleaved where most of them fit: other kernels compute them, which were not tested with
    less memory."""
    promised.needs(widest() is not None and not promised.disagreeing, promised.MACHINE_CODE)
    place = gguf_toy.quantised(tmp_path / "toy.gguf", "Q4_K_M", head_dim=64)[0]
    found = []
    for budget in ("half", "full", "half", "full"):
        engine = open_model(place, budget, kernels="own-order").offload
        maths = engine.executor.compute.experts.maths.values()
        found.append((any(math.is_interleaved for math in maths), engine.self_test))
        engine.close()
    promised.needs(found[1][0] and not found[0][0], "interleaved rows")
    assert [when for _, when in found] == ["now", "now", "earlier", "earlier"]


CHANGES: dict[str, Callable[[pytest.MonkeyPatch, Path], dict[str, Any] | None]] = {
    "a limit of torch's instruction sets": lambda patch, _: patch.setenv("ATEN_CPU_CAPABILITY", "default"),
    "a limit of oneDNN's": lambda patch, _: patch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2"),
    "a limit of ours": lambda patch, _: patch.setenv("SMOE_MAX_CPU_ISA", "avx2"),
    "a library that is loaded first": lambda patch, _: patch.setenv("LD_PRELOAD", ""),
    "the version": lambda patch, _: patch.setattr(object_cache, "__version__", "0.0"),
    "the code of kernels": lambda patch, _: patch.setattr(object_cache, "source_digest", lambda: "another"),
    "the code of proofs": lambda patch, _: patch.setattr(stored_proofs, "_code_digest", lambda: "another"),
    "the processor": lambda patch, _: patch.setattr(object_cache, "_processor", lambda: "another"),
    "the system": lambda patch, _: patch.setattr(stored_proofs, "_system", lambda: ["another"]),
    "the libraries": lambda patch, _: patch.setattr(stored_proofs, "_libraries", lambda: ["another"]),
    "the classes": lambda patch, _: patch.setattr(stored_proofs, "_files_of_classes", lambda _: [Path(__file__)]),
    "threads": lambda patch, _: {"threads": 2},
    "a setting": lambda patch, _: {"max_sequences": 2},
    "the dtype": lambda patch, _: {"dtype": "float32"},
    "the kernels": lambda patch, _: {"kernels": "native"},
    "the weights' file": lambda patch, folder: os.utime(next(folder.glob("*.safetensors")), ns=(1, 1)),
    "the configuration": lambda patch, folder: _rewrite(folder / "config.json"),
}


def _rewrite(path: Path) -> None:
    path.write_text(path.read_text() + "\n")


@pytest.mark.parametrize("what", CHANGES)
def test_results_hold_only_for_what_they_were_made_with(
    what: str, folder: Path, tested: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    tested()
    before = torch.get_num_threads()
    try:
        switches = CHANGES[what](monkeypatch, folder) or {}
        assert tested(**switches) == "now"
        assert tested(**switches) == "earlier", "the new results are stored, too"
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    "switch",
    [
        (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "medium"),
        (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp, False),
    ],
    ids=["precision", "attention"],
)
def test_switches_of_torch_are_part_of_the_key(switch: tuple[Any, Any, Any], tested: Load) -> None:
    get, put, another = switch
    tested()
    before = get()
    try:
        put(another)
        assert tested() == "now"
    finally:
        put(before)
    assert tested() == "earlier"


@pytest.mark.parametrize("damage", ["cut", "changed", "foreign"])
def test_damaged_results_are_made_again(damage: str, tested: Load) -> None:
    tested()
    (entry,) = PROOFS.folder.iterdir()
    data = entry.read_bytes()
    if damage == "foreign":
        entry.chmod(0o666)  # others may have written it
    else:
        entry.write_bytes(data[:-1] if damage == "cut" else data.replace(b"false", b"true "))
        assert entry.read_bytes() != data
    assert tested() == "now"
    assert tested() == "earlier"


def test_results_can_be_made_at_every_load(tested: Load) -> None:
    assert [tested(self_test="always") for _ in range(2)] == ["now", "now"]
    assert tested() == "earlier", "they are stored all the same"


def test_a_model_that_fails_its_test_has_no_older_result(tested: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    tested()

    def fail(*_: Any) -> Any:
        raise UnsupportedModelError("it differs")

    with monkeypatch.context() as patch:
        patch.setattr("smoe.load.selftest.check_experts", fail)
        with pytest.raises(UnsupportedModelError):
            tested(self_test="always")
        with pytest.raises(UnsupportedModelError):
            tested()
    assert tested() == "now"


def test_nothing_is_stored_for_an_emulated_device(tested: Load) -> None:
    assert [tested(device="emulated") for _ in range(2)] == ["now", "now"]
    assert not PROOFS.folder.exists()


@pytest.mark.parametrize("kernel", ["experts", "norms"])
def test_a_kernel_that_disagrees_is_not_used_because_it_once_agreed(
    kernel: str, folder: Path, open_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    promised.needs(widest() is not None and not promised.disagreeing, promised.MACHINE_CODE)

    before = open_model(folder, "half", kernels="auto")
    promised.needs(kernel == "experts" or _has_norms_of_ours(before), "an RMSNorm with torch's bits")
    with monkeypatch.context() as patch:
        promised.disagree(patch, kernel)
        model = open_model(folder, "half", kernels="auto")
    assert model.offload.self_test == "now"
    assert model.offload.arithmetic == "torch" if kernel == "experts" else not _has_norms_of_ours(model)


def _has_norms_of_ours(model: PreTrainedModel) -> bool:
    return any("forward" in vars(module) for module in model.modules() if "RMSNorm" in type(module).__name__)
