"""On a GPU: grade E2 against transformers on the same GPU, at every budget and with a host tier that is too small.

Skipped cleanly without a CUDA device. Would catch: a slot overwritten while a kernel still reads it, a copy that is
computed with before it has arrived, an expert that stays behind in pinned memory, a budget that the allocator exceeds.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from smoe.config import configure
from smoe.loading import checkpoint_experts, open_store
from smoe.memory.movers import HostMover
from smoe.planning import blueprint
from smoe.policy.budget import Demand, full_bytes, minimum_bytes
from tests import oracle, zoo

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

Open = Callable[..., PreTrainedModel]
DEVICE = "cuda"
FP32_ROUNDING = 1e-5
BF16_ROUNDING = 3e-2
"""A toy's bf16 logits: a few units in the last of eight bits, after four layers."""
NEW_TOKENS = 16
BIG = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "head_dim": 64}
"""Experts of 3 MiB in bf16: enough that reads, copies and kernels really overlap."""


@pytest.fixture(autouse=True)
def fp32_means_fp32() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before
    gc.collect()
    torch.cuda.empty_cache()


def demand(folder: Path, **switches: object) -> Demand:
    config = configure(**{"context_tokens": oracle.CONTEXT, "device": DEVICE, **switches})
    plan = blueprint(folder, config)
    store = open_store(folder, plan, checkpoint_experts(folder, plan), torch.device(DEVICE))
    return plan.demand(config, store.slot_bytes)


def budget_bytes(folder: Path, budget: str, **switches: object) -> int:
    needs = demand(folder, **switches)
    if budget == "full":
        return full_bytes(needs)
    slots = max(needs.top_k, {"half": needs.total_experts // 2, "minimum": needs.top_k}[budget])
    return minimum_bytes(needs) + (slots - needs.top_k) * needs.slot_bytes


@pytest.fixture
def open_on_gpu() -> Iterator[Open]:
    from smoe import from_pretrained

    opened: list[PreTrainedModel] = []

    def load(folder: Path, budget: str, **switches: object) -> PreTrainedModel:
        switches = {"context_tokens": oracle.CONTEXT, "device": DEVICE, **switches}
        opened.append(from_pretrained(folder, memory=budget_bytes(folder, budget, **switches), **switches))
        return opened[-1]

    yield load
    for model in opened:
        model.offload.close()


def steps(model: PreTrainedModel) -> oracle.Steps:
    """Logits along a fixed text, so that one near tie does not change everything after it: prefill, then decode."""
    text = torch.randint(3, 128, (1, NEW_TOKENS), generator=torch.Generator().manual_seed(3)).to(DEVICE)
    with torch.no_grad():
        out = model(oracle.PROMPT.to(DEVICE), use_cache=True)
        prefill, cache, logits = out.logits, out.past_key_values, []
        for position in range(NEW_TOKENS):
            out = model(text[:, position : position + 1], past_key_values=cache, use_cache=True)
            logits.append(out.logits)
    return oracle.Steps(prefill, tuple(logits), text)


def assert_close(ours: oracle.Steps, theirs: oracle.Steps, rounding: float) -> None:
    assert oracle.relative_error(ours.prefill, theirs.prefill) <= rounding
    for step, (a, b) in enumerate(zip(ours.logits, theirs.logits, strict=True)):
        assert oracle.relative_error(a, b) <= rounding, f"decode step {step}"


def reference_steps(folder: Path) -> oracle.Steps:
    return steps(oracle.reference(folder).to(DEVICE))


@pytest.mark.parametrize("budget", ["full", "half", "minimum"])
@pytest.mark.parametrize("family", zoo.FAMILIES)
def test_fp32_is_close_at_every_budget(family: str, budget: str, toy: Callable[..., Path], open_on_gpu: Open) -> None:
    folder = toy(family)
    model = open_on_gpu(folder, budget)
    assert isinstance(model.offload._transfers._mover, HostMover)
    assert_close(steps(model), reference_steps(folder), FP32_ROUNDING)
    model.offload.executor.table.check()


@pytest.mark.parametrize("prefetch", ["none", "look-ahead"])
@pytest.mark.parametrize("balance", ["paper", "optimal", "host"])
@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "deepseek_v3"])
def test_the_cpu_computes_beside_the_gpu(
    family: str, balance: str, prefetch: str, toy: Callable[..., Path], open_on_gpu: Open
) -> None:
    folder = toy(family)
    model = open_on_gpu(folder, "minimum", balance=balance, prefetch=prefetch)
    assert_close(steps(model), reference_steps(folder), FP32_ROUNDING)
    assert model.offload.stats().host_computed > 0
    model.offload.executor.table.check()


