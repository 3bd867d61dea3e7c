from __future__ import annotations

import itertools
import re
import shutil
from types import SimpleNamespace

import pytest
from rich.console import Console

from smoe import from_pretrained
from smoe.cli.plan import _first
from smoe.config import EngineConfig
from smoe.machine.process_memory import LIBRARY_CODE_BYTES, LIBRARY_SCRATCH_BYTES
from smoe.machine.this_machine import layer_seconds
from smoe.memory.emulation import read_profile
from smoe.report.forecast import typical_hit_ratio
from smoe.report.pace import UNTAUGHT_SPEEDS, Access, LastRun, Pace, arithmetic_of, remember
from smoe.units import parse_share

USUAL = arithmetic_of(EngineConfig(), "auto")
FIELDS = {
    "bytes",
    "slots",
    "resident_share",
    "floor_seconds_per_token",
    "expert_bytes",
    "bytes_per_token",
    "minimum_memory_bytes",
    "full_memory_bytes",
}


@pytest.fixture
def config_only(checkpoint, tmp_path):
    shutil.copy(checkpoint / "config.json", tmp_path)
    return tmp_path


def test_config_alone_is_enough(run, config_only, checkpoint):
    value = run("plan", config_only, "--memory", "4MiB", "--json").json
    assert value.keys() >= FIELDS
    assert sum(value["bytes"].values()) <= value["memory_budget_bytes"] == 4 << 20
    whole = run("plan", checkpoint, "--memory", "4MiB", "--json").json
    for name in ("non_expert_weights", "workspace", "kv_cache"):
        assert value["bytes"][name] == whole["bytes"][name]
    assert "from config.json only" in str(value["remarks"]) and "config.json" not in str(whole["remarks"])


