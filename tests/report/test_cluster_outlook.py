"""What is foretold of clusters, by what must be so on any machine.

Would catch: workers of a cluster that ran taken for those of a profile, main's part of a way counted twice, a GPU's
speed for a worker, which computes on its CPU, a trace of another model.
"""

from __future__ import annotations

import shutil
from dataclasses import astuple, replace
from math import inf

import pytest

from smoe.errors import BudgetError, ConfigError, TraceError
from smoe.memory.emulation import read_profile
from smoe.policy.placement import PLACEMENT
from smoe.presets import configure
from smoe.report.cluster_outlook import (
    ENOUGH,
    HANDING_SECONDS,
    SCHEDULES,
    ClusterOutlook,
    Network,
    Wanted,
    cluster_outlook,
)
from smoe.routing import Phase, Routing
from smoe.simulator.cluster_forecast import MeasuredWorker
from tests.toy import save_toy

MAIN = configure(memory_bytes=3 << 20, context_tokens=128, device="emulated", profile="raspberry-pi-5")
"""The toy: 8 experts, top-4, in each of 4 layers."""
ROOMY = replace(MAIN, memory_bytes=4 << 20)
"""Also where a draft model takes a part of the memory."""
OF_MAIN = ("memory_bytes", "context_tokens", "device", "profile")
NEAR = Network(inf, way=1e-3, message=1e-4)
WORKER = MeasuredWorker(load=1e-3, expert=1e-4, hop=1.2e-3, slots=16)


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Its configuration alone."""
    whole, folder = save_toy(tmp_path_factory.mktemp("toy")), tmp_path_factory.mktemp("config")
    shutil.copy(whole / "config.json", folder)
    return str(folder)


def of(toy: str, wanted: Wanted, network: Network = NEAR, trace: list[Routing] | None = None) -> ClusterOutlook:
    return cluster_outlook(toy, MAIN, wanted, network, trace)


def test_every_number_of_workers_and_every_schedule(toy: str) -> None:
    found = cluster_outlook(toy, ROOMY, Wanted(3, [WORKER] * 2), NEAR)
    assert [(case.workers, case.schedule) for case in found.cases] == [
        (count, schedule) for count in (1, 2, 3) for schedule in SCHEDULES
    ]
    assert {case.placement for case in found.cases} == set(PLACEMENT)
    for case in found.cases:
        assert sum(case.waits) == pytest.approx(case.seconds_per_token), "what it waits for is all of it"
        assert case.waits.main == pytest.approx(4 * found.coordinator.layer)
        assert case.placement == "finish" or case.waits.own_loads == case.loads_at_main == 0
    assert found.as_json()["enough_workers"].keys() == set(SCHEDULES)


def test_a_draft_takes_of_main_s_memory(toy: str) -> None:
    found = cluster_outlook(toy, ROOMY, Wanted(1, [WORKER]), NEAR)
    assert found.with_draft is not None and 4 <= found.with_draft.slots < found.coordinator.slots
    asked = [configure(preset, **{each: getattr(ROOMY, each) for each in OF_MAIN}) for preset in ("cluster", "od-moe")]
    for config in asked:
        assert cluster_outlook(toy, config, Wanted(1, [WORKER]), NEAR).cases == found.cases, "presets are known"
    without = of(toy, Wanted(1, [WORKER]))
    assert without.schedules == ["finish", "round-robin"] and without.with_draft is None
    assert sum("which does not fit in its memory" in remark for remark in without.remarks) == 2
    with pytest.raises(ConfigError, match="to plan with its measured workers, give `name`"):
        cluster_outlook(toy, configure(memory_bytes=3 << 20, cluster="home"), Wanted(1, [WORKER]), NEAR)


def test_a_main_with_room_for_everything_loads_nothing(toy: str) -> None:
    found = cluster_outlook(toy, replace(MAIN, memory_bytes=64 << 20), Wanted(2, [WORKER]), NEAR)
    assert found.coordinator.slots == 32
    for case in found.of("finish"):
        assert case.loads_at_main == case.loads_at_workers == 0
    assert found.enough("finish") == 0


def test_workers_that_ran_are_taken_as_they_were_measured(toy: str) -> None:
    """Main's part of the way, two messages, is simulated; a third worker is like the mean of both."""
    slow = MeasuredWorker(load=3e-3, expert=3e-4, hop=3.2e-3, slots=8)
    first, second, third = of(toy, Wanted(3, [WORKER, slow])).workers
    assert astuple(first) == pytest.approx((1e-3, 1e-4 + HANDING_SECONDS, 1e-3, 16))
    assert astuple(second) == pytest.approx((3e-3, 3e-4 + HANDING_SECONDS, 3e-3, 8))
    assert astuple(third) == pytest.approx((2e-3, 2e-4 + HANDING_SECONDS, 2e-3, 12))
    assert len(of(toy, Wanted(1, [WORKER, slow])).workers) == 1


