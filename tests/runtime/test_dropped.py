"""A model that is dropped without `close()`: loading in the same notebook cell again and again must not grow.

Would catch: a thread that holds its owner, and with it the slots, for ever.
"""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from smoe import from_pretrained
from smoe.policy.plan import Load, LoadReason
from smoe.runtime.lifetime import collect_dropped
from tests import oracle, zoo
from tests.packs import pack_folder
from tests.threads import engine_threads

Toy = Callable[..., Path]
SWITCHES: dict[str, dict[str, Any]] = {
    "plain": {},
    "draft-model": {"prefetch": "draft-model"},
    "prefetch": {"prefetch": "next-gate", "eviction": "score"},
    "asked concurrently": {"prefetch": "previous-token", "prefetch_asked": "concurrent"},
    "own kernels": {"threads": 2, "kernels": "native"},
    "thread_pool": {"threads": 2, "kernels": "torch"},
    "beside a device": {"device": "emulated", "dilation": 1.0, "balance": "optimal", "prefetch": "look-ahead"},
}


def wait_for_threads(before: set[threading.Thread]) -> set[threading.Thread]:
    """A pool's thread is told to end and not waited for."""
    end = time.monotonic() + 20
    while engine_threads() - before and time.monotonic() < end:
        time.sleep(0.01)
    return engine_threads() - before


@pytest.mark.parametrize("switches", SWITCHES)
def test_a_dropped_model_gives_memory_and_threads_back(
    switches: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever threads it has: readers, a pool, a thread_pool, the CPU's experts, a predictor's, a draft's."""
    if switches == "thread_pool":
        monkeypatch.setattr("smoe.load.choose_kernel.MIN_EXPERT_BYTES", 0)
        monkeypatch.setattr("smoe.load.choose_kernel._seconds", lambda compute, *_: 1.0 - bool(compute.thread_pool))
    before, threads = engine_threads(), torch.get_num_threads()
    try:
        wide = {"hidden_size": 256, "moe_intermediate_size": 64}
        folder = zoo.save("qwen3_moe", tmp_path / "model", dtype=torch.bfloat16, **wide)
        if switches == "draft-model":
            pack_folder(folder, precision="int4")
        model = oracle.open_model(folder, "half", **SWITCHES[switches])
        model.generate(oracle.PROMPT, max_new_tokens=6, min_new_tokens=6, do_sample=False)
        gone = [weakref.ref(each) for each in (model, model.offload, model.offload._arena._map)]
        if switches == "thread_pool":
            assert model.offload.executor.compute.experts.thread_pool is not None
        assert engine_threads() - before
        del model
        collect_dropped()
        assert [each() for each in gone] == [None] * 3
        assert not wait_for_threads(before)
    finally:
        torch.set_num_threads(threads)


def hold_reads(mover: Any, until: threading.Event) -> threading.Event:
    """Set once a read is held."""
    original, is_held = mover.move, threading.Event()

    def move(ticket: Any, between: Any) -> int:
        is_held.set()
        until.wait(60)
        return int(original(ticket, between))

    mover.move = move
    return is_held


def test_dropped_while_reads_are_under_way(toy: Toy) -> None:
    """What the reading threads are doing is waited for, by nobody who computes."""
    before, until = engine_threads(), threading.Event()
    model = oracle.open_model(toy("qwen2_moe"), "fifth")
    model(oracle.PROMPT)
    is_held = hold_reads(model.offload._transfers._mover, until)
    model.offload._transfers.submit(Load((0, 0, 0), 0, None, False, LoadReason.DEMAND, 0))
    assert is_held.wait(60)  # a read that has not begun is dropped with the model
    memory = weakref.ref(model.offload._arena._map)
    del model
    gc.collect()  # comes back although a read hangs
    assert memory() is not None, "the slot was taken from under the read"
    until.set()
    collect_dropped()
    assert not wait_for_threads(before)
    gc.collect()  # the held mover is a circle of this test's own
    assert memory() is None


def test_loading_again_and_again_does_not_grow() -> None:
    """As in a notebook cell: the name is bound anew, and the model before is dropped only then."""
    before, arenas = engine_threads(), list[Any]()
    most = 0
    gc.disable()  # nobody looks for circles but the loads themselves
    try:
        model = None
        for _ in range(4):
            model = from_pretrained("demo", memory="20MiB", context_tokens=128, prefetch="next-gate")
            model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=3, do_sample=False)
            arenas.append(weakref.ref(model.offload._arena._map))
            most = max(most, sum(arena() is not None for arena in arenas))
        assert most <= 2, "more than the last model and the one before"
        del model
        collect_dropped()
        assert [arena() for arena in arenas] == [None] * 4
        assert not wait_for_threads(before)
    finally:
        gc.enable()


def test_a_closed_model_s_threads_are_ended_once(toy: Toy) -> None:
    """A finaliser that ran after a close would close what another model uses by then."""
    model = oracle.open_model(toy("mixtral"))
    model.offload.close()
    assert not model.offload._held._collected.alive


def test_a_held_engine_keeps_its_model_alive_enough(toy: Toy) -> None:
    """Whoever keeps the engine alone can still ask it and close it."""
    before = engine_threads()
    engine = oracle.open_model(toy("mixtral")).offload
    collect_dropped()
    assert "ready" in repr(engine) and engine.stats().tokens == 0
    engine.close()
    assert engine_threads() <= before
