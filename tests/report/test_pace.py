"""What a run shows of its pieces, kept for the next forecast.

Would catch: seconds divided by the wrong count, a pace of other experts or another way of reading taken, a short run
that overrides what a long one has shown.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from smoe.config import EngineConfig
from smoe.metrics import Counters
from smoe.report.pace import (
    ALONE,
    MOST_FIRST_PASS,
    PROMPT_FACTORS,
    UNKNOWN,
    Access,
    LastRun,
    Pace,
    RunArithmetic,
    access_of,
    arithmetic_of,
    crowded,
    first_load,
    last_run_of,
    loads_other_way,
    measured_pace,
    of_prompt,
    pace_of,
    remember,
    usable,
)

AUTO, INT4 = RunArithmetic("auto"), RunArithmetic("int4")
COUNTED = Counters(
    forward_passes=20, decode_uses=320, decode_hits=290, loads=30, prefetches=10, bytes_read=4000,
    read_busy_seconds=0.8, compute_seconds=0.64, forward_seconds=3.0, wait_seconds=0.36, plan_seconds=0.4,
)  # fmt: skip


pytestmark = pytest.mark.usefixtures("own_cache")


def test_pieces_by_hand() -> None:
    """Twenty steps of four layers: 3.0 s less 0.36 of waiting and 0.64 of experts are the layers'; as 0.8 of them were
    also spent reading, without that they would have taken less. Of 320 experts 30 were computed alone."""
    pace = measured_pace(COUNTED, 4, 100)
    assert crowded(0.8 / 3.0) == pytest.approx(1 + 0.6 * 0.8 / 3)
    assert pace.layer == pytest.approx((3.0 - 0.36 - 0.64) / 80 / crowded(0.8 / 3.0))
    assert pace.expert == pytest.approx(0.64 / (290 + ALONE * 30)) and pace.load == pytest.approx(0.8 / 40)


def test_a_prefetch_that_was_taken_back_was_no_load() -> None:
    assert measured_pace(replace(COUNTED, bytes_read=3200), 4, 100).load == pytest.approx(0.8 / 32)
    assert measured_pace(replace(COUNTED, bytes_read=9000), 4, 100).load == pytest.approx(0.8 / 40), "pages, not loads"


def test_a_crowd_is_no_larger_than_full() -> None:
    assert crowded(0.0) == 1.0 < crowded(0.5) < crowded(1.0) == crowded(1.5)


def test_too_little_shows_nothing() -> None:
    assert measured_pace(Counters(forward_passes=9, decode_uses=9), 4, 1) == UNKNOWN
    few = Counters(forward_passes=99, decode_uses=99, loads=3, bytes_read=3, forward_seconds=1.0)
    assert measured_pace(few, 4, 1).load is None


def test_each_kind_of_experts_has_its_own(tmp_path: Path) -> None:
    model, pace = tmp_path / "model", Pace(0.1, 0.2, 0.3, 1.2, 1.5, 0.7)
    remember(model, INT4, Access.DIRECT, pace)
    assert pace_of(model, INT4, Access.DIRECT) == pace
    assert pace_of(tmp_path, INT4, Access.DIRECT) == UNKNOWN
    assert pace_of(model, AUTO, Access.DIRECT) == Pace(layer=0.1), "a layer without experts is the same"


def test_only_the_time_of_a_load_depends_on_where_experts_are_read(tmp_path: Path) -> None:
    """Would catch a plan that knows nothing of a model because it reads experts in another way than the runs did."""
    remember(tmp_path, AUTO, Access.DIRECT, Pace(0.1, 0.2, 0.3, 1.2))
    assert pace_of(tmp_path, AUTO, Access.PAGE_CACHE) == Pace(0.1, 0.2, None, 1.2)
    assert loads_other_way(tmp_path, AUTO, Access.PAGE_CACHE) and not loads_other_way(tmp_path, AUTO, Access.DIRECT)
    remember(tmp_path, AUTO, Access.PAGE_CACHE, Pace(0.5, None, 0.7))
    assert pace_of(tmp_path, AUTO, Access.PAGE_CACHE) == Pace(0.5, 0.2, 0.7, 1.2)
    assert pace_of(tmp_path, AUTO, Access.DIRECT) == Pace(0.1, 0.2, 0.3, 1.2), "its own come first"
    assert not loads_other_way(tmp_path, AUTO, Access.PAGE_CACHE)


def test_the_beginning_of_a_text_is_that_of_runs_with_the_same_access(tmp_path: Path) -> None:
    remember(tmp_path, AUTO, Access.DIRECT, Pace(0.1, 0.2, beginning=0.7))
    assert pace_of(tmp_path, AUTO, Access.DIRECT).beginning == 0.7
    assert (
        pace_of(tmp_path, AUTO, Access.PAGE_CACHE).beginning is pace_of(tmp_path, AUTO, Access.NONE).beginning is None
    )


def test_with_all_experts_in_memory_no_read_slows_them(tmp_path: Path) -> None:
    """Would catch 4.9 tokens/s forecast for a model in memory that makes 10, by times of runs that read meanwhile."""
    remember(tmp_path, AUTO, Access.DIRECT, Pace(0.1, 0.16, 0.3, reading=1.0))
    assert pace_of(tmp_path, AUTO, Access.NONE) == Pace(0.1, pytest.approx(0.1), None)
    remember(tmp_path, AUTO, Access.NONE, Pace(0.05, 0.06, reading=0.0))
    assert pace_of(tmp_path, AUTO, Access.NONE) == Pace(0.05, 0.06, None, reading=0.0)
    assert pace_of(tmp_path, AUTO, Access.DIRECT) == Pace(0.1, 0.16, 0.3, reading=1.0)
    assert not loads_other_way(tmp_path, AUTO, Access.NONE)


@pytest.mark.parametrize("switches", [{"kernels": "torch"}, {"activations": "dtype"}, {"reproducible": True}])
def test_runs_of_other_arithmetic_have_times_of_their_own(tmp_path: Path, switches: dict[str, Any]) -> None:
    """Would catch a usual run that is forecast by the times of torch's kernels."""
    usual, other = (arithmetic_of(config, "auto") for config in (EngineConfig(), EngineConfig(**switches)))
    remember(tmp_path, usual, Access.DIRECT, Pace(0.1, 0.2, 0.3))
    remember(tmp_path, other, Access.DIRECT, Pace(1.1, 1.2, 1.3))
    assert pace_of(tmp_path, usual, Access.DIRECT) == Pace(0.1, 0.2, 0.3)
    assert pace_of(tmp_path, other, Access.DIRECT) == Pace(1.1, 1.2, 1.3)
    assert pace_of(tmp_path, usual._replace(precision="int4"), Access.DIRECT) == Pace(layer=0.1)


