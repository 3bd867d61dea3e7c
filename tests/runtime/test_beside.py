"""What the host does beside a device: transfers counted, waits booked, the CPU's experts by our kernel.

Would catch: a transfer for every expert of a layer, a computing thread that waits for rows which only the CPU wants, a
proof at load that asks a GPU for a CPU's bits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from smoe.compute import decode_experts
from smoe.errors import UnsupportedModelError
from smoe.kernels.spinning_pool import SpinningPool, is_supported
from smoe.load import selftest
from smoe.load.selftest import is_same, rounding
from smoe.memory.arena import forget_peak
from smoe.memory.streams import Fetched
from smoe.policy.plan import HOST
from smoe.runtime import layer as layer_math
from tests import oracle, zoo

Open = Callable[..., PreTrainedModel]
BENCH: dict[str, Any] = {"device": "emulated", "dilation": 1.0}
CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize("rows", [1, 3])
def test_one_transfer_of_routes_a_layer(
    rows: int, toy: Callable[..., Path], open_model: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = open_model(toy("qwen3_moe"), "full", **BENCH, max_sequences=rows, balance="none")
    sent: list[int] = []
    original = decode_experts.on_device
    monkeypatch.setattr(
        decode_experts, "on_device", lambda values, device: (sent.append(1), original(values, device))[1]
    )
    layers = len(zoo.sparse_layers(model))
    cache = model.offload.new_cache(rows)
    model(oracle.PROMPT.expand(rows, -1), past_key_values=cache)
    assert len(sent) == layers, "prefill"
    model(torch.full((rows, 1), 7), past_key_values=cache)
    assert len(sent) == 2 * layers, "decode"


def test_the_computing_thread_never_waits_for_rows(
    toy: Callable[..., Path], open_model: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows for the CPU's experts leave the device once a layer, and it is the CPU's thread that waits for them."""
    made: list[Fetched] = []
    waited: set[str] = set()

    class Noted(Fetched):
        def __init__(self, x: torch.Tensor) -> None:
            super().__init__(x)
            made.append(self)

        def wait(self) -> torch.Tensor:
            waited.add(threading.current_thread().name.rpartition("_")[0])
            return super().wait()

    folder = toy("qwen3_moe")
    model = open_model(folder, "fifth", **BENCH, balance="host", max_sequences=3)
    monkeypatch.setattr(layer_math, "Fetched", Noted)
    steps = 5
    cache = model.offload.new_cache(3)
    model(oracle.PROMPT.expand(3, -1), past_key_values=cache)
    for token in range(steps):
        model(torch.tensor([[token + 3], [token + 9], [token + 40]]), past_key_values=cache)
    assert waited == {"smoe-host-experts"}
    assert len(made) <= (1 + steps) * len(zoo.sparse_layers(model)) < model.offload.stats().host_computed


def test_waiting_for_a_device_is_not_python(
    toy: Callable[..., Path], open_model: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = open_model(toy("qwen3_moe"), "half", **BENCH)
    oracle.greedy(model, new_tokens=2)
    assert model.offload.stats().device_wait_seconds == 0, "this CPU is the device"
    ticks = iter(range(10**9))
    executor = model.offload.executor
    monkeypatch.setattr(executor, "device", GPU)
    monkeypatch.setattr(executor, "now", lambda: float(next(ticks)))
    before = model.offload.stats()
    model(torch.tensor([[7]]), past_key_values=model.offload.new_cache())
    passed = model.offload.stats() - before
    layers = len(zoo.sparse_layers(model))
    assert passed.device_wait_seconds == layers, "one tick of the clock in each"
    assert passed.plan_seconds == layers


BIG = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "head_dim": 64}


def test_the_cpu_s_experts_by_our_kernel(toy: Callable[..., Path], open_model: Open) -> None:
    """What a GPU machine does with them: the same bits, and rows really go through the kernel."""
    if not is_supported():
        pytest.skip("this CPU has no bf16 dot products, or llvmlite is missing")
    folder = toy("qwen3_moe", dtype=torch.bfloat16, **BIG, moe_intermediate_size=256)
    model = open_model(folder, "fifth", **BENCH, balance="host", kernels="torch")
    host_experts = model.offload.executor.compute.units[HOST]
    pool, multiplied = SpinningPool(2), []
    original = pool.multiply
    pool.multiply = lambda products: (multiplied.append(threading.current_thread().name), original(products))[1]
    if not host_experts.multiply_by(pool):
        pytest.skip("torch sums bf16 products in another order on this CPU")
    multiplied.clear()
    oracle.assert_same_steps(oracle.greedy(model), oracle.reference_steps(folder))
    counters = model.offload.stats()
    assert counters.host_computed > 0
    products = len(multiplied) - 2 * counters.host_computed  # up and down; a prompt's experts may have one row too
    assert 0 <= products <= 2 * counters.prefill_host_computed and products % 2 == 0
    assert all(name.startswith("smoe-host-experts") for name in multiplied)


def test_a_crew_that_does_not_agree_is_not_used(
    toy: Callable[..., Path], open_model: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_supported():
        pytest.skip("this CPU has no bf16 dot products, or llvmlite is missing")
    folder = toy("qwen3_moe", dtype=torch.bfloat16, **BIG, moe_intermediate_size=256)
    model = open_model(folder, "fifth", **BENCH, balance="host", kernels="torch")
    host_experts = model.offload.executor.compute.units[HOST]
    monkeypatch.setattr(type(next(iter(host_experts._math.values()))), "agrees", lambda *_: False)
    assert not host_experts.multiply_by(SpinningPool(1))
    oracle.assert_same_steps(oracle.greedy(model), oracle.reference_steps(folder))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_gpu_may_round_and_a_cpu_may_not(dtype: torch.dtype) -> None:
    right = torch.linspace(-3, 3, 101).to(dtype)
    step = torch.finfo(dtype).eps
    near, far = right * (1 + step), right + 0.3
    assert rounding(dtype, CPU) == 0
    assert not is_same(near, right, rounding(dtype, CPU)) and is_same(right.clone(), right, 0)
    allowed = rounding(dtype, GPU)
    assert is_same(near, right, allowed) and not is_same(far, right, allowed)
    assert not is_same(torch.full_like(right, float("nan")), right, allowed)
    assert not is_same(right.flip(0), right, allowed)


def test_32_bits_are_held_to_e2() -> None:
    assert rounding(torch.float32, GPU) == 1e-5
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        assert 1e-3 < rounding(torch.float32, GPU) < 1e-2, "the caller has asked for fewer bits"
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False


def test_the_proof_at_load_allows_a_gpu_its_rounding(
    toy: Callable[..., Path], open_model: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, library = toy("qwen3_moe"), selftest.library_result
    monkeypatch.setattr(selftest, "library_result", lambda *args: library(*args) * (1 + 1e-6))
    with pytest.raises(UnsupportedModelError, match="self-test failed"):
        open_model(folder, "half", **BENCH)
    monkeypatch.setattr(selftest, "rounding", lambda dtype, _: rounding(dtype, GPU))
    open_model(folder, "half", **BENCH)
    monkeypatch.setattr(selftest, "library_result", lambda *args: library(*args) * (1 + 1e-3))
    with pytest.raises(UnsupportedModelError, match="self-test failed"):
        open_model(folder, "half", **BENCH)


def test_the_peak_begins_with_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    reset: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset.append)
    forget_peak(CPU)
    assert reset == []
    forget_peak(GPU)
    assert reset == [GPU]
