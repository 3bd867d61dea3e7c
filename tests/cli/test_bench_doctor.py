from __future__ import annotations

import json
import re

import pytest

from bench.mechanisms import ablation
from bench.mechanisms.ablation import ABLATIONS, DEVICE_ABLATIONS
from smoe.benchmark.cells import TableCell
from smoe.load.stored_proofs import PROOFS
from smoe.machine import measure as hardware


def test_bench_ends_with_one_line_of_json(run, checkpoint):
    ran = run("bench", checkpoint, "--memory", "64MiB", "--quick")
    value = ran.json
    assert ran.code == 0
    assert value.keys() >= {"machine", "versions", "model", "seed", "memory_budget_bytes", "cells"}
    assert [(c["prompt_tokens"], c["new_tokens"], c["batch"]) for c in value["cells"]] == [(16, 64, 1), (16, 64, 3)]
    for cell in value["cells"]:
        assert cell.keys() >= {"ttft_seconds", "tpot_seconds", "tokens_per_second", "hit_ratio", "floor_share"}
        assert cell["floor_share"] > 0
    assert "(prefill)" in ran.err and "TPOT" in ran.err


def test_bench_leaves_out_what_the_context_cannot_hold(run, checkpoint, monkeypatch):
    monkeypatch.setattr("smoe.benchmark.cells.QUICK_CELLS", [TableCell(8, 4, 1), TableCell(16, 64, 1)])
    ran = run("bench", checkpoint, "--memory", "64MiB", "--quick", "--context", 64)
    assert (
        ran.code == 0
        and [c["prompt_tokens"] for c in ran.json["cells"]] == [8]
        and "skipping 1 measurement that a context of 64 tokens cannot hold" in ran.err
    )


def test_a_budget_for_one_sequence_skips_the_measurements_of_three(run):
    """The error states the least budget for one sequence, which depends on the CPU's kernels."""
    refused = run("bench", "demo", "--memory", "1MiB", "--quick")
    assert refused.code != 0 and "a budget of 1.00 MiB cannot hold this model" in refused.err
    least = re.search(r"give --memory (\S+) or more", refused.err)[1]
    ran = run("bench", "demo", "--memory", least, "--quick")
    assert ran.code == 0 and [cell["batch"] for cell in ran.json["cells"]] == [1]
    assert "skipping 1 measurement, because the budget cannot hold 3 sequences" in ran.err


def test_a_context_that_holds_no_cell_is_refused_before_the_model_is_loaded(run, checkpoint):
    ran = run("bench", checkpoint, "--quick", "--context", 64, "--json")
    assert ran.code == 2 and "--context 64 is too short for every cell; the shortest needs 80 tokens" in ran.err
    assert ran.json["error"]["setting"] == "context_tokens" and "resident" not in ran.err


def test_a_seed_that_no_generator_takes_is_refused(run, checkpoint):
    for command in ("bench", "verify"):
        ran = run(command, checkpoint, "--seed", 10**30)
        assert ran.code == 2 and f"--seed is {10**30}; it must be a whole number of 64 bits" in ran.err


@pytest.fixture
def quick_measurements(monkeypatch):
    monkeypatch.setattr(hardware, "measure_disk", lambda *args, **named: (0.3e9, False))
    monkeypatch.setattr(hardware, "measure_experts", lambda *args, **named: 4e9)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


def test_doctor_stores_the_profile_and_gives_advice(run, tmp_path, quick_measurements):
    ran = run("doctor", "--folder", tmp_path)
    assert ran.code == 0 and "0.3 GB/s" in ran.out and "NVMe" in ran.out and "O_DIRECT" in ran.out
    assert hardware.profile_path().exists() and str(hardware.profile_path()) in ran.err.replace("\n", "")
    profile = hardware.load_profile()
    assert profile is not None and profile.disk_bytes_per_second == 0.3e9


@pytest.mark.parametrize(("waited", "is_mentioned"), [(0.5, True), (0.1, False), (None, False)])
def test_doctor_mentions_a_busy_machine(run, tmp_path, quick_measurements, monkeypatch, waited, is_mentioned):
    monkeypatch.setattr("smoe.machine.findings.waited_share", lambda: waited)
    ran = run("doctor", "--folder", tmp_path)
    assert ran.code == 0 and ("measuring waited 50% of its time for a core" in ran.out) is is_mentioned


def test_doctor_json(run, tmp_path, quick_measurements):
    value = run("doctor", "--folder", tmp_path, "--json").json
    assert value["memory_bytes_per_second"] == 20e9 and value["findings"]