def test_of_a_checkpoint_that_is_not_all_here_the_config_is_planned(run, checkpoint, config_only):
    """As while it is being downloaded."""
    (config_only / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-1.safetensors"}}')
    ran = run("plan", config_only, "--memory", "4MiB", "--json")
    assert ran.code == 0 and "from config.json only" in str(ran.json["remarks"])


def test_a_process_is_divided_by_one_reading_of_what_it_holds(run, config_only, monkeypatch):
    """It grows while a plan is made. Would catch a division by two readings, which does not add up."""
    held = itertools.count(100 << 20, 64 << 10)
    monkeypatch.setattr("smoe.machine.process_memory.libraries_bytes", lambda: next(held))
    limit = (102 << 20) + LIBRARY_CODE_BYTES + LIBRARY_SCRATCH_BYTES
    value = run("plan", config_only, "--process-memory", str(limit), "--context", 64, "--json").json
    assert value["memory_budget_bytes"] + sum(value["beside_budget_bytes"].values()) == limit


def test_floor_is_the_arithmetic_of_uniform_routing(run, config_only):
    """hidden 64, inner 32, fp32: an expert is 3 * 64 * 32 * 4 bytes; 4 of 8 a token in each of 4 layers."""
    value = run("plan", config_only, "--memory", "4MiB", "--json").json
    assert value["expert_bytes"] == 3 * 64 * 32 * 4 and value["expert_bytes_per_token"] == 16 * value["expert_bytes"]
    assert value["bytes_per_token"] == pytest.approx((1 - value["resident_share"]) * value["expert_bytes_per_token"])
    assert value["floor_seconds_per_token"] == pytest.approx(value["bytes_per_token"] / 1e8)
    assert value["floor_bound_by"] == "disk" and "uniform" in value["assumption"]


def test_the_budget_planned_is_the_budget_of_the_run(run, checkpoint):
    planned = run("plan", checkpoint, "--memory", "4MiB", "--json").json
    ran = run("generate", checkpoint, "--memory", "4MiB", "-p", "x", "--max-new-tokens", 2, "--json").json
    assert ran["memory_budget_bytes"] == planned["memory_budget_bytes"]
    assert planned["minimum_memory_bytes"] < planned["full_memory_bytes"]


def test_everything_fits_in_the_full_budget_and_nothing_below_the_minimum(run, config_only):
    value = run("plan", config_only, "--memory", "4MiB", "--json").json
    full = run("plan", config_only, "--memory", value["full_memory_bytes"], "--json").json
    assert full["resident_share"] == 1 and full["bytes_per_token"] == 0 and full["floor_bound_by"] == "memory"
    assert run("plan", config_only, "--memory", value["minimum_memory_bytes"], "--json").code == 0
    refused = run("plan", config_only, "--memory", value["minimum_memory_bytes"] - 1, "--json")
    assert (refused.code, refused.json["error"]["type"]) == (2, "BudgetError") and "KV cache" in refused.err


def test_the_table_names_every_part(run, config_only):
    ran = run("plan", config_only, "--memory", "4MiB")
    assert ran.code == 0
    for words in ("non-expert weights", "expert slots", "other budgets", "this budget", "4 a token"):
        assert words in ran.out
    assert "equally likely" in " ".join(ran.err.split()) and "recorded runs" in ran.err
    assert any(line.split()[-2:] == ["this", "budget"] for line in ran.out.splitlines())
    assert not any(line.split() == ["tokens/s"] for line in ran.out.splitlines()), "a row is one line"


def test_a_usual_answer_has_more_experts_in_memory_than_a_full_context(run):
    """Would catch a plan that counts only the experts that fit beside the longest text."""
    asked = ("plan", "demo", "--memory", "28MiB", "--context", 1024)
    found, out = run(*asked, "--json").json, run(*asked).out
    usual, always, most = (found[name] for name in ("usual_slots", "slots", "most_slots"))
    assert always < usual < most
    first, second = (line for line in out.splitlines() if "experts in memory  " in line or "always." in line)
    assert f" {usual} ({usual / 768:.0%}) of 768 at the end of a usual answer: a prompt of 128 tokens" in first
    assert f"So {most} ({most / 768:.0%}) experts fit at first, and {always} ({always / 768:.0%}) always." in second


def test_the_answer_comes_before_the_notes(run, config_only, monkeypatch):
    """No room for a prompt of 2,000 tokens in a context of 128. Both streams are one, as on a terminal."""
    monkeypatch.setattr("smoe.cli.console.errors", lambda: Console(highlight=False))
    lines = run("plan", config_only, "--memory", "4MiB", "--context", 128).out.splitlines()
    (answer,) = [place for place, line in enumerate(lines) if "200-word" in line]
    assert re.fullmatch(r"Expect [\d,. -]+ tokens/s\. A 200-word answer takes [a-z0-9 ]+\.", lines[answer])
    assert all("rates come from" not in line and "routing" not in line for line in lines[:answer])
    assert any(line.startswith("the rates come from") for line in lines[answer:])


def test_the_words_of_a_table_are_explained(run, checkpoint):
    out = run("plan", checkpoint, "--memory", "4MiB", "--context", 128).out
    tables = [line for line in out.splitlines() if line.rstrip().endswith("remark")]
    assert len(tables) == 2, "every column has a heading"
    for word in ("lossy: the text may differ", "to pack: smoe pack must first write"):
        assert out.count(word) == 1


def test_no_more_memory_is_recommended_where_it_is_no_faster(run, config_only, monkeypatch):
    monkeypatch.setattr("smoe.cli.plan._LEAST_GAIN", 1e9)
    out = run("plan", config_only, "--memory", "2700KiB", "--context", 128).out
    assert "free. With --memory" not in out and "smoe generate" in out


def test_faster_reads_are_advised_where_they_bring_something(run, config_only):
    """Would catch a line that offers the same speed again, and a speed in the line of the first token."""
    value = run("plan", config_only, "--memory", "4MiB", "--json").json
    least, full = (
        run("plan", config_only, "--memory", value[f"{size}_memory_bytes"], "--set", "lend_reserve=false").out
        for size in ("minimum", "full")
    )
    (line,) = [line for line in least.splitlines() if "twice as fast" in line]
    assert re.fullmatch(r"A disk twice as fast would give [\d,.]+( - [\d,.]+)? tokens/s\.", line)
    assert "twice as fast" not in full


def test_no_config(run, tmp_path):
    ran = run("plan", tmp_path)
    assert ran.code == 2 and "config.json" in ran.err


def test_an_emulated_device_is_planned_by_its_profile(run, config_only):
    """Would catch this machine's rates (1e8 from disk) under a device that is emulated."""
    asked = ("plan", config_only, "--memory", "2700KiB", "--context", 128, "--device", "emulated")
    asked += ("--profile", "rtx-4060-ti")
    value, profile = run(*asked, "--json").json, read_profile("rtx-4060-ti")
    rates = value["rates"]
    assert rates["memory_bytes_per_second"] == profile.device_bytes_per_second
    assert rates["link_bytes_per_second"] == profile.link_bytes_per_second and rates["disk_bytes_per_second"] is None
    assert "4060" in rates["source"] and rates["source"].endswith("emulated")
    missed = (1 - value["resident_share"]) * value["expert_bytes_per_token"]
    assert value["bytes_per_token"] == pytest.approx(missed)
    assert value["floor_seconds_per_token"] == pytest.approx(missed / profile.link_bytes_per_second)
    assert value["floor_bound_by"] == "link"
    ran = run(*asked)
    assert "loaded" in ran.out and "read per token" not in ran.out + ran.err
    assert "loaded per token: the lower number is for typical texts" in ran.err
    assert (
        ", emulated: the speeds are those of that machine; experts that fit into its RAM" in ran.err
        and "doctor" not in ran.err
    )
    refused = run(*asked[:-1], "no-such-card")
    assert refused.code == 2 and "--profile is 'no-such-card', and there is no such profile or file" in refused.err


def test_speeds_are_a_range_from_uniform_to_typical_routing(run, config_only):
    """By hand: uniform routing reads (1 - share) of a token's experts and then computes; typical routing reads less,
    and at the same time. Would catch a forecast below what a run then does, and one single figure."""
    value = run("plan", config_only, "--memory", "2700KiB", "--context", 128, "--json").json
    share, used, layers = value["resident_share"], value["expert_bytes_per_token"], 4 * layer_seconds(64)
    assert 0 < share < 0.9
    memory = (used + value["dense_bytes"]) / 20e9
    uniform, typical = (1 - share) * used / 1e8, (1 - typical_hit_ratio(share)) * used / 1e8
    assert value["typical_bytes_per_token"] == pytest.approx(typical * 1e8)
    assert value["typical_bytes_per_token"] < value["bytes_per_token"]
    speeds = value["floor_tokens_per_second"]
    assert speeds["uniform"] == pytest.approx(1 / (uniform + memory + layers), rel=0.05)
    assert speeds["typical"] == pytest.approx(1 / max(typical, memory + layers), rel=0.05)


def test_one_line_recommends_a_budget_that_works(run, config_only, monkeypatch):
    """With plenty of memory the whole model, rounded up; with little what is free less a margin, rounded down."""
    for free, whole in ((64 << 30, True), ((256 << 20) + 3_000_000, False)):
        monkeypatch.setattr("smoe.report.forecast.free_device_bytes", lambda device, free=free: (free, "a test"))
        asked = ("plan", config_only, "--context", 128, "--memory", "4MiB")
        found, text = run(*asked, "--json").json, run(*asked).out
        recommended = found["recommended"]
        assert (recommended["resident_share"] == 1) is whole and recommended["floor_tokens_per_second"]["uniform"] > 0
        assert recommended["memory_budget_bytes"] <= free and recommended["free_bytes"] == free
        (line,) = [line for line in text.splitlines() if " free. With --memory" in line]
        size = line.split("--memory ")[1].split(",")[0]
        again = run("plan", config_only, "--context", 128, "--memory", size, "--json")
        assert again.code == 0 and again.json["memory_budget_bytes"] == recommended["memory_budget_bytes"]
    monkeypatch.setattr("smoe.report.forecast.free_device_bytes", lambda device: (300 << 20, "a test"))
    monkeypatch.setattr("smoe.report.forecast.less_margin", lambda free: 1 << 20)
    assert run(*asked, "--json").json["recommended"] is None and "too little free memory" in run(*asked).out


@pytest.mark.parametrize("share", ["55%", "0.75", "100%"])
def test_a_share_of_the_experts_in_place_of_a_budget(run, config_only, checkpoint, share):
    """The same everywhere: would catch a command whose context leaves another residency."""
    asked = parse_share(share)
    planned = run("plan", config_only, "--resident", share, "--json").json
    assert 0 <= planned["resident_share"] - asked < 1 / planned["experts"]
    for context in (32, 128):
        with from_pretrained(checkpoint, resident=share, context_tokens=context).offload as offload:
            assert offload.ledger.resident_share == planned["resident_share"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--resident", "40%", "--memory", "4MiB"), "leave out --memory or --resident"),
        (
            ("--resident", "1%"),
            "--resident 1% of 32 experts is 1 experts, and one token uses 4 in a layer; give 12.5%",
        ),
        (("--resident", "140%"), "not a share"),
    ],
)
def test_a_share_that_cannot_be_is_refused(run, config_only, options, words):
    ran = run("plan", config_only, *options)
    assert ran.code == 2 and words in " ".join(ran.err.split())


