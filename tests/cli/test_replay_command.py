from __future__ import annotations

import pytest

from smoe.policy.eviction.belady import Belady
from smoe.policy.registry import EVICTION, EVICTIONS, LEARNED
from smoe.policy.step import observation
from smoe.simulator.replay import replay
from smoe.trace.file import Trace


@pytest.fixture(scope="module")
def trace(tmp_path_factory, checkpoint):
    """The toy model's: 4 layers of 8 experts, 4 a token."""
    from smoe import from_pretrained
    from smoe.trace.recorder import recording
    from tests import oracle

    path = tmp_path_factory.mktemp("traces") / "toy.trace"
    model = from_pretrained(checkpoint, memory="4MiB", context_tokens=64)
    with model.offload, recording(model, path):
        model.generate(oracle.PROMPT % 90, max_new_tokens=24, min_new_tokens=24, do_sample=False)
    return path


@pytest.mark.parametrize("eviction", sorted(set(EVICTION) - {LEARNED}))
def test_figures_are_the_simulators(run, trace, eviction):
    said = run("replay", trace, "--resident", "50%", "--eviction", eviction, "--json").json
    routings = Trace(trace).routings(with_scores=True)
    policy = Belady(map(observation, routings)) if eviction == "belady" else EVICTIONS.find(eviction)()
    counts = replay(routings, 16, 2, policy)
    assert (said["slots"], said["experts"], said["uses"], said["misses"]) == (16, 32, counts.uses, counts.misses)
    assert said["decode_steps"] == 23 and said["uses"] == 23 * 4 * 4 and said["hit_ratio"] == counts.hit_ratio


def test_belady_misses_least_and_more_slots_miss_less(run, trace):
    def misses(*asked):
        return run("replay", trace, *asked, "--json").json["misses"]

    assert misses("--slots", 12, "--eviction", "belady") < misses("--slots", 12) < misses("--slots", 6)
    assert misses("--slots", 12, "--eviction", "score", "--alpha", 0.9) < misses("--slots", 12, "--eviction", "score")


def test_the_text_has_the_same_figures(run, trace):
    said = run("replay", trace, "--slots", 16, "--json").json
    ran = run("replay", trace, "--slots", 16)
    assert f"{said['hit_ratio']:.1%}" in ran.out and f"{said['misses']} of 368 uses" in ran.out and "(50%)" in ran.out


CLOCK = ("--profile", "rtx-a6000", "--expert-size", "9MiB")


def test_times_are_those_of_the_virtual_clock(run, trace):
    """Beside the same counts; a balancer may only help, and foresight shows in what was prefetched."""
    asked = ("replay", trace, "--resident", "50%", "--eviction", "lfu", *CLOCK, "--json")
    alone, shared = run(*asked).json, run(*asked, "--balance", "optimal").json
    assert alone["loads"] == alone["misses"] > shared["loads"]
    assert shared["loads"] + shared["computed_by_host"] <= shared["uses"]
    assert 0 < shared["seconds_per_step"] < alone["seconds_per_step"] < 1
    seen = run(*asked, "--foresight", 1).json
    assert seen["prefetches"] == seen["prefetches_used"] > 0 == alone["prefetches"]
    ran = run("replay", trace, "--resident", "50%", *CLOCK)
    assert "with rtx-a6000 (simulated)" in ran.out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--slots", 9, "--balance", "optimal"), "--balance has an effect only with --profile"),
        (("--slots", 9, "--profile", "rtx-a6000"), "add --expert-size"),
        (
            ("--slots", 9, "--profile", "rtx-1", "--expert-size", "9MiB"),
            "rtx-4090, rtx-a5000, rtx-a6000 or the path of a JSON file",
        ),
        (("--slots", 16, *CLOCK, "--pools", "layer"), "leave --pools out"),
        (("--slots", 9, *CLOCK, "--balance", "half"), "none, paper, optimal, host"),
        (("--slots", 9, *CLOCK, "--foresight", 2), "from 0 to 1"),
        (("--slots", 9, "--profile", "rtx-a6000", "--expert-size", "0B"), "from 1B to 1TiB"),
        ((), "either --slots N or --resident"),
        (
            ("--slots", 9, "--resident", "40%"),
            "--slots 9 and --resident 40% both set the size of the cache; leave out one",
        ),
        (("--resident", "many"), "is not a share"),
        (("--resident", "140%"), "is not a share"),
        (("--slots", 3), "--slots 3: a cache of 3 experts is too small: the model uses 4 of a layer"),
        (("--resident", "1%"), "--resident 1%: a cache of 0 experts is too small"),
        (("--resident", "1%"), "give at least 4, 12.5% of the 32"),
        (("--slots", 15, "--pools", "layer"), "each of 4 layers; give at least 16"),
        (("--slots", 900), "--slots is 900; the model has 32 experts: give at most 32"),
        (("--slots", 15, "--pools", "own"), "global, layer"),
        (("--slots", 9, "--eviction", "belady, lfu"), "belady, lfu"),
        (("--slots", 9, "--alpha", 2), "from 0 (exact) to 1"),
        (("--slots", 9, "--alpha", 0.3, "--eviction", "belady"), "--eviction belady needs"),
    ],
)
def test_bad_options_are_refused(run, trace, arguments, words):
    ran = run("replay", trace, *arguments)
    assert ran.code == 2 and words in " ".join(ran.err.split())


@pytest.mark.parametrize(
    ("arguments", "setting", "given"),
    [
        ((), "slots", None),
        (("--slots", 9, "--resident", "40%"), "slots", 9),
        (("--slots", 3), "slots", 3),
        (("--resident", "1%"), "resident", "1%"),
        (("--resident", "140%"), "resident", "140%"),
        (("--slots", 9, "--balance", "optimal"), "balance", "optimal"),
        (("--slots", 9, "--profile", "nofile.json", "--expert-size", "9MiB"), "profile", "nofile.json"),
        (("--slots", 9, "--profile", "rtx-a6000", "--expert-size", "9"), "expert_size", "9"),
    ],
)
def test_what_is_refused_has_facts(run, trace, arguments, setting, given):
    error = run("replay", trace, *arguments, "--json").json["error"]
    assert (error["setting"], error["given"]) == (setting, given) and error["allowed"]


def test_a_bad_profile_is_refused_before_the_trace_is_read(run):
    ran = run("replay", "none.trace", "--slots", 9, "--profile", "nofile.json", "--expert-size", "9MiB")
    assert ran.code == 2 and "--profile is 'nofile.json', and there is no such profile or file" in ran.err


def test_a_folder_is_no_trace(run, tmp_path):
    ran = run("replay", tmp_path, "--slots", 9)
    assert ran.code == 2 and "it is a folder; give a file that smoe record has written" in " ".join(ran.err.split())


def test_what_is_no_trace_is_refused(run, tmp_path):
    path = tmp_path / "a.trace"
    path.write_bytes(b"no trace")
    ran = run("replay", path, "--slots", 9)
    assert ran.code == 2 and "not a routing trace" in ran.err
