"""Memory shared among flows, against a simulation in small steps.

Would catch: a flow that is slowed down by one that has ended, bytes that are read twice as fast as the memory gives
them, a place that is kept after an error.
"""

from __future__ import annotations

import random
import threading

import pytest

from smoe.memory.shared_bandwidth import Flow, SharedBandwidth
from tests.memory.fake_clock import NEAR, Clock

STEP = 1e-4


def ends_by_small_steps(total: float, flows: list[tuple[float, float, float]]) -> list[float]:
    """Ends of (begins, rate, bytes), with the memory shared out anew at every step."""
    left, ends, now = [nbytes for _, _, nbytes in flows], [0.0] * len(flows), 0.0
    while not all(ends):
        active = [n for n, (begins, _, _) in enumerate(flows) if begins <= now and not ends[n]]
        wanted = sum(flows[n][1] for n in active)
        now += STEP
        for n in active:
            left[n] -= STEP * flows[n][1] * min(1.0, total / wanted)
            if left[n] <= 0:
                ends[n] = now
    return ends


@pytest.mark.parametrize("seed", range(20))
def test_flows_end_when_small_steps_say(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chance, clock = random.Random(seed), Clock(monkeypatch)
    total = chance.uniform(1, 10)
    wanted, begins = [], 0.0
    for _ in range(chance.randint(1, 4)):
        wanted.append((begins, chance.uniform(0.5, 8), chance.uniform(0.1, 3)))
        begins += chance.choice([0.0, 0.1, 0.4])
    memory, flows, started = SharedBandwidth(total), [], clock.now

    def read(rest: list[tuple[float, float, float]]) -> None:
        if not rest:
            return
        at, rate, nbytes = rest[0]
        clock.now = max(clock.now, started + at)
        with memory.reading(rate, nbytes) as flow:
            flows.append(flow)
            read(rest[1:])

    read(wanted)
    found = [flow.ended - started for flow in flows if flow.ended is not None]
    assert found == pytest.approx(ends_by_small_steps(total, wanted), abs=20 * STEP)
    assert clock.now - started == pytest.approx(max(found), abs=NEAR), "nobody waits longer than for the last byte"


def test_an_error_gives_the_share_back(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, memory = Clock(monkeypatch), SharedBandwidth(1.0)
    with pytest.raises(RuntimeError), memory.reading(1.0, 100.0):
        raise RuntimeError
    began = clock.now
    with memory.reading(1.0, 2.0):
        pass
    assert clock.now - began == pytest.approx(2.0, abs=NEAR)


def test_threads_wake_each_other() -> None:
    """On the real clock: two threads at full rate take as long together as one after the other, and no longer."""
    memory, ended = SharedBandwidth(1e6), []

    def read() -> None:
        with memory.reading(1e6, 2e4) as flow:
            pass
        ended.append(flow)

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(ended) == 3
    assert all(isinstance(flow, Flow) and flow.left == 0 for flow in ended)