@pytest.mark.usefixtures("quick_measurements")
def test_doctor_counts_stored_results_of_self_tests(run, tmp_path):
    assert "none yet" in run("doctor", "--folder", tmp_path).out
    PROOFS.write(b"key", b"{}")
    assert run("doctor", "--folder", tmp_path, "--json").json["stored_self_tests"] == 1


def test_summary_uses_the_profile_and_says_so(run, checkpoint, tmp_path, quick_measurements):
    run("doctor", "--folder", tmp_path)
    ran = run("generate", checkpoint, "--memory", "64MiB", "-p", "Hello", "--max-new-tokens", 8)
    assert "profile of" in ran.err


def test_doctor_refuses_a_folder_that_is_not_there(run, tmp_path):
    ran = run("doctor", "--folder", tmp_path / "nowhere")
    assert ran.code == 2 and "nowhere', which is not there; give the folder" in ran.err.replace("\n", "")
    (tmp_path / "file").write_text("")
    ran = run("doctor", "--folder", tmp_path / "file")
    assert ran.code == 2 and "file', which is a file; give the folder" in ran.err.replace("\n", "")


@pytest.mark.parametrize("size", ["0", "1KiB", "1TiB"])
def test_doctor_refuses_a_size_that_it_cannot_measure(run, tmp_path, size):
    """Would catch a division by nothing, and a terabyte of zeros."""
    ran = run("doctor", "--folder", tmp_path, "--expert-size", size)
    assert ran.code == 2 and f"--expert-size is '{size}'; it must be a size from 4.00 KiB to 2.00 GiB" in ran.err


def test_doctor_refuses_more_threads_than_there_can_be(run, tmp_path):
    """The process would end without a word."""
    ran = run("doctor", "--folder", tmp_path, "--threads", 10**7)
    assert ran.code == 2 and "--threads" in ran.err and "1024" in ran.err


def test_a_profile_of_another_machine_is_not_used(run, tmp_path, quick_measurements):
    run("doctor", "--folder", tmp_path)
    path = hardware.profile_path()
    stored = json.loads(path.read_text())
    stored["machine"]["processor"] = "another"
    path.write_text(json.dumps(stored))
    assert hardware.load_profile() is None
    path.write_text("{ not json")
    assert hardware.load_profile() is None


@pytest.mark.slow
def test_an_ablation_takes_every_step_on_the_same_text(run, checkpoint, quick):
    ran = run("bench", checkpoint, "--memory", "2700KiB", "--ablation", "smoe", "--text", quick, "--rounds", 2)
    assert ran.code == 0, ran.err
    steps = ran.json["steps"]
    assert [len(step["seconds_per_token_by_round"]) for step in steps] == [2] * len(ABLATIONS["smoe"])
    lossless, lossy = steps[:-3], steps[-3:]
    assert all(step["substituted_share"] is None for step in lossless)
    assert all(step["substituted_share"] is not None and step["top_score_missing_share"] >= 0 for step in lossy)
    assert steps[0]["prefetch_precision"] is None and "LRU on demand" in ran.err


@pytest.mark.slow
def test_beside_a_device_the_cpu_computes_too(run, checkpoint, quick, tmp_path):
    text, picture = tmp_path / "text.txt", tmp_path / "smoe.png"
    text.write_text("once upon a time there was a cat " * 16)
    beside = ("--device", "emulated", "--profile", "rtx-4060-ti", "--set", "dilation=1")
    asked = (*beside, "--batch", 2, "--rounds", 1, "--plot", picture)
    ran = run("bench", checkpoint, "--memory", "2500KiB", "--ablation", "smoe", "--text", text, *asked)
    assert ran.code == 0, ran.err
    assert (ran.json["profile"], ran.json["batch"]) == ("rtx-4060-ti", 2)
    steps = {step["name"]: step for step in ran.json["steps"]}
    static = steps["static, rest on CPU"]
    assert static["hit_ratio"] < 1, "everything is resident: this test tests nothing"
    assert static["host_computed_share"] == pytest.approx(1 - static["hit_ratio"])
    assert static["loads_per_token"] == 0
    assert steps["LRU on demand"]["host_computed_share"] == 0
    assert steps["all four (+ BA)"]["substituted_share"] >= 0
    assert (static["alpha"], steps["all four (+ BA)"]["alpha"]) == (0, 0.3)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "late" in ran.err