def test_kernels_of_fewer_instructions_have_times_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMOE_MAX_CPU_ISA", "all")
    usual = arithmetic_of(EngineConfig(), "auto")
    monkeypatch.setenv("SMOE_MAX_CPU_ISA", "none")
    assert arithmetic_of(EngineConfig(), "auto") != usual == AUTO


def test_loads_of_a_first_prompt_by_hand() -> None:
    prompt = Counters(bytes_read=2000, read_busy_seconds=0.6)
    assert first_load(prompt, 100) == pytest.approx(0.03)
    assert first_load(prompt, 1000) is None, "two loads are too few"
    assert first_load(replace(prompt, bytes_cached=500), 100) is None, "copies from the page cache are no reads"


def test_experts_that_fit_during_a_usual_answer_count_as_in_memory() -> None:
    demand = SimpleNamespace(total_experts=768)
    most: Any = SimpleNamespace(demand=demand, slots_of_text=lambda tokens: 768 if tokens < 400 else 767)
    assert access_of(most, True) is access_of(most, False) is Access.NONE
    fewer: Any = SimpleNamespace(demand=demand, slots_of_text=lambda tokens: 767)
    assert access_of(fewer, True) is Access.DIRECT and access_of(fewer, False) is Access.PAGE_CACHE


def test_a_run_that_ended_before_all_experts_were_read_corrects_the_time_of_an_expert() -> None:
    still_reading = Pace(layer=1.0, expert=2.6, load=3.0, skew=1.0, prompt=2.0, reading=0.5, beginning=0.7)
    assert usable(still_reading, Access.DIRECT) == still_reading
    corrected = usable(still_reading, Access.NONE)
    assert corrected == Pace(layer=1.0, expert=pytest.approx(2.0), prompt=2.0, beginning=0.7)
    no_steps = Pace(first_load=0.5, prompt=2.0, first_pass=1.0)
    assert usable(no_steps, Access.NONE) == no_steps
    in_memory = Pace(layer=1.0, expert=2.0, reading=0.01)
    assert usable(in_memory, Access.NONE) == in_memory


