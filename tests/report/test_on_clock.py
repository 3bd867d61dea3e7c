"""Simulated times against sums written down by hand.

Would catch a load that is counted twice or not at all, layers that are left out of the sum, a constant in the wrong
unit, parts that do not add up to the whole.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from smoe.memory.emulation import DeviceProfile, read_profile
from smoe.policy.budget import Demand, Ledger, SlotClass, allocate
from smoe.policy.residency import PoolSize
from smoe.presets import configure
from smoe.report.on_clock import FIRST_TOKENS, MOST_LAYERS, Scene, prompt_seconds, settled, simulate
from smoe.report.pace import ALONE, Pace, crowded
from smoe.report.step_times import Work, times_for
from smoe.simulator.synthetic import LEAST_REPETITIVE, MOST_REPETITIVE, TYPICAL

pytestmark = pytest.mark.usefixtures("measured_in_full")
MIB = 2**20
MACHINE = DeviceProfile(
    "test", "made up", 1e9, 0.0, 1e11, 1e15, 1e-5, 1e-3, 1e10, 1e12, 1e-5,
    disk_bytes_per_second=1e9, host_memory_bytes=1e12, has_link=False,
)  # fmt: skip
EXPERTS, TOP_K = 32, 4


def work(layers: int = 4, expert_bytes: int = 3 * MIB) -> Work:
    return Work(
        layers,
        EXPERTS,
        TOP_K,
        expert_bytes,
        3 * MIB,
        0,
        layers * EXPERTS * expert_bytes,
        10.0 * MIB,
        decoder_layers=1.0,
    )


def scene(slots: int, layers: int = 4, machine: DeviceProfile = MACHINE, preset: str = "lru", **more: object) -> Scene:
    demand = Demand(0, 0, 0, (SlotClass(3 * MIB, TOP_K, layers * EXPERTS),))
    ledger = Ledger(1, demand, (PoolSize(slots, 8),))
    return Scene(work(layers), machine, ledger, configure(preset), "none", **more)  # type: ignore[arg-type]


EXPERT = 1e-5 + 3 * MIB / 1e11
LAYER = 1e-3 + 10 * MIB / 1e11
LOAD = 3 * MIB / 1e9


def test_with_all_experts_resident_only_computing_takes_time() -> None:
    run = simulate(scene(4 * EXPERTS), TYPICAL)
    assert run.seconds_per_token == pytest.approx(4 * (LAYER + TOP_K * EXPERT), rel=0.02)  # the last uses for the first
    assert run.bound_by == "Python" and run.hit_ratio > 0.99


@pytest.mark.parametrize("predictor", ["none", "next-gate"])
def test_fewer_steps_are_divided_by_their_number(predictor: str) -> None:
    """Would catch seconds of some steps that are divided by the number of all."""
    of_some, of_all = (
        simulate(replace(scene(60, is_compared=fewer), predictor=predictor), TYPICAL) for fewer in (True, False)
    )
    assert of_some.seconds_per_token == pytest.approx(of_all.seconds_per_token, rel=0.2)
    assert sum(of_some.parts.values()) == pytest.approx(of_some.seconds_per_token)


def test_a_slow_disk_is_all_that_counts() -> None:
    """With four slots for four layers every expert is a load, one after the other; what is computed hides, but for the
    last expert, which is computed alone, and the rest of the layer, which takes longer beside reads."""
    of_expert, of_layer = ALONE, crowded(1.0)
    run = simulate(scene(TOP_K), TYPICAL)
    assert run.hit_ratio == 0 and run.bound_by == "disk"
    assert run.seconds_per_token == pytest.approx(4 * (of_layer * LAYER + TOP_K * LOAD + of_expert * EXPERT), rel=0.02)
    assert run.ttft_seconds > 4 * 20 * LOAD and run.prefill_bound_by == "disk", "a prompt uses most of the 32"


def test_what_is_read_slows_the_layers_that_count() -> None:
    """With a predictor, too; by as much as the steps before were reading. Would catch times that stay as they were."""
    slow = replace(scene(TOP_K), predictor="next-gate")
    assert simulate(slow, TYPICAL).pieces["layer"] == pytest.approx(crowded(1.0) * LAYER, rel=0.02)
    assert simulate(replace(slow, ledger=scene(4 * EXPERTS).ledger), TYPICAL).pieces["layer"] == pytest.approx(LAYER)


@pytest.mark.parametrize("slots", [TOP_K, 60, 4 * EXPERTS])
@pytest.mark.parametrize("tokens", [256, 512])
def test_a_long_prompt_takes_what_its_simulation_takes(slots: int, tokens: int) -> None:
    long = scene(slots, prompt_tokens=tokens, is_compared=True)
    assert prompt_seconds(long, tokens) == pytest.approx(simulate(long, TYPICAL).ttft_seconds, rel=0.1)


def test_further_pieces_of_a_prompt_read_what_has_no_slot() -> None:
    """By hand: 2,048 tokens a piece, and reads take longest."""
    assert prompt_seconds(scene(64), 4096) == pytest.approx(4 * (EXPERTS + EXPERTS - 64 / 4) * LOAD)


@pytest.mark.parametrize("slots", [TOP_K, 30, 64, 128])
def test_parts_add_up(slots: int) -> None:
    run = simulate(scene(slots), TYPICAL)
    assert sum(run.parts.values()) == pytest.approx(run.seconds_per_token)


def test_layers_beyond_those_simulated_count() -> None:
    few, many = (simulate(scene(n * 10, n * 1), TYPICAL) for n in (MOST_LAYERS, 3 * MOST_LAYERS))
    assert many.seconds_per_token == pytest.approx(3 * few.seconds_per_token)
    assert many.ttft_seconds == pytest.approx(3 * few.ttft_seconds)


def test_memory_faster_reads_and_repetition_help() -> None:
    seconds = [simulate(scene(slots), TYPICAL).seconds_per_token for slots in (4, 32, 64, 96, 128)]
    assert seconds == sorted(seconds, reverse=True) and seconds[-1] < 0.5 * seconds[0]
    faster = simulate(scene(40, faster_reads=2.0), TYPICAL)
    assert faster.seconds_per_token < simulate(scene(40), TYPICAL).seconds_per_token
    least, most = (simulate(scene(40, preset="lfu"), habits) for habits in (LEAST_REPETITIVE, MOST_REPETITIVE))
    assert most.hit_ratio > least.hit_ratio and most.seconds_per_token < least.seconds_per_token


def test_presets_do_what_they_say() -> None:
    """On a machine whose link is slow and whose CPU is not: substitutes and the CPU's share save time."""
    machine = replace(read_profile("rtx-4060-ti"), link_bytes_per_second=2e9)
    exact, shared, lossy = (
        simulate(scene(40, machine=machine, preset=name), TYPICAL) for name in ("score", "hybrimoe", "smoe")
    )
    assert shared.seconds_per_token < exact.seconds_per_token
    assert lossy.seconds_per_token < exact.seconds_per_token