def test_workers_with_everything_load_nothing(toy: str) -> None:
    found = of(toy, Wanted(2, slots=1000))
    assert found.workers[0].slots == 32 and found.share_held == 1
    for case in found.of("round-robin"):
        assert case.waits.loads == pytest.approx(0.0) and case.loads_at_workers == 0


def test_a_worker_computes_on_its_cpu_and_reads_from_its_disk(toy: str) -> None:
    card = read_profile("rtx-4090")
    (worker,) = of(toy, Wanted(1, profile=replace(card, disk_bytes_per_second=1e6), slots=4)).workers
    expert = 3 * 64 * 32 * 4
    assert worker.load == pytest.approx(expert / 1e6)
    by_itself = worker.expert - HANDING_SECONDS
    assert by_itself == pytest.approx(card.host_expert_seconds + expert / card.host_bytes_per_second, rel=0.3)
    with pytest.raises(ConfigError, match="`worker_profile=rtx-4090` has no rate of the disk"):
        of(toy, Wanted(1, profile=replace(card, disk_bytes_per_second=None), slots=4))


def test_a_worker_without_room_is_refused(toy: str) -> None:
    """In the words that a worker has for it, and with its slots."""
    with pytest.raises(BudgetError, match=r"needs at least 56\.0 KiB for experts, and 1\.00 KiB were given"):
        of(toy, Wanted(1, worker_bytes=1024))
    assert of(toy, Wanted(1, worker_bytes=10 * 28 << 10)).workers[0].slots == 10


def test_a_slow_wire_makes_tokens_slower(toy: str) -> None:
    fast, slow = (of(toy, Wanted(1, [WORKER]), replace(NEAR, bytes_per_second=rate)) for rate in (1e9, 1e4))
    for placement in PLACEMENT:
        assert slow.of(placement)[0].seconds_per_token >= fast.of(placement)[0].seconds_per_token


def test_where_another_worker_stops_paying(toy: str) -> None:
    found = of(toy, Wanted(1, [WORKER]))
    case = found.cases[0]
    alone = found.alone.run.seconds_per_token

    def outlook(*seconds: float) -> ClusterOutlook:
        cases = [
            replace(case, workers=n + 1, schedule="finish", seconds_per_token=alone * each)
            for n, each in enumerate(seconds)
        ]
        return replace(found, cases=cases)

    assert outlook(0.9, 0.5, 0.5 * (1 - ENOUGH / 2)).enough("finish") == 2
    assert outlook(0.9, 0.5, 0.4).enough("finish") == 3
    assert outlook(1.2, 0.99).enough("finish") == 0, "main alone is as fast"


def steps(layers: int, experts: int, count: int) -> list[Routing]:
    return [Routing(layer, Phase.DECODE, experts, [[0, 1, 2, 3]]) for _ in range(count) for layer in range(layers)]


def test_a_recorded_run_is_replayed(toy: str) -> None:
    """Four experts a layer, always the same: once they are there nothing is loaded. Drawn ones are said to be."""
    found = of(toy, Wanted(1, [WORKER]), trace=steps(4, 8, 30))
    assert all(case.loads_at_workers + case.loads_at_main == 0 for case in found.cases if case.schedule == "finish")
    assert not any("synthetic" in remark for remark in found.remarks)
    assert any("synthetic" in remark for remark in of(toy, Wanted(1, [WORKER])).remarks)


@pytest.mark.parametrize("trace", [steps(3, 8, 30), steps(4, 16, 30), steps(4, 8, 4), []])
def test_a_trace_of_another_model_is_refused(toy: str, trace: list[Routing]) -> None:
    with pytest.raises(
        TraceError, match="this model has 4 layers with 8 experts: give a trace of this model with at least 5 steps"
    ):
        of(toy, Wanted(1, [WORKER]), trace=trace)