def test_loads_from_the_page_cache_are_not_those_of_the_disk() -> None:
    assert measured_pace(replace(COUNTED, bytes_cached=100), 4, 100).load is not None
    assert measured_pace(replace(COUNTED, bytes_cached=1000), 4, 100).load is None


def test_what_a_run_does_not_show_stays_known(tmp_path: Path) -> None:
    remember(tmp_path, AUTO, Access.PAGE_CACHE, Pace(0.1, 0.2, 0.3, None, 1.5))
    path = remember(tmp_path, AUTO, Access.PAGE_CACHE, Pace(layer=0.4, prompt=2.0))
    found = pace_of(tmp_path, AUTO, Access.PAGE_CACHE)
    assert (found.expert, found.load) == (0.2, 0.3)
    assert (found.layer, found.prompt) == pytest.approx((0.2, 3.0**0.5)), "half way, as one run may have been disturbed"
    path.write_text(path.read_text().replace('"load"', '"lode"'))
    assert pace_of(tmp_path, AUTO, Access.PAGE_CACHE).expert is None, "half of it is nothing"


def test_what_a_first_pass_takes_once_is_no_rate() -> None:
    """Nine seconds of compiling before eight layers of 0.1 s, forecast at 0.4: twice the rate, and 8.2 s once."""
    shown = of_prompt(first_pass_seconds=9.0, warm_seconds=0.8, forecast_seconds=0.4, tokens=128)
    assert shown.prompt == pytest.approx(2.0) and shown.first_pass == pytest.approx(8.2)
    short = of_prompt(first_pass_seconds=0.09, warm_seconds=0.07, forecast_seconds=0.02, tokens=4)
    assert short.prompt is None and short.first_pass == pytest.approx(0.07), "its calls, too, which no rate knows of"
    assert of_prompt(0.09, 0.07, 0.02, 4, factor=2.0).first_pass == pytest.approx(0.05)


def test_rates_that_are_too_low_leave_the_extra_time_of_a_first_pass() -> None:
    """Would catch the third forecast of a run on a busy machine: rates measured meanwhile forecast 0.4 s of the 0.3 s
    that a pass took, nothing was left for its extra time, and the next one took five times its forecast."""
    assert of_prompt(0.3, 0.05, 0.4, 12).first_pass == pytest.approx(0.25)


def test_a_run_that_compiled_kernels_is_not_averaged_with_later_ones() -> None:
    assert Pace(first_pass=1.0).after(Pace(first_pass=0.1)).first_pass == 0.1
    assert Pace(first_pass=0.1).after(Pace(first_pass=0.16)).first_pass == pytest.approx((0.1 * 0.16) ** 0.5)


