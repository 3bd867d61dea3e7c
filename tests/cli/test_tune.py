from __future__ import annotations

import json

import pytest

from smoe.eval import tune

COMMON = ("--memory", "2700KiB", "--context", 128)


@pytest.fixture
def text(tmp_path, monkeypatch):
    monkeypatch.setattr(tune, "_WARM_TOKENS", 4)
    monkeypatch.setattr(tune, "_TIMED_TOKENS", 6)
    path = tmp_path / "text.jsonl"
    path.write_text(json.dumps({"text": "once upon a time there was a cat " * 8}) + "\n")
    return path


def test_tune_measures_remembers_and_generate_uses_it(run, checkpoint, text):
    ran = run("tune", checkpoint, *COMMON, "--text", text, "--tpot", "10s", "--json")
    assert ran.code == 0, ran.err
    assert [alpha for alpha, _ in ran.json["points"]] == [0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6]
    assert all(seconds > 0 for _, seconds in ran.json["points"])
    assert ran.json["alpha"] == 0, "ten seconds are met without any substitution"
    used = run("generate", checkpoint, *COMMON, "--tpot", "10s", "-p", "once upon", "--max-new-tokens", 4, "--json")
    assert used.code == 0 and used.json["alpha"] == 0 and "alpha 0 should meet" in used.err


def test_what_is_not_known_or_out_of_reach_is_refused(run, checkpoint, text):
    ask = ("generate", checkpoint, *COMMON, "-p", "once", "--max-new-tokens", 2)
    unknown = run(*ask, "--tpot", "10s")
    assert unknown.code == 2 and "smoe tune" in unknown.err
    assert run("tune", checkpoint, *COMMON, "--text", text).code == 0
    fast = run(*ask, "--tpot", "1us")
    assert fast.code == 2 and "out of reach" in fast.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--tpot", "fast"), "is not a time"),
        (("--tpot", "0ms"), "is not a time"),
        (("--tpot", "10ms", "--alpha", "0.3"), "one of --tpot and --alpha"),
    ],
)
def test_bad_times_are_refused(run, checkpoint, arguments, words):
    ran = run("generate", checkpoint, *COMMON, "-p", "once", *arguments)
    assert ran.code == 2 and words in ran.err


def test_a_short_text_is_refused(run, checkpoint, tmp_path):
    path = tmp_path / "short.txt"
    path.write_text("once upon")
    ran = run("tune", checkpoint, *COMMON, "--text", path)
    assert ran.code == 2 and "at least" in ran.err