def test_lossy_steps_have_the_models_alpha_or_the_one_given():
    """Lossless steps stay lossless."""
    from bench.mechanisms.ablation import _with
    from smoe.presets import configure

    lossless, lossy = (next(s for s in ABLATIONS["smoe"] if s.name == name) for name in ("CE", "CE + CR"))
    plain, given = configure(), configure("smoe", alpha=0.5)
    assert [_with(lossless, config).lossy for config in (plain, given)] == [[], []]
    assert (_with(lossy, plain).alpha, _with(lossy, plain).alpha_as_priced) == (0.3, True)
    assert (_with(lossy, given).alpha, _with(lossy, given).alpha_as_priced) == (0.5, False)


@pytest.mark.parametrize("name", ABLATIONS)
def test_a_step_has_the_same_name_with_and_without_a_device(name):
    """Would catch two names for one mechanism, and one name for two."""
    by_name, by_switches = {}, {}
    for step in ABLATIONS[name] + DEVICE_ABLATIONS[name]:
        switches = tuple(sorted(step.switches.items()))
        assert by_name.setdefault(step.name, switches) == switches
        assert by_switches.setdefault(switches, step.name) == step.name
    shared = {step.name for step in ABLATIONS[name]} & {step.name for step in DEVICE_ABLATIONS[name]}
    assert {"LRU on demand", "LRU + next gate", "CE", "CE + CR", "CE + CR + Pre"} <= shared


def test_an_interrupted_ablation_shows_what_it_has(run, checkpoint, quick, monkeypatch):
    turns, original = [], ablation._turn

    def turn(*args):
        turns.append(1)
        if len(turns) == 3:
            raise KeyboardInterrupt
        return original(*args)

    monkeypatch.setattr(ablation, "_turn", turn)
    ran = run("bench", checkpoint, "--memory", "2700KiB", "--ablation", "smoe", "--text", quick)
    assert ran.code == 130
    assert [step["name"] for step in ran.json["steps"]] == ["LRU on demand", "LRU + next gate"]
    assert f"interrupted; 2 of {2 * len(ABLATIONS['smoe'])} rounds" in ran.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--ablation", "unknown"), "choose one of: smoe"),
        (("--ablation", "smoe", "--rounds", 0), "--rounds is 0; it must be at least 1"),
        (("--ablation", "smoe", "--batch", -1), "--batch is -1; it must be at least 1"),
        (("--ablation", "smoe", "--tokens", 0), "at least 1"),
        (("--quick", "--tokens", 9), "--tokens has an effect only with --ablation"),
        (("--ablation", "smoe", "--plot", "/nowhere/x.png"), "does not exist: create it"),
        (("--ablation", "smoe", "--plot", "x.gif"), ".png, .svg or .pdf"),
        (("--ablation", "smoe", "--quick"), "--quick"),
        (("--ablation", "smoe", "--preset", "lru"), "--preset"),
        (("--quick", "--batch", 2), "--batch has an effect only with --ablation"),
    ],
)
def test_a_bad_ablation_is_refused(run, checkpoint, arguments, words):
    ran = run("bench", checkpoint, *arguments)
    assert ran.code == 2 and words in ran.err


def test_an_ablation_times_as_many_tokens_as_asked(run, checkpoint, quick, monkeypatch):
    monkeypatch.setitem(ABLATIONS, "smoe", ABLATIONS["smoe"][:1])
    timed = []
    mean = ablation.mean
    monkeypatch.setattr(ablation, "mean", lambda seconds: timed.append(len(seconds)) or mean(seconds))
    asked = ("bench", checkpoint, "--memory", "2700KiB", "--ablation", "smoe", "--text", quick, "--rounds", 1)
    assert run(*asked, "--tokens", 9).json["tokens"] == 9 and set(timed) == {9}
    refused = run(*asked, "--tokens", 900)
    assert refused.code == 2 and "fewer --tokens" in refused.err


def test_a_block_to_post_goes_to_stdout(run, checkpoint, monkeypatch):
    monkeypatch.setattr("smoe.benchmark.shared_block.SHARED_CELL", TableCell(16, 8, 1))
    ran = run("bench", checkpoint, "--memory", "64MiB", "--share", "--seed", 1)
    assert ran.code == 0, ran.err
    lines = ran.out.splitlines()
    assert (lines[0], lines[-1]) == ("```text", "```") and str(checkpoint.parent) not in ran.out
    assert any(line.startswith("speed ") and line.endswith("over 8 tokens") for line in lines)


@pytest.mark.parametrize("other", [["--quick"], ["--ablation", "smoe"]])
def test_a_block_is_of_one_measurement(run, checkpoint, other):
    ran = run("bench", checkpoint, "--share", *other)
    assert ran.code == 2 and f"--share has no meaning with {other[0]}" in ran.err