def test_a_busy_machine_does_not_change_what_a_quiet_one_has_shown(tmp_path: Path) -> None:
    """Would catch 107 ms a token forecast where 32 came, because a run before had waited for most of its time."""
    busy, quiet = LastRun(1.0, 1.0, 0.7), LastRun(1.0, 1.0, 0.1)
    remember(tmp_path, AUTO, Access.PAGE_CACHE, Pace(layer=8.0, expert=8.0), busy)
    assert pace_of(tmp_path, AUTO, Access.PAGE_CACHE) == Pace(layer=8.0, expert=8.0), "better than nothing"
    remember(tmp_path, AUTO, Access.PAGE_CACHE, Pace(layer=2.0), busy)
    assert pace_of(tmp_path, AUTO, Access.PAGE_CACHE).layer == pytest.approx(4.0)
    remember(tmp_path, AUTO, Access.PAGE_CACHE, Pace(layer=1.0), quiet)
    assert pace_of(tmp_path, AUTO, Access.PAGE_CACHE) == Pace(layer=1.0, expert=8.0), "the quiet run's own"
    remember(tmp_path, AUTO, Access.PAGE_CACHE, Pace(layer=9.0, load=3.0), busy)
    assert pace_of(tmp_path, AUTO, Access.PAGE_CACHE) == Pace(layer=1.0, expert=8.0, load=3.0)
    remember(tmp_path, AUTO, Access.PAGE_CACHE, Pace(layer=4.0), quiet)
    assert pace_of(tmp_path, AUTO, Access.PAGE_CACHE).layer == pytest.approx(2.0)


def test_what_is_learned_of_prompts_is_bounded() -> None:
    assert of_prompt(1e6, 1e3, 1e-3, 128) == Pace(prompt=PROMPT_FACTORS[1], first_pass=MOST_FIRST_PASS)
    least = of_prompt(1e-9, 1e-9, 1.0, 128)
    assert least.prompt == PROMPT_FACTORS[0] and least.first_pass is not None and least.first_pass > 0


def test_how_the_last_run_went(tmp_path: Path) -> None:
    assert last_run_of(tmp_path, AUTO, Access.PAGE_CACHE) is None
    for last in (LastRun(3.0, 1.0), LastRun(1.2, 0.9, 0.1)):
        remember(tmp_path, AUTO, Access.PAGE_CACHE, Pace(layer=0.1), last)
        assert last_run_of(tmp_path, AUTO, Access.PAGE_CACHE) == last, "the last one, not a mean"
    assert last_run_of(tmp_path, AUTO, Access.DIRECT) is last_run_of(tmp_path, INT4, Access.PAGE_CACHE) is None


@pytest.mark.parametrize(
    ("last", "words"),
    [
        (LastRun(1.9, 0.6, 0.1), []),
        (LastRun(2.1, 1.0), ["its forecast: a token was 2.1 times slower"]),
        (LastRun(1.0, 0.4), ["its forecast: the first token was 2.5 times faster"]),
        (LastRun(0.11, 1.0), ["its forecast: a token was 9.1 times faster"]),
        (LastRun(1.0, 230.0), ["its forecast: the first token was 230 times slower"]),
        (LastRun(1.0, 1.0, 0.6), ["waited 60%"]),
        (LastRun(3.0, 1.0, 0.6), ["3 times slower", "waited 60%"]),
    ],
)
def test_doubts(last: LastRun, words: list[str]) -> None:
    assert len(last.doubts()) == len(words)
    assert all(word in doubt for word, doubt in zip(words, last.doubts(), strict=True))


def test_a_run_without_a_forecast_leaves_the_comparison_that_is_stored(tmp_path: Path) -> None:
    """Such as a server: would catch a warning that vanishes, and times of a busy machine that count."""
    compared = LastRun(2.4, 0.4, 0.0)
    remember(tmp_path, AUTO, Access.PAGE_CACHE, Pace(layer=1.0), compared)
    remember(tmp_path, AUTO, Access.PAGE_CACHE, Pace(layer=8.0), waited=0.5)
    assert last_run_of(tmp_path, AUTO, Access.PAGE_CACHE) == compared
    assert pace_of(tmp_path, AUTO, Access.PAGE_CACHE).layer == 1.0
    remember(tmp_path, AUTO, Access.PAGE_CACHE, Pace(layer=4.0), waited=0.0)
    assert pace_of(tmp_path, AUTO, Access.PAGE_CACHE).layer == 2.0
