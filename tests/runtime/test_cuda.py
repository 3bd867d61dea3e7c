"""On a GPU: grade E2 against transformers on the same GPU, at every budget and with a host tier that is too small.

Tests marked `gpu` are skipped cleanly without a CUDA device; those that take a `bench` run on the emulated device too,
so that the tests themselves are tested everywhere. Would catch: a slot overwritten while a kernel still reads it, a
copy that is computed with before it has arrived, an expert that stays behind in pinned memory, a budget that the
allocator exceeds, a look-ahead that never happens.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from smoe import from_pretrained
from smoe.expert import EXACT
from smoe.load.device import choose_device
from smoe.load.ledger import demand_of, open_store
from smoe.memory.link import CudaLink
from smoe.memory.movers import HostMover
from smoe.memory.page_lock import CudaRegistry
from smoe.memory.reading_threads import TicketState, Transfers
from smoe.memory.streams import CudaStreams
from smoe.models.checkpoint import checkpoint_at
from smoe.models.read_spec import read_spec
from smoe.policy.budget import Demand, full_bytes, minimum_bytes
from smoe.policy.plan import Load, LoadReason
from smoe.presets import configure
from smoe.routing import Phase
from smoe.runtime.execute import LayerExecutor, Waits
from tests import oracle, zoo
from tests.memory.fake_streams import ArenaMover

ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
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


class Bench:
    """One device, and what has been opened on it."""

    def __init__(self, device: str) -> None:
        self.switches: dict[str, Any] = {"context_tokens": oracle.CONTEXT, "device": device}
        if device == "emulated":
            self.switches["dilation"] = 1.0
        self.device = choose_device(configure(device=device))
        self.opened: list[PreTrainedModel] = []

    def demand(self, folder: Path, **switches: Any) -> Demand:
        config = configure(**{**self.switches, **switches})
        plan, checkpoint = read_spec(folder, config), checkpoint_at(folder)
        store = open_store(checkpoint, plan, checkpoint.experts(plan), self.device)
        return demand_of(plan, config, self.device, store)

    def budget_bytes(self, folder: Path, budget: str, **switches: Any) -> int:
        needs = self.demand(folder, **switches)
        if budget == "full":
            return full_bytes(needs)
        slots = max(needs.top_k, {"half": needs.total_experts // 2, "minimum": needs.top_k}[budget])
        return minimum_bytes(needs) + (slots - needs.top_k) * needs.slot_bytes

    def open(self, folder: Path, budget: str, **switches: Any) -> PreTrainedModel:
        memory = self.budget_bytes(folder, budget, **switches)
        self.opened.append(from_pretrained(folder, memory=memory, **{**self.switches, **switches}))
        return self.opened[-1]

    def steps(self, model: PreTrainedModel, rows: int = 1) -> oracle.Steps:
        """Logits along a fixed text, so that one near tie does not change everything after it: prefill, then decode."""
        generator = torch.Generator().manual_seed(3)
        prompt = torch.cat([oracle.PROMPT, oracle.PROMPT.flip(1), oracle.PROMPT.roll(5)])[:rows].to(self.device)
        text = torch.randint(3, 128, (rows, NEW_TOKENS), generator=generator).to(self.device)
        with torch.no_grad():
            out = model(prompt, use_cache=True)
            prefill, cache, logits = out.logits, out.past_key_values, []
            for position in range(NEW_TOKENS):
                out = model(text[:, position : position + 1], past_key_values=cache, use_cache=True)
                logits.append(out.logits)
        return oracle.Steps(prefill, tuple(logits), text)

    def reference_steps(self, folder: Path, rows: int = 1) -> oracle.Steps:
        return self.steps(oracle.reference(folder).to(self.device), rows)


@pytest.fixture(params=[pytest.param("cuda", marks=ON_GPU)])
def gpu(request: pytest.FixtureRequest) -> Iterator[Bench]:
    yield from _bench(request.param)


@pytest.fixture(params=[pytest.param("cuda", marks=ON_GPU), "emulated"])
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    yield from _bench(request.param)


def _bench(device: str) -> Iterator[Bench]:
    made = Bench(device)
    yield made
    for model in made.opened:
        model.offload.close()


def assert_close(ours: oracle.Steps, theirs: oracle.Steps, rounding: float) -> None:
    assert oracle.relative_error(ours.prefill, theirs.prefill) <= rounding
    for step, (a, b) in enumerate(zip(ours.logits, theirs.logits, strict=True)):
        assert oracle.relative_error(a, b) <= rounding, f"decode step {step}"


@pytest.mark.parametrize("budget", ["full", "half", "minimum"])
@pytest.mark.parametrize("family", zoo.FAMILIES)
def test_fp32_is_close_at_every_budget(family: str, budget: str, toy: Callable[..., Path], gpu: Bench) -> None:
    folder = toy(family)
    model = gpu.open(folder, budget)
    assert isinstance(model.offload._transfers._mover, HostMover)
    assert_close(gpu.steps(model), gpu.reference_steps(folder), FP32_ROUNDING)
    model.offload.executor.table.check()


@pytest.mark.parametrize("prefetch", ["none", "look-ahead"])
@pytest.mark.parametrize("balance", ["paper", "optimal", "host"])
@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "deepseek_v3"])
def test_the_cpu_computes_beside_the_gpu(
    family: str, balance: str, prefetch: str, toy: Callable[..., Path], gpu: Bench
) -> None:
    folder = toy(family)
    model = gpu.open(folder, "minimum", balance=balance, prefetch=prefetch)
    assert_close(gpu.steps(model), gpu.reference_steps(folder), FP32_ROUNDING)
    assert model.offload.stats().host_computed > 0
    model.offload.executor.table.check()


@pytest.mark.parametrize("prefetch", ["none", "next-gate"])
@pytest.mark.parametrize("budget", ["half", "minimum"])
def test_bf16_experts_of_some_size(budget: str, prefetch: str, toy: Callable[..., Path], gpu: Bench) -> None:
    """Overlap is real here; a race would give garbage, not rounding."""
    folder = toy("qwen3_moe", dtype=torch.bfloat16, **BIG, moe_intermediate_size=1024)
    model = gpu.open(folder, budget, prefetch=prefetch)
    expected = gpu.reference_steps(folder)
    for _ in range(3):
        assert_close(gpu.steps(model), expected, BF16_ROUNDING)
    counters = model.offload.stats()
    assert counters.loads > model.offload.ledger.demand.total_experts
    if prefetch == "next-gate":
        assert counters.prefetches_used > 0


def test_the_same_bits_whatever_the_order_of_arrival(toy: Callable[..., Path], gpu: Bench) -> None:
    """One budget, twice the same steps: nothing depends on timing."""
    folder = toy("qwen3_moe", dtype=torch.bfloat16, **BIG, moe_intermediate_size=1024)
    first, second = (gpu.steps(gpu.open(folder, "half", kernels="native")) for _ in range(2))  # auto would measure
    oracle.assert_same_steps(first, second)


def test_a_host_tier_smaller_than_the_experts(toy: Callable[..., Path], gpu: Bench) -> None:
    """Six pinned slots for 32 experts: experts are read from disk again, and outputs stay."""
    folder = toy("mixtral")
    slot_bytes = gpu.demand(folder).slot_bytes
    model = gpu.open(folder, "minimum", host_memory_bytes=6 * slot_bytes)
    mover = model.offload._transfers._mover
    assert isinstance(mover, HostMover)
    assert mover._host.arena.slots == 6
    assert_close(gpu.steps(model), gpu.reference_steps(folder), FP32_ROUNDING)
    assert model.offload.stats().bytes_read > 2 * model.offload.store.total_bytes


def test_a_host_tier_with_room_reads_each_expert_once(toy: Callable[..., Path], gpu: Bench) -> None:
    folder = toy("mixtral")
    model = gpu.open(folder, "minimum")
    gpu.steps(model)
    before = model.offload.stats()
    gpu.steps(model)
    again = model.offload.stats() - before
    assert again.loads > 0 and again.bytes_read == 0


@pytest.mark.parametrize("budget", ["full", "half", "minimum"])
def test_the_allocator_stays_inside_the_budget(budget: str, toy: Callable[..., Path], gpu: Bench) -> None:
    """What was allocated before (library handles, cuBLAS workspaces) is not ours; everything after is."""
    folder = toy("qwen3_moe", dtype=torch.bfloat16, **BIG, moe_intermediate_size=1024)
    torch.ones(64, 64, device="cuda") @ torch.ones(64, 64, device="cuda")  # cuBLAS takes its workspace now
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    baseline = torch.cuda.memory_allocated()
    model = gpu.open(folder, budget)
    model.generate(oracle.PROMPT.to(gpu.device), max_new_tokens=32, do_sample=False)
    assert torch.cuda.max_memory_allocated() - baseline <= model.offload.ledger.budget_bytes


def test_a_read_error_loses_one_request(toy: Callable[..., Path], gpu: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    from smoe.errors import TransferError

    folder = toy("mixtral")
    model = gpu.open(folder, "minimum", host_memory_bytes=6 * gpu.demand(folder).slot_bytes)
    with monkeypatch.context() as broken:

        def move(*_: object) -> int:
            raise TransferError(5, "injected")

        broken.setattr(model.offload._transfers._mover, "move", move)
        with pytest.raises(TransferError, match="injected"):
            gpu.steps(model)
    model.offload.executor.table.check()
    assert_close(gpu.steps(model), gpu.reference_steps(folder), FP32_ROUNDING)


EXACT_WAYS: dict[str, dict[str, Any]] = {
    "smoe-exact": {"preset": "smoe-exact"},
    "hybrimoe": {"preset": "hybrimoe"},
    "static": {"preset": "static"},
    "look-ahead": {"prefetch": "look-ahead"},
}


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("way", EXACT_WAYS)
def test_lossless_presets_and_batches(way: str, rows: int, toy: Callable[..., Path], bench: Bench) -> None:
    folder = toy("qwen3_moe")
    model = bench.open(folder, "minimum", max_sequences=rows, **EXACT_WAYS[way])
    assert_close(bench.steps(model, rows), bench.reference_steps(folder, rows), FP32_ROUNDING)
    model.offload.executor.table.check()


@pytest.mark.parametrize("prefetch_what", ["top-score", "chosen"])
def test_the_look_ahead_happens_and_harms_nothing(prefetch_what: str, toy: Callable[..., Path], bench: Bench) -> None:
    """A host tier of six slots: loads come from disk, so there is always something to wait for."""
    folder = toy("qwen3_moe", **BIG, moe_intermediate_size=1024)
    host_memory_bytes = 6 * bench.demand(folder).slot_bytes
    model = bench.open(
        folder, "half", prefetch="look-ahead", prefetch_what=prefetch_what, host_memory_bytes=host_memory_bytes
    )
    expected = bench.reference_steps(folder)
    for _ in range(2):
        assert_close(bench.steps(model), expected, FP32_ROUNDING)
    counters = model.offload.stats()
    assert counters.look_aheads > 0 and counters.prefetches > 0
    model.offload.executor.table.check()


@pytest.mark.parametrize("rows", [1, 3])
def test_the_preset_smoe(rows: int, toy: Callable[..., Path], bench: Bench) -> None:
    """Lossy, so there is nobody to compare it with: it must substitute, stay finite and keep its tables."""
    folder = toy("qwen3_moe")
    model = bench.open(folder, "half", preset="smoe", alpha=0.9, max_sequences=rows)
    steps = bench.steps(model, rows)
    assert all(bool(torch.isfinite(logits).all()) for logits in (steps.prefill, *steps.logits))
    counters = model.offload.stats()
    assert counters.substituted > 0 and counters.routes > counters.substituted
    model.offload.executor.table.check()


def test_alpha_changes_nothing_where_all_experts_are_there(toy: Callable[..., Path], bench: Bench) -> None:
    folder = toy("qwen3_moe")
    model = bench.open(folder, "full", preset="smoe", alpha=0.9)
    expected = bench.reference_steps(folder)
    assert_close(bench.steps(model), expected, FP32_ROUNDING)
    assert model.offload.stats().substituted == 0


def test_reproducible_with_substitutes(toy: Callable[..., Path], bench: Bench) -> None:
    """What is replaced depends on residency; without measured costs that is the same every time."""
    folder, switches = toy("qwen3_moe"), {"eviction": "score", "balance": "none", "reproducible": True}
    first, second = (bench.steps(bench.open(folder, "half", alpha=0.9, **switches)) for _ in range(2))
    oracle.assert_same_steps(first, second)


def test_the_wait_for_the_device_is_booked_as_such(toy: Callable[..., Path], gpu: Bench) -> None:
    model = gpu.open(toy("qwen3_moe"), "half")
    gpu.steps(model)
    assert model.offload.stats().device_wait_seconds > 0


def test_the_peak_is_this_model_s(toy: Callable[..., Path], gpu: Bench) -> None:
    large = torch.ones(64 * 2**20, device="cuda")
    del large
    folder = toy("qwen3_moe")
    before = torch.cuda.memory_allocated()
    model = gpu.open(folder, "half")
    gpu.steps(model)
    assert 0 < model.offload.peak_memory_bytes() - before < 64 * 2**20


@pytest.mark.parametrize("budget", ["full", "minimum"])
def test_experts_by_slot_kernels(budget: str, toy: Callable[..., Path], gpu: Bench) -> None:
    """Asked for by name, they are taken without measuring; late ones included."""
    pytest.importorskip("triton")
    folder = toy("qwen3_moe")
    model = gpu.open(folder, budget, kernels="native", max_sequences=3, balance="none")
    assert model.offload.arithmetic == "slots"
    for rows in (1, 3):
        assert_close(gpu.steps(model, rows), gpu.reference_steps(folder, rows), FP32_ROUNDING)


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_a_decoded_layer_waits_for_the_router_alone(
    kernels: str, toy: Callable[..., Path], gpu: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch itself refuses every other wait: a blocking copy, a number read, an allocation that must be waited for."""
    model = gpu.open(toy("qwen3_moe"), "half", kernels=kernels, prefetch="none", balance="none")
    gpu.steps(model)
    run, told = LayerExecutor.run, Waits.fetch

    def refusing(self: LayerExecutor, layer: int, phase: Phase, *args: Any, **switches: Any) -> torch.Tensor:
        if phase is Phase.DECODE:
            torch.cuda.set_sync_debug_mode("error")
        try:
            return run(self, layer, phase, *args, **switches)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def allowed(self: Waits, what: str, x: torch.Tensor) -> list[Any]:
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("default")
        try:
            return told(self, what, x)
        finally:
            torch.cuda.set_sync_debug_mode(before)

    monkeypatch.setattr(LayerExecutor, "run", refusing)
    monkeypatch.setattr(Waits, "fetch", allowed)
    before = model.offload.executor.waits.copy()
    gpu.steps(model)
    layers = len(model.offload.store.layers)
    assert model.offload.executor.waits - before == {"choice": layers * (1 + NEW_TOKENS)}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_refused_registration_is_nobody_else_s_error() -> None:
    registry = CudaRegistry(torch.device("cuda"))
    memory = torch.zeros(2**20, dtype=torch.uint8)
    assert registry.register(memory.data_ptr(), memory.numel()) == 0
    try:
        assert registry.register(memory.data_ptr(), memory.numel()) != 0, "locked twice"
        registry.forget_error()
        assert int(torch.ones(4, device="cuda").sum()) == 4
        torch.cuda.synchronize()
    finally:
        registry.unregister(memory.data_ptr())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_demand_copy_passes_a_prefetch_on_the_device() -> None:
    """The real streams under the tickets: half a gigabyte is a dozen milliseconds, a demand load waits for 8 MiB."""
    nbytes, small = 512 * 2**20, 2**20
    sources = torch.randint(0, 255, (2, nbytes), dtype=torch.uint8).pin_memory()
    slots = torch.zeros(2, nbytes, dtype=torch.uint8, device="cuda")
    link = CudaLink(CudaStreams(torch.device("cuda")))
    demand = sources[1, :small]
    mover = ArenaMover(link, [sources[0], demand], [slots[0], slots[1, :small]])
    transfers = Transfers(mover, threads=2)
    try:
        guess = transfers.submit(Load((0, 0, EXACT), 0, None, False, LoadReason.PREFETCH, 0))
        while guess.state is TicketState.QUEUED:
            pass
        wanted = transfers.submit(Load((0, 1, EXACT), 1, None, True, LoadReason.DEMAND, 0))
        wanted.join()
        assert wanted.hold is not None
        wanted.hold()
        assert torch.equal(slots[1, :small].cpu(), demand), "the device waited for the copy"
        assert not guess.is_over, "the demand load did not wait for the whole prefetch"
        guess.join()
        torch.cuda.synchronize()
        assert torch.equal(slots[0].cpu(), sources[0])
        assert all(0 < seconds < 1 for seconds, _ in link.measured())
    finally:
        transfers.close()
