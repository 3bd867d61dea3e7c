from __future__ import annotations

from smoe.papers import duoserve


def test_claims_stand_beside_ours(run, monkeypatch):
    monkeypatch.setattr(duoserve, "NEW_TOKENS", 3)
    monkeypatch.setattr(duoserve, "PROMPT_TOKENS", 8)
    said = run("simulate", "--paper", "duoserve", "--json").json
    assert said["paper"] == "duoserve" and {claim["where"] for claim in said["claims"]} >= {"figure 5", "table 2"}
    assert all(claim["verdict"] for claim in said["claims"]) and said["settings"][0]["end_to_end_seconds"] > 0
    shown = run("simulate", "--paper", "duoserve")
    assert shown.code == 0 and "accelerate" in shown.out and "routing is synthetic" in " ".join(shown.err.split())


def test_other_papers_are_refused(run):
    ran = run("simulate", "--paper", "attention", "--json")
    assert ran.code == 2 and "choose one of: smoe, hobbit, duoserve" in ran.err