@pytest.mark.parametrize("profile", ["rtx-4060-ti", "raspberry-pi-5"])
def test_a_profile_alone_is_the_machine_to_plan_for(run, config_only, profile):
    """Without --device emulated, which a machine without a device beside its CPU could not be."""
    value = run("plan", config_only, "--context", 128, "--profile", profile, "--json").json
    machine = read_profile(profile)
    assert value["forecast"]["machine"]["name"] == profile
    assert value["forecast"]["tokens_per_second"] > 0 and "synthetic" in value["forecast"]["routing"]
    assert value["memory_budget_bytes"] <= machine.device_memory_bytes
    assert value["command"].startswith(f"smoe generate {config_only} --memory ")
    ran = run("plan", config_only, "--context", 128, "--profile", profile, "--precision", "int4")
    for words in (
        f"The simulated speed on {profile} is ",
        "other presets and precisions",
        "smoe generate",
        "missing: experts in int4",
    ):
        assert words in " ".join(ran.out.split())
    refused = run("generate", config_only, "--profile", profile, "-p", "x")
    assert refused.code == 2 and "--device emulated" in refused.err


def test_what_has_not_been_learned_is_said_beside_the_figures(run, checkpoint):
    """Would catch a predictor that has not been trained taken for one that is there, and its memory forgotten; other
    presets need none of it."""
    asked = ["plan", checkpoint, "--context", 128, "--prefetch", "expert-mlp", "--json"]
    assert "learned" in run(*asked, "--memory", "2700KiB").err
    value = run(*asked, "--memory", "20MiB").json
    assert value["bytes"]["learned"] > 10 << 20
    asked = value["forecast"]
    assert any("no tuned values are stored" in line for line in asked["missing"])
    assert asked["settings"]["prefetch"] == "expert-mlp", "the command is that of what was planned"
    assert not any("learned" in line for other in asked["other_presets"] for line in other["missing"])
    plain = run("plan", checkpoint, "--memory", "2700KiB", "--context", 128, "--json").json["forecast"]
    assert not any("learned" in line for line in plain["missing"])


