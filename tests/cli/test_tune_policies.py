"""`smoe tune --prefetch auto --eviction auto`, as a user meets it: who took part and who did not, and what is refused.

Would catch: a long load before a refusal that was clear; an interrupt, or a folder that cannot be written, that costs
the winner of before; a family without scores that has no tournament at all.
"""

from __future__ import annotations

import json

import pytest

from smoe.eval import tournament
from smoe.policy.registry import FITTED
from smoe.user_cache import cache_folder
from tests.toy import save_toy

SIZE = ("--memory", "2700KiB", "--context", 128)
BOTH = ("--prefetch", "auto", "--eviction", "auto")


@pytest.fixture
def text(tmp_path, monkeypatch):
    monkeypatch.setattr(tournament, "TURN_WARM", 2)
    monkeypatch.setattr(tournament, "TURN_TIMED", 3)
    path = tmp_path / "mine.txt"
    path.write_text("Once upon a time there was a small dog who liked to dig and to run. " * 3)
    return path


def kept():
    return {path.name: path.read_bytes() for path in (cache_folder() / "winners").glob("*")}


def test_winners_are_remembered_and_who_is_missing_is_told_why(run, checkpoint, text):
    ran = run("tune", checkpoint, *SIZE, *BOTH, "--text", text, "--json")
    assert ran.code == 0, ran.err
    said = ran.json
    assert said["tokens"] == 128 and said["text"] == "mine.txt"
    for kind, baseline, absent in (("prefetch", "none", "affinity"), ("eviction", "auto", "learned")):
        run_ones = {each["name"] for each in said[kind]["entrants"] if each["measured_seconds"]}
        assert baseline in run_ones and len(run_ones) == tournament.FINALISTS
        assert absent in said[kind]["refused"]
        assert said[kind]["baseline"] == baseline and said[kind]["winner"] == said[kind]["entrants"][0]["name"]
        verb = "stays" if said[kind]["winner"] == baseline else "is now"
        assert f"--{kind} auto {verb} {said[kind]['winner']} where about" in ran.err
    assert kept()
    shown = run("tune", checkpoint, *SIZE, "--eviction", "auto", "--text", text)
    assert "learned did not take part: no tuned values are stored" in shown.err
    assert "--eviction learned --cache mine.trace" in shown.err
    assert "multidimensional" in shown.out and "learned" not in shown.out


def test_those_who_have_not_learned_share_a_line(run, checkpoint, text):
    ran = run("tune", checkpoint, *SIZE, "--prefetch", "auto", "--text", text)
    (line,) = [line for line in ran.err.splitlines() if "did not take part" in line]
    names = line.partition(" did not")[0].split(", ")
    assert {*FITTED, "corrected-gates"} == set(names)
    assert f"first run smoe tune {checkpoint} --predictor {names[0]}" in line


@pytest.mark.parametrize(
    ("faster", "says", "then"),
    [
        (0.5, "lru replaces auto: more than 2% faster in 3 of 3 rounds, 100.0% at the median", "lru"),
        (0.99, "auto stays: lru was 1.0% faster at the median, but more than 2% faster in 0 of 7 rounds only", "auto"),
        (1.5, "auto stays: no other was faster", "auto"),
    ],
)
def test_auto_keeps_its_place_unless_another_is_clearly_faster(run, checkpoint, text, monkeypatch, faster, says, then):
    """All runs are what they are said to take: of LRU `faster` times what the others take."""

    def turn(model, ids, number, tick):
        return faster if model.offload.config.eviction == "lru" else 1.0 + (model.offload.config.eviction != "auto")

    def simulated(engine, trace, settings, times, by):
        return float(settings.name != "lru")

    monkeypatch.setattr(tournament, "_turn", turn)
    monkeypatch.setattr(tournament, "on_clock", simulated)
    ran = run("tune", checkpoint, *SIZE, "--eviction", "auto", "--text", text)
    assert says in ran.err
    assert f"--eviction auto {'is now' if then == 'lru' else 'stays'} {then} where about" in ran.err
    used = run("generate", checkpoint, *SIZE, "-p", "once", "--max-new-tokens", 2)
    assert ("--eviction lru is used: won the tournament on mine.txt" in used.err) == (then == "lru")
    elsewhere = run("generate", checkpoint, "--resident", "90%", "--context", 128, "-p", "once", "--max-new-tokens", 2)
    assert "--eviction auto is used: as without a tournament: the nearest result is for" in elsewhere.err