def test_the_routing_that_a_run_has_shown_is_simulated() -> None:
    """One number: of a model whose routers have favourites more is found in the same cache."""
    shown = [simulate(scene(40, preset="lfu", pace=Pace(skew=skew)), TYPICAL).hit_ratio for skew in (0.5, 1.0, 2.0)]
    assert shown == sorted(shown) and shown[1] == simulate(scene(40, preset="lfu"), TYPICAL).hit_ratio
    assert shown[0] + 0.1 < shown[1] < shown[2] - 0.1


def test_a_prefetch_that_does_not_pay_is_off() -> None:
    """Beside compute that takes no time there is nothing to hide a load behind, and wrong guesses cost."""
    fast = replace(MACHINE, device_layer_seconds=1e-9, device_bytes_per_second=1e15, device_expert_seconds=1e-9)
    on_trial = replace(scene(40, machine=fast, preset="exact"), predictor="next-gate")
    assert settled(on_trial)[0].predictor == "none"
    slow = replace(MACHINE, device_layer_seconds=1.0)
    assert settled(replace(scene(40, machine=slow, preset="exact"), predictor="next-gate"))[0].predictor == "next-gate"


def test_times_by_hand() -> None:
    times = times_for(MACHINE, work())
    assert (times.load, times.expert(1), times.layer(1)) == pytest.approx((LOAD, EXPERT, LAYER))
    many = times_for(replace(MACHINE, device_flops=1e9), work())
    assert many.expert(100) == pytest.approx(1e-5 + 6e-5 + 3 * MIB * 100 / 1e9), "bound by arithmetic"
    quarter = times_for(MACHINE, work(expert_bytes=3 * MIB // 4))
    assert quarter.load == pytest.approx(LOAD / 4) and quarter.expert(1) == pytest.approx(
        1e-5 + 1.25 * 0.75 * MIB / 1e11
    )


def test_what_is_prefetched_comes_in_chunks_if_it_is_larger_than_one() -> None:
    assert times_for(MACHINE, work()).in_chunks == 1.0 < times_for(MACHINE, work(expert_bytes=5 * MIB)).in_chunks
    assert times_for(replace(MACHINE, has_link=True), work(expert_bytes=5 * MIB)).in_chunks == 1.0


def test_what_does_not_fit_in_the_host_tier_comes_from_the_disk() -> None:
    whole = work()
    beside = replace(MACHINE, has_link=True, link_bytes_per_second=1e10)
    assert times_for(beside, whole).load == pytest.approx(LOAD / 10)
    half = times_for(beside, whole, host_bytes=whole.experts_bytes // 2)
    assert half.load == pytest.approx(LOAD / 10 + LOAD / 2)


def test_what_a_run_has_shown_goes_before_the_rates() -> None:
    shown = times_for(MACHINE, work(), pace=Pace(layer=0.5, expert=0.25, load=0.125, prompt=3.0))
    assert (shown.layer(1), shown.expert(1), shown.load) == (0.5, 0.25, 0.125)
    told = times_for(MACHINE, work())
    assert shown.layer(8) == 3 * told.layer(8) and shown.expert(8) == 3 * told.expert(8), "of prompts, in parts"
    assert times_for(MACHINE, work(), pace=Pace(load=0.125), faster_reads=2.0).load == 0.0625


def test_the_first_tokens_of_an_answer_by_hand() -> None:
    """Without a slot for an expert to stay in, they take as long as the others; an answer is the sum of its tokens."""
    run = simulate(scene(TOP_K), TYPICAL)
    assert run.first_tokens_per_second == pytest.approx(run.tokens_per_second, rel=0.05)
    tokens = FIRST_TOKENS + 10
    assert run.answer_seconds(tokens) == pytest.approx(run.beginning_seconds + 10 * run.seconds_per_token)
    known = simulate(scene(TOP_K, pace=Pace(beginning=2.0)), TYPICAL)
    assert known.beginning_seconds == pytest.approx(run.beginning_seconds + 2.0)
    assert known.seconds_per_token == run.seconds_per_token
    assert run.answer_seconds(2) == pytest.approx(run.beginning_seconds / (FIRST_TOKENS - 1))


def test_experts_that_are_still_loaded_delay_the_first_tokens() -> None:
    """Every expert has a slot, and a prompt of four tokens uses few experts. The link must then load all others: its
    busy time is a lower bound of a beginning that is shorter than the loads."""
    filled = scene(4 * EXPERTS, prompt_tokens=4)
    run = simulate(filled, TYPICAL)
    steady = (FIRST_TOKENS - 1) * run.seconds_per_token
    assert steady + 20 * LOAD < run.beginning_seconds < steady + 4 * EXPERTS * LOAD + 0.1
    loaded = simulate(replace(filled, prompt_tokens=512), TYPICAL)
    assert loaded.beginning_seconds < run.beginning_seconds
    compared = simulate(replace(filled, is_compared=True), TYPICAL)
    assert compared.beginning_seconds == pytest.approx(steady), "comparisons leave it out"


@pytest.mark.parametrize("slots", [64, 4 * EXPERTS])
def test_loads_into_new_memory_delay_prompts_only(slots: int) -> None:
    usual, slow = (scene(slots, pace=Pace(first_load=first)) for first in (None, 5 * LOAD))
    shown, known = simulate(slow, TYPICAL), simulate(usual, TYPICAL)
    assert shown.ttft_seconds > 3 * known.ttft_seconds
    assert shown.seconds_per_token == pytest.approx(known.seconds_per_token, rel=0.01)
    assert prompt_seconds(slow, 256) == pytest.approx(4 * EXPERTS * 5 * LOAD)


def test_a_prompt_reads_while_other_layers_are_computed() -> None:
    """Reads never pause: the time of other layers but the first is hidden behind them."""
    slow = replace(scene(4 * EXPERTS, pace=Pace(load=1e-3)), prompt_tokens=256)
    layer, run = times_for(MACHINE, slow.work, pace=slow.pace).layer(256), simulate(slow, TYPICAL)
    assert run.prefill_parts["disk"] + layer < run.ttft_seconds < run.prefill_parts["disk"] + 2 * layer


def test_faster_reads_shorten_only_the_reading_of_a_first_load() -> None:
    pace = Pace(load=0.1, first_load=0.3)
    assert times_for(MACHINE, work(), pace=pace).first_load == pytest.approx(0.3)
    assert times_for(MACHINE, work(), pace=pace, faster_reads=2.0).first_load == pytest.approx(0.25)


def test_a_short_text_has_slots_in_memory_that_long_texts_need() -> None:
    size, positions = 3 * MIB, 4096
    demand = Demand(
        0, 0, 30 * size, (SlotClass(size, TOP_K, 4 * EXPERTS),),
        context_tokens=positions, kv_positions=positions, kv_position_bytes=30 * size // positions,
    )  # fmt: skip
    lending = allocate(80 * size, demand).lending()
    short = replace(scene(1), ledger=lending)
    assert lending.cache_slots + 20 < short.slots <= lending.most_slots
    sized = replace(
        short, ledger=replace(scene(short.slots).ledger, pools=(PoolSize(short.slots, lending.staging_slots),))
    )
    assert simulate(short, TYPICAL) == simulate(sized, TYPICAL)