def test_a_range_of_no_width_is_one_figure(run, checkpoint):
    """The toy takes as long on the device whatever its routing."""
    ran = run("plan", checkpoint, "--context", 128, "--profile", "rtx-4060-ti", "--resident", "100%")
    (line,) = [line for line in ran.out.splitlines() if line.startswith("The simulated speed")]
    assert re.match(r"The simulated speed on rtx-4060-ti is [\d,.]+ tokens/s\. ", line), line


def speeds_in(ran):
    """What the forecast's own two lines and the row of the budget asked for say of speeds."""
    expected, first = (
        next(line for line in ran.out.splitlines() if words in line) for words in ("simulated speed", "comes after ")
    )
    (row,) = [line for line in ran.out.splitlines() if "this budget" in line]
    return expected, first, row


def test_before_the_first_run_of_a_model_every_speed_is_a_range(run, checkpoint):
    """Would catch one figure that nothing on this machine has shown, and a range that stays once a run has."""
    asked = ("plan", checkpoint, "--memory", "4MiB", "--context", 128)
    value = run(*asked, "--json").json["forecast"]
    low, high = value["tokens_per_second_range"]
    assert not value["is_calibrated"] and value["first_pass_seconds"] is None
    assert low < 0.5 * value["tokens_per_second"] and high > 1.3 * value["tokens_per_second"]
    untaught = run(*asked)
    assert all(re.search(r"\d - \d", line) for line in (*speeds_in(untaught),))
    assert "no run of this model in precision auto on this machine is stored yet" in " ".join(untaught.err.split())
    measured = Pace(layer=1e-3, expert=1e-5, load=1e-5, first_pass=1.5)
    for access in (Access.PAGE_CACHE, Access.DIRECT):
        remember(checkpoint, USUAL, access, measured, LastRun(1.1, 0.9))
    taught, value = run(*asked), run(*asked, "--json").json["forecast"]
    _, first, row = speeds_in(taught)
    assert (
        value["is_calibrated"]
        and value["first_pass_seconds"] == 1.5
        and "The first prompt of a process takes 1.5 s longer" in taught.out
    )
    assert value["ttft_seconds_range"] == [value["ttft_seconds"]] * 2
    assert not re.search(r"after [^;]* - ", first) and not re.search(r"[\d.]+ - [\d.]+ +this budget", row)
    assert "has shown how fast" not in taught.err and "differed from" not in taught.err