@pytest.mark.parametrize(
    ("asked", "says", "setting"),
    [
        (("--tokens", 50), "--tokens is 50; it must be at least 96 for a tournament", "tokens"),
        (("--context", 64), "--context is 64; it must be at least 96 for a tournament", "context_tokens"),
        (("--memory", "1GiB"), "every expert fits in memory, so no expert is prefetched or evicted", "resident_share"),
        (("--prefetch", "next-gate"), "eviction policies are compared without prefetch", "prefetch"),
        (("--text", "gone.txt"), "cannot read --text gone.txt", "text"),
    ],
)
def test_what_cannot_be(run, checkpoint, text, asked, says, setting):
    ran = run("tune", checkpoint, *SIZE, "--eviction", "auto", "--text", text, *asked, "--json")
    assert ran.code == 2 and says in ran.err, ran.err
    assert json.loads(ran.out)["error"]["setting"] == setting
    assert not kept()


def test_a_short_text_is_refused_before_anything_is_loaded(run, checkpoint, text, monkeypatch):
    monkeypatch.setattr("smoe.cli.session.load", lambda *_: pytest.fail("loaded"))
    text.write_text("Once upon a time")
    ran = run("tune", checkpoint, *SIZE, *BOTH, "--text", text)
    assert ran.code == 2 and "--text has 16 tokens, and at least 96 are needed for a tournament" in ran.err
    assert "--text" in ran.err


def test_an_interrupt_leaves_the_winners_of_before(run, checkpoint, text, monkeypatch):
    assert run("tune", checkpoint, *SIZE, "--eviction", "auto", "--text", text).code == 0
    before = kept()

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(tournament, "_turn", interrupted)
    ran = run("tune", checkpoint, *SIZE, *BOTH, "--text", text)
    assert ran.code == 130 and "no result was stored" in ran.err
    assert before and kept() == before
    assert run("generate", checkpoint, *SIZE, "-p", "once", "--max-new-tokens", 2).code == 0


def test_what_cannot_be_kept_is_shown(run, checkpoint, text, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    ran = run("tune", checkpoint, *SIZE, "--eviction", "auto", "--text", text)
    assert ran.code == 0 and "XDG_CACHE_HOME" in ran.err and "\nstored for" not in ran.err
    assert "multidimensional" in ran.out


def test_a_family_without_scores_has_its_tournament(run, tmp_path, text):
    folder = save_toy(tmp_path / "phimoe", "phimoe")
    ran = run("tune", folder, "--resident", "50%", "--context", 128, "--eviction", "auto", "--text", text)
    assert ran.code == 0 and "score did not take part: " in ran.err and "no rule that smoe knows" in ran.err


def test_winners_are_forgotten(run, checkpoint, text):
    """Both kinds, or the one that is named; there is nothing to measure, and no model to load."""
    assert "nothing to delete" in run("tune", checkpoint, "--forget").out
    held = run("tune", checkpoint, *SIZE, *BOTH, "--text", text, "--json").json
    share = f"{held['resident_share']:.0%}"
    ran = run("tune", checkpoint, "--eviction", "auto", "--forget")
    assert ran.code == 0 and ran.out.startswith("deleted: eviction ") and share in ran.out and "prefetch" not in ran.out
    assert kept()
    ran = run("tune", checkpoint, "--forget", "--json")
    assert [len(of) for of in ran.json["forgotten"].values()] == [1, 0] and not kept()
    for other in (("--prices",), ("--tpot", "1s"), ("--text", text)):
        refused = run("tune", checkpoint, "--forget", *other)
        assert refused.code == 2 and other[0] in refused.err, refused.err
