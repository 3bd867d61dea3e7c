"""Whether the kernels for GPUs are taken: tried out on the experts that are there, by Triton's interpreter.

Would catch: a kernel that is wrong and goes through, experts of a kind that it lacks, a machine where Triton fails that
fails with it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from smoe.compute.experts import Experts
from smoe.gpu_kernels import compiled, slot_experts, source
from smoe.gpu_kernels.slot_experts import SlotExperts
from smoe.load import slot_kernels
from smoe.load.selftest import Prover
from smoe.load.slot_kernels import proven_kernels
from tests import gguf_toy, mxfp4_toy, oracle
from tests.gpu_kernels.slots_of_bytes import WHOLE

pytest.importorskip("triton", reason="Triton is not installed")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="needs experts in host memory")
Open = Callable[..., PreTrainedModel]


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (slot_experts, source):
        monkeypatch.setattr(module, "tile_for", lambda tokens: WHOLE)


def with_experts(model: PreTrainedModel) -> tuple[Prover, Experts]:
    """Its experts' arithmetic, some experts of every layer being resident."""
    with torch.no_grad():
        model(oracle.PROMPT[:, :4])
    compute = model.offload.executor.compute
    return Prover(compute.arrivals, compute.device), compute.experts.by(None)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_the_library_s_experts_in_bf16(family: str, toy: Callable[..., Path], open_model: Open) -> None:
    prover, experts = with_experts(open_model(toy(family, dtype=torch.bfloat16), "full", kernels="torch"))
    kernels = proven_kernels(prover, experts, 2 if family == "qwen3_moe" else 1)
    assert kernels is not None and kernels.keys() == experts.maths.keys()
    assert len(set(map(id, kernels.values()))) == 1, "all layers are alike"


def test_quantised_ones_of_several_formats(tmp_path: Path, open_model: Open) -> None:
    """Gate and up apart; a kernel for every mixture of formats that a layer has."""
    path, _ = gguf_toy.quantised(tmp_path / "toy.gguf", "MXFP4")
    prover, experts = with_experts(open_model(path, "full", kernels="torch"))
    kernels = proven_kernels(prover, experts, 1)
    assert kernels is not None and len({kernel.kind.down.form for kernel in kernels.values()}) == 2


def test_openai_s_release(tmp_path: Path, open_model: Open) -> None:
    """Codes and scales put together in the slot, gate and up in turns, biases, a limit."""
    mxfp4_toy.save(tmp_path / "model")
    prover, experts = with_experts(open_model(tmp_path / "model", "full", kernels="torch"))
    kernels = proven_kernels(prover, experts, 1)
    assert kernels is not None
    kind = next(iter(kernels.values())).kind
    assert kind.has_bias and kind.activation.takes_turns and kind.activation.limit == 7.0 and len(kind.ups) == 1


def test_a_wrong_kernel_does_not_go_through(
    toy: Callable[..., Path], open_model: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    prover, experts = with_experts(open_model(toy("qwen3_moe", dtype=torch.bfloat16), "full", kernels="torch"))
    multiply = SlotExperts.multiply

    def swapped(self: SlotExperts, layer: slot_experts.Layer, *rest: Any, **options: Any) -> None:
        multiply(self, layer._replace(x=layer.x * 1.01), *rest, **options)

    monkeypatch.setattr(SlotExperts, "multiply", swapped)
    assert proven_kernels(prover, experts, 1) is None


@pytest.mark.parametrize("how", ["norm behind them", "another activation", "nobody resident"])
def test_what_is_unknown_stays_with_torch(
    how: str, toy: Callable[..., Path], open_model: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    prover, experts = with_experts(open_model(toy("qwen3_moe"), "full"))
    math = next(iter(experts.maths.values()))
    if how == "norm behind them":
        monkeypatch.setattr(math, "_post_norm", torch.nn.Identity())
    elif how == "another activation":
        monkeypatch.setattr(math, "_activate", lambda wide: wide.chunk(2, -1)[0].tanh())
    else:
        prover.arrivals.table.ready.clear()
    assert proven_kernels(prover, experts, 1) is None


@pytest.mark.parametrize("how", ["fails", "missing", "slower"])
def test_torch_computes_where_triton_cannot(
    how: str,
    toy: Callable[..., Path],
    open_model: Open,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fails(*_: object) -> Any:
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(slot_kernels, "_is_gpu", lambda device: True)
    if how == "fails":
        monkeypatch.setattr(slot_experts, "kernels_of", fails)
    elif how == "missing":
        monkeypatch.setattr(compiled, "is_available", lambda: False)
    else:
        seconds = {True: 2.0, False: 1.0}
        monkeypatch.setattr(slot_kernels, "_seconds", lambda experts, *_: seconds[experts.is_in_slots])
    folder = toy("qwen3_moe")
    model = open_model(folder, "half", device="emulated", dilation=1.0, kernels="auto")
    assert model.offload.arithmetic == "torch"
    assert ("Failed to find C compiler" in caplog.text) == (how == "fails")
    oracle.assert_same_steps(oracle.greedy(model), oracle.reference_steps(folder))


def test_the_faster_of_both_is_kept_and_measured(
    toy: Callable[..., Path], open_model: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slot_kernels, "_is_gpu", lambda device: True)
    monkeypatch.setattr(slot_kernels, "_ROUNDS", 1)
    measured: list[bool] = []
    seconds = slot_kernels._seconds

    def noted(experts: Experts, *rest: Any) -> float:
        measured.append(experts.is_in_slots)
        return seconds(experts, *rest) * (1e-6 if experts.is_in_slots else 1)  # the interpreter is no GPU

    monkeypatch.setattr(slot_kernels, "_seconds", noted)
    model = open_model(toy("qwen3_moe"), "half", device="emulated", dilation=1.0, kernels="auto")
    assert model.offload.arithmetic == "slots" and measured == [True, False]
    assert open_model(toy("qwen3_moe"), "half", device="emulated", dilation=1.0, kernels="native")
    assert measured == [True, False], "asked for by name"


@pytest.mark.parametrize(("offsets", "alignment"), [([0, 4096], 16), ([8, 64], 8), ([0, 34], 2), ([3], 1)])
def test_what_divides_all_offsets(offsets: list[int], alignment: int) -> None:
    """The biases' do not count: they are read one number at a time."""
    placements = [SimpleNamespace(parts={"up_proj": offset, "down_proj_bias": 2}) for offset in offsets]
    layers = {0: SimpleNamespace(experts=len(offsets))}
    store: Any = SimpleNamespace(layers=layers, placement=lambda layer, expert: placements[expert])
    assert slot_kernels.alignment_in(store, 0) == alignment