def test_a_forecast_that_was_off_and_a_machine_that_was_busy_are_mentioned(run, checkpoint):
    asked = ("plan", checkpoint, "--memory", "4MiB", "--context", 128)
    for access in Access:
        remember(checkpoint, USUAL, access, Pace(layer=1e-3, expert=1e-5), LastRun(2.4, 0.4, 0.45))
    found = run(*asked).err
    assert "a token was 2.4 times slower, the first token was 2.5 times faster" in found
    assert "waited 45% of its time for a core" in found


def test_a_budget_above_the_free_memory_uses_the_times_of_earlier_runs(run, checkpoint):
    """The model takes little of it, and experts are read as they were in those runs."""
    remember(checkpoint, USUAL, Access.PAGE_CACHE, Pace(layer=1e-3, expert=1e-5, load=1e-5))
    asked = ("plan", checkpoint, "--memory", "900GiB", "--context", 128)
    assert run(*asked, "--json").json["forecast"]["is_calibrated"]
    remarks = " ".join(run(*asked).err.split())
    assert "is stored yet" not in remarks and "earlier runs read" not in remarks


@pytest.mark.parametrize(
    ("reads", "words"),
    [
        ("on", "follows from the measured rate of the disk: earlier runs read experts from the page cache"),
        ("off", "follows from the measured rate of the memory: earlier runs read experts from the disk"),
    ],
)
def test_where_experts_are_read_in_another_way_only_loads_are_unknown(run, checkpoint, monkeypatch, reads, words):
    monkeypatch.setattr("smoe.report.pace.usual_slots", lambda ledger: ledger.cache_slots)  # lent memory holds the rest
    access = Access.DIRECT if reads == "off" else Access.PAGE_CACHE
    remember(checkpoint, USUAL, access, Pace(layer=1e-3, expert=1e-5, load=1e-5))
    asked = ("plan", checkpoint, "--memory", "2800KiB", "--context", 128, "--set", f"direct_io={reads}")
    assert run(*asked, "--json").json["forecast"]["is_calibrated"]
    assert words in " ".join(run(*asked).err.split())


@pytest.mark.parametrize(("waited", "is_mentioned"), [(0.5, True), (0.1, False), (None, False)])
def test_a_busy_machine_is_mentioned(run, checkpoint, monkeypatch, waited, is_mentioned):
    """Rates measured beside other programs are theirs, too; of a profile nothing is measured."""
    monkeypatch.setattr("smoe.report.remarks.waited_share", lambda: waited)
    asked = ("plan", checkpoint, "--memory", "4MiB", "--context", 128)
    assert ("this machine is busy: this command waited 50%" in run(*asked).err) is is_mentioned
    assert "busy" not in run(*asked, "--profile", "rtx-4060-ti").err


@pytest.mark.parametrize(("seconds", "words"), [(2.0, "1.3 - 6.7 s"), (500.0, "5 min 30 s - 28 min 20 s")])
def test_a_first_token_is_a_range_of_any_length(seconds: float, words: str) -> None:
    """Would catch a plan of a large model that ends with a traceback: minutes are written with seconds behind them."""
    outlook = SimpleNamespace(spread=UNTAUGHT_SPEEDS, seconds=lambda simulated: (simulated / 1.5, simulated / 0.3))
    case = SimpleNamespace(run=SimpleNamespace(ttft_seconds=seconds))
    assert _first(outlook, case) == words
