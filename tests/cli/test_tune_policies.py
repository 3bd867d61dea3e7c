"""`smoe tune --prefetch auto --eviction auto`, as a user meets it: who took part and who did not, and what is refused.

Would catch: a long load before a refusal that was clear; an interrupt, or a folder that cannot be written, that costs
the winner of before; a family without scores that has no tournament at all.
"""

from __future__ import annotations

import json

import pytest

from smoe.eval import tournament
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
        assert f"--{kind} auto is now {said[kind]['entrants'][0]['name']}" in ran.err
    assert kept()
    shown = run("tune", checkpoint, *SIZE, "--eviction", "auto", "--text", text)
    assert "learned did not take part: " in shown.err
    assert "with --eviction learned, the trace as --cache and the --memory that it is for, once" in shown.err
    assert "multidimensional" in shown.out and "learned" not in shown.out


@pytest.mark.parametrize(
    ("asked", "says", "setting"),
    [
        (("--tokens", 50), "--tokens is 50; it must be at least 96 for a tournament", "tokens"),
        (("--context", 64), "--context is 64; it must be at least 96 for a tournament", "context_tokens"),
        (("--memory", "1GiB"), "every expert fits, so nothing is prefetched and nobody evicted", "resident_share"),
        (("--prefetch", "next-gate"), "evictions are judged without prefetch", "prefetch"),
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
    assert ran.code == 2 and "the text has 16 tokens, and a tournament needs at least 96" in ran.err
    assert "--text" in ran.err


def test_an_interrupt_leaves_the_winners_of_before(run, checkpoint, text, monkeypatch):
    assert run("tune", checkpoint, *SIZE, "--eviction", "auto", "--text", text).code == 0
    before = kept()

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(tournament, "_turn", interrupted)
    ran = run("tune", checkpoint, *SIZE, *BOTH, "--text", text)
    assert ran.code == 130 and "no winner was remembered" in ran.err
    assert before and kept() == before
    assert run("generate", checkpoint, *SIZE, "-p", "once", "--max-new-tokens", 2).code == 0


def test_what_cannot_be_kept_is_shown(run, checkpoint, text, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    ran = run("tune", checkpoint, *SIZE, "--eviction", "auto", "--text", text)
    assert ran.code == 0 and "XDG_CACHE_HOME" in ran.err and "remembered for" not in ran.err
    assert "multidimensional" in ran.out


def test_a_family_without_scores_has_its_tournament(run, tmp_path, text):
    folder = save_toy(tmp_path / "phimoe", "phimoe")
    ran = run("tune", folder, "--resident", "50%", "--context", 128, "--eviction", "auto", "--text", text)
    assert ran.code == 0 and "score did not take part: " in ran.err and "no rule that smoe knows" in ran.err
