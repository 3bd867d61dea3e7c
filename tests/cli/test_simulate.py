from __future__ import annotations

import smoe
from bench.papers import duoserve, od_moe


def test_claims_stand_beside_ours(run, monkeypatch):
    monkeypatch.setattr(duoserve, "NEW_TOKENS", 3)
    monkeypatch.setattr(duoserve, "PROMPT_TOKENS", 8)
    said = run("simulate", "--paper", "duoserve", "--json").json
    assert said["paper"] == "duoserve" and {claim["where"] for claim in said["claims"]} >= {"figure 5", "table 2"}
    assert all(claim["verdict"] for claim in said["claims"]) and said["settings"][0]["end_to_end_seconds"] > 0
    shown = run("simulate", "--paper", "duoserve")
    assert (
        shown.code == 0
        and "accelerate" in shown.out
        and "the routing is synthetic: experts repeat" in " ".join(shown.err.split())
    )
    lines = shown.out.splitlines()
    assert max(map(len, lines)) <= 80 and {"duoserve's claims, as profiled"} <= set(lines)
    assert sum(line.split()[:1] == ["duoserve"] for line in lines) == len(duoserve.SETTINGS), "one line each"
    assert sum("reads each layer once" in line for line in shown.err.splitlines()) == 1, "a remark is said once"


def test_a_paper_may_claim_figures(run, monkeypatch):

    monkeypatch.setattr(od_moe, "NEW_TOKENS", 2)
    monkeypatch.setattr(od_moe, "usable_cores", lambda: 1)
    said = run("simulate", "--paper", "od-moe", "--json").json
    assert said["paper"] == "od-moe" and len(said["settings"]) == len(od_moe.SETTINGS)
    (memory,) = [claim for claim in said["claims"] if claim["what"].startswith("GB")]
    assert memory["within"] == memory["ours"] == [60, 60] and memory["verdict"] == "holds"
    shown = run("simulate", "--paper", "od-moe")
    assert shown.code == 0 and "24 GB/s" in shown.err and max(map(len, shown.out.splitlines())) <= 80
    assert "how many times better" not in shown.out, "figures all of them"


def test_what_was_simulated_is_said_and_simulated_anew_where_asked(run, monkeypatch):

    monkeypatch.setattr(duoserve, "SETTINGS", duoserve.SETTINGS[::4])  # of both paces, both texts
    monkeypatch.setattr(duoserve, "NEW_TOKENS", 3)
    monkeypatch.setattr(duoserve, "usable_cores", lambda: 1)
    monkeypatch.setattr(duoserve, "_claims", lambda *_: [])
    simulated, original = [], duoserve._in_case
    monkeypatch.setattr(duoserve, "_in_case", lambda case: simulated.append(case) or original(case))
    ask = ("simulate", "--paper", "duoserve", "--json")
    first, again, anew = run(*ask), run(*ask), run(*ask, "--fresh")
    assert first.code == 0 and "before" not in first.err and first.json == again.json == anew.json
    assert "4 of 4 settings were simulated before; --fresh simulates them again" in again.err
    assert len(simulated) == 8 and "before" not in anew.err


def test_other_papers_are_refused(run):
    ran = run("simulate", "--paper", "attention", "--json")
    assert ran.code == 2 and "choose one of: smoe, hobbit, duoserve, od-moe" in ran.err


def test_an_installed_package_without_the_repository_says_what_to_do(run, tmp_path, monkeypatch):
    """Would catch an import error in the place of a message, in both commands that need `bench`."""
    monkeypatch.setattr(smoe, "__file__", str(tmp_path / "site-packages" / "smoe" / "__init__.py"))
    for command in (("simulate", "--paper", "duoserve"), ("bench", "demo", "--ablation", "smoe")):
        ran = run(*command, "--json")
        assert ran.code == 2 and "pip install -e ." in ran.json["error"]["message"] and "bench" in ran.err
    assert run("simulate", "--help").code == 0