@pytest.mark.parametrize("prefetch", ["none", "next-gate"])
@pytest.mark.parametrize("budget", ["half", "minimum"])
def test_bf16_experts_of_some_size(budget: str, prefetch: str, toy: Callable[..., Path], open_on_gpu: Open) -> None:
    """Overlap is real here; a race would give garbage, not rounding."""
    folder = toy("qwen3_moe", dtype=torch.bfloat16, **BIG, moe_intermediate_size=1024)
    model = open_on_gpu(folder, budget, prefetch=prefetch)
    expected = reference_steps(folder)
    for _ in range(3):
        assert_close(steps(model), expected, BF16_ROUNDING)
    counters = model.offload.stats()
    assert counters.loads > model.offload.ledger.demand.total_experts
    if prefetch == "next-gate":
        assert counters.prefetches_used > 0


def test_the_same_bits_whatever_the_order_of_arrival(toy: Callable[..., Path], open_on_gpu: Open) -> None:
    """One budget, twice the same steps: nothing depends on timing."""
    folder = toy("qwen3_moe", dtype=torch.bfloat16, **BIG, moe_intermediate_size=1024)
    first, second = steps(open_on_gpu(folder, "half")), steps(open_on_gpu(folder, "half"))
    oracle.assert_same_steps(first, second)


def test_a_host_tier_smaller_than_the_experts(toy: Callable[..., Path], open_on_gpu: Open) -> None:
    """Six pinned slots for 32 experts: experts are read from disk again, and outputs stay."""
    folder = toy("mixtral")
    slot_bytes = demand(folder).slot_bytes
    model = open_on_gpu(folder, "minimum", host_memory_bytes=6 * slot_bytes)
    mover = model.offload._transfers._mover
    assert isinstance(mover, HostMover)
    assert mover._host.arena.slots == 6
    assert_close(steps(model), reference_steps(folder), FP32_ROUNDING)
    assert model.offload.stats().bytes_read > 2 * model.offload.store.total_bytes


def test_a_host_tier_with_room_reads_each_expert_once(toy: Callable[..., Path], open_on_gpu: Open) -> None:
    folder = toy("mixtral")
    model = open_on_gpu(folder, "minimum")
    steps(model)
    before = model.offload.stats()
    steps(model)
    again = model.offload.stats() - before
    assert again.loads > 0 and again.bytes_read == 0


@pytest.mark.parametrize("budget", ["full", "half", "minimum"])
def test_the_allocator_stays_inside_the_budget(budget: str, toy: Callable[..., Path], open_on_gpu: Open) -> None:
    """What was allocated before (library handles, cuBLAS workspaces) is not ours; everything after is."""
    folder = toy("qwen3_moe", dtype=torch.bfloat16, **BIG, moe_intermediate_size=1024)
    torch.ones(64, 64, device=DEVICE) @ torch.ones(64, 64, device=DEVICE)  # cuBLAS takes its workspace now
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    baseline = torch.cuda.memory_allocated()
    model = open_on_gpu(folder, budget)
    model.generate(oracle.PROMPT.to(DEVICE), max_new_tokens=32, do_sample=False)
    assert torch.cuda.max_memory_allocated() - baseline <= model.offload.ledger.budget_bytes


def test_a_read_error_loses_one_request(
    toy: Callable[..., Path], open_on_gpu: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    from smoe.errors import TransferError

    folder = toy("mixtral")
    model = open_on_gpu(folder, "minimum", host_memory_bytes=6 * demand(folder).slot_bytes)
    with monkeypatch.context() as broken:

        def move(*_: object) -> int:
            raise TransferError(5, "injected")

        broken.setattr(model.offload._transfers._mover, "move", move)
        with pytest.raises(TransferError, match="injected"):
            steps(model)
    model.offload.executor.table.check()
    assert_close(steps(model), reference_steps(folder), FP32_ROUNDING)
