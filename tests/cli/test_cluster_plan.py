"""`smoe cluster plan` as a user has it."""

from __future__ import annotations

import pytest

pytest.importorskip("zmq")

from smoe.cluster.stored_identity import keep_status, new_coordinator, store_coordinator

SIZE = ("--memory", "4MiB", "--context", 128, "--profile", "raspberry-pi-5")


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A cluster that has never run."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    store_coordinator(new_coordinator("home"))


def member(**times):
    measured = {"seconds_per_load": 2e-3, "seconds_per_expert": 1e-4, "seconds_there_and_back": 1e-3}
    return {"name": "w", "state": "ready", "why": "", "slots": 6} | measured | times


def plan(run, model, *options):
    return run("cluster", "plan", model, *SIZE, *options)


def test_a_cluster_that_nobody_has_bought(run, checkpoint):
    ran = plan(run, checkpoint, "--workers", 2, "--worker-profile", "laptop-cpu", "--worker-memory", "1MiB", "--json")
    said = ran.json
    assert len(said["workers"]) == 2 and said["workers"][0]["slots"] == 32 and said["link"] == "1Gbit"
    assert [(case["workers"], case["schedule"]) for case in said["cases"]] == [
        (count, schedule) for count in (1, 2) for schedule in ("finish", "cluster", "round-robin")
    ]
    assert said["cases"][0]["tokens_per_second"] == pytest.approx(1 / said["cases"][0]["seconds_per_token"])
    assert sum("synthetic" in remark for remark in said["remarks"]) == 1


def test_shown_within_a_narrow_window(run, checkpoint):
    ran = plan(run, checkpoint, "--workers", 2, "--slots", 4, "--link", "100Mbit")
    assert ran.code == 0 and "waits most for" in ran.out and "100Mbit" in ran.out.splitlines()[0]
    assert max(map(len, ran.out.splitlines()[1:])) <= 80
    assert sum(line.startswith(("finish: ", "cluster: ", "round-robin: ")) for line in ran.out.splitlines()) == 6


def test_how_much_faster_the_coordinator_is_alone(run, checkpoint):
    """Would catch "as fast" where the workers slow every token down."""
    asked = ("--workers", 2, "--slots", 4, "--link", "1Mbit")
    found = plan(run, checkpoint, *asked, "--json").json
    times = [case["seconds_per_token"] for case in found["cases"] if case["schedule"] == "round-robin"]
    ratio = min(times) / found["alone_seconds_per_token"]
    lines = plan(run, checkpoint, *asked).out.splitlines()
    assert ratio > 1.1
    assert f"round-robin: workers do not help; the coordinator alone is {ratio:.2g} times as fast" in lines
    assert any(line.startswith("finish: ") for line in lines) and max(map(len, lines[1:])) <= 80


@pytest.mark.parametrize("preset", ["cluster", "od-moe"])
def test_its_presets_are_no_news(run, checkpoint, preset):
    ran = plan(run, checkpoint, "--workers", 1, "--slots", 4, "--preset", preset)
    assert ran.code == 0 and "with a draft model: --preset cluster" in ran.out
    assert "smoe pack --precision int4" in ran.err


def test_workers_of_several_sizes(run, checkpoint, home):
    keep_status("home", [member(slots=1), member(slots=8)], is_over=True)
    assert "workers: room for 1 to 8, a load 2 ms, an expert" in plan(run, checkpoint, "--name", "home").out


def test_workers_that_main_has_measured(run, checkpoint, home):
    keep_status("home", [member(), member(seconds_per_load=0.0, slots=8), member(seconds_per_expert=0.0)], is_over=True)
    workers = plan(run, checkpoint, "--name", "home", "--json").json["workers"]
    assert [(each["load"], each["slots"]) for each in workers] == [(2e-3, 6), (2e-3, 8)], "no load seen: the others'"
    assert len(plan(run, checkpoint, "--name", "home", "--workers", 3, "--json").json["workers"]) == 3


def test_a_recorded_run_is_asked_for_its_routing(run, checkpoint, traces):
    said = plan(run, checkpoint, "--workers", 1, "--slots", 4, "--trace", traces[0], "--json").json
    assert not any("synthetic" in remark for remark in said["remarks"])


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--name", "home"), "no coordinator of the cluster 'home' has measured its workers yet"),
        (("--name", "away"), "there is no cluster 'away' on this machine"),
        (("--name", "home", "--slots", 4), "and --slots both describe the workers"),
        (("--name", "home", "--worker-profile", "laptop-cpu"), "--worker-profile both describe the workers"),
        (("--slots", 4, "--worker-memory", "1MiB"), "both set how many experts a worker holds"),
        (("--worker-memory", "2KiB"), "for experts, and 2.00 KiB were given"),
        (("--worker-profile", "toaster"), "--worker-profile is 'toaster', and there is no such profile"),
        (("--link", "fast"), "--link is 'fast', which is no link's rate; write for example 1Gbit or 100Mbit"),
    ],
)
def test_refusals(run, checkpoint, home, options, why):
    ran = plan(run, checkpoint, *options)
    assert ran.code != 0 and why in " ".join(ran.err.split()), ran.err


def test_the_name_of_a_cluster_is_an_option_of_its_own(run, checkpoint, home):
    ran = run("cluster", "plan", checkpoint, "--memory", "3MiB", "--cluster", "home")
    assert ran.code == 2 and "--cluster home makes a run use" in ran.err and "give --name" in " ".join(ran.err.split())


def test_workers_that_never_loaded_are_refused(run, checkpoint, home):
    keep_status("home", [member(seconds_per_load=0.0)], is_over=True)
    ran = plan(run, checkpoint, "--name", "home")
    assert ran.code != 0 and "have loaded no experts, so the time of a load is not measured" in " ".join(
        ran.err.split()
    )


def test_a_plan_of_one_machine_names_what_was_typed(run, checkpoint):
    preset = run("plan", checkpoint, "--preset", "cluster", "--memory", "3MiB")
    assert (
        preset.code == 2 and "use smoe cluster plan for several machines, or leave out --preset cluster" in preset.err
    )
    assert "--cluster" not in preset.err and "placement" not in preset.err
    named = run("plan", checkpoint, "--cluster", "home", "--memory", "3MiB")
    assert named.code == 2 and named.err.rstrip().endswith("leave out --cluster")


def test_a_missing_pack_is_named_once_before_the_commands_that_make_it(run, checkpoint):
    ran = run("generate", checkpoint, "--prefetch", "draft-model", "--memory", "6MiB", "--context", 128, "-p", "x")
    reason, _, commands = ran.err.partition("\nto make it work:\n")
    assert ran.code == 2 and reason.count("smoe pack") == reason.count("--precision int4") == 1
    assert commands.count("smoe pack") == commands.count("--precision int4") == 1
