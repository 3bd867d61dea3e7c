from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import smoe
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
    assert used.code == 0 and used.json["alpha"] == 0
    assert "alpha 0 from the profile's T(alpha) for 10 s\n" in used.err
    asked = ("--tpot", "10s", "--preset", "smoe", "-p", "once", "--max-new-tokens", 1)
    assert "for 10 s, instead of the preset's 0.3\n" in run("generate", checkpoint, *COMMON, *asked).err


@pytest.fixture
def measured(monkeypatch):
    """Takes a formula for the seconds of (alpha, round) instead of the clock; gives what was asked: (alpha, text)."""
    asked = []

    def replace(seconds_of):
        def forced(model, ids, cache):
            asked.append((model.offload.config.alpha, ids))
            turn = (len(asked) - 1) // 7
            return ((None, seconds_of(asked[-1][0], turn)) for _ in ids)

        monkeypatch.setattr(tune, "forced", forced)
        return asked

    return replace


def test_rounds_alternate_and_the_choice_is_measured_once_more(run, checkpoint, text, measured):
    asked = measured(lambda alpha, turn: 0.1 - 0.1 * alpha + 0.001 * turn)
    ran = run("tune", checkpoint, *COMMON, "--text", text, "--tpot", "81ms", "--json")
    value = ran.json
    assert [alpha for alpha, _ in asked] == [0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6] * 3 + [value["alpha"]]
    parts = [tuple(asked[first][1]) for first in (0, 7, 14, 21)]
    assert len(set(parts)) == 4 and {len(part) for part in parts} == {10}, (
        "every round and the check on text of its own"
    )
    assert value["points"][2] == [0.2, pytest.approx(0.081)], "the median of three rounds"
    assert value["half_range_seconds"] == pytest.approx([0.001] * 7) and value["noise_seconds"] == pytest.approx(0.001)
    assert value["alpha"] == pytest.approx(0.2, abs=0.011) and not value["is_flat"] and not value["is_within_noise"]
    assert value["lowest_alpha"] < value["alpha"] < value["highest_alpha"]
    assert value["predicted_seconds"] == pytest.approx(0.081, abs=0.001)
    assert value["measured_seconds"] == pytest.approx(0.103 - 0.1 * value["alpha"]) and value["is_met"]
    assert "noise" not in ran.err


def test_the_table_has_the_spread_and_a_miss_is_said(run, checkpoint, text, measured):
    measured(lambda alpha, turn: 0.1 - 0.1 * alpha + 0.001 * turn + 0.05 * (turn == 3))
    ran = run("tune", checkpoint, *COMMON, "--text", text, "--tpot", "81ms")
    assert ran.code == 0 and ran.out.splitlines()[0].split() == ["alpha", "a", "token", "+/-"]
    assert ran.out.splitlines()[1].split() == ["0", "101", "ms", "1", "ms"]
    assert "misses 81 ms a token by more than 10 %: predicted 8" in ran.out and ", measured 13" in ran.out


def test_a_budget_within_the_noise_and_a_flat_line_are_said(run, checkpoint, text, measured):
    asked_for = measured(lambda alpha, turn: 0.1 + (0.01 if (turn + round(10 * alpha)) % 2 else 0.0) - 0.001 * alpha)
    asked = ("tune", checkpoint, *COMMON, "--text", text, "--json")
    ran = run(*asked, "--tpot", "105ms")
    assert ran.json["is_flat"] and "alpha changes nothing here: from 0 to 0.6" in ran.err
    assert ran.json["is_within_noise"] and ran.json["highest_alpha"] is None
    assert "105 ms a token is within the noise" in ran.err and "or none at all" in ran.err
    asked_for.clear()
    alone = run(*asked)
    assert alone.json["is_flat"] and alone.json["alpha"] is None is alone.json["measured_seconds"]
    assert ran.json.keys() == alone.json.keys()


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


@pytest.mark.parametrize("other", [("--alpha", "0.3"), ("--alpha", "0.3", "--preset", "smoe")])
def test_two_ways_to_choose_alpha_are_refused_at_once(other):
    """In a process of its own, where nothing has been imported yet; no model of this name exists."""
    code = (
        "import sys, smoe.cli\n"
        "try: smoe.cli.main()\n"
        "finally: print({'torch', 'transformers', 'numpy'} & set(sys.modules))"
    )
    line = [sys.executable, "-c", code, "generate", "./nowhere", "-p", "x", "--tpot", "40ms", *other]
    environment = {**os.environ, "PYTHONPATH": str(Path(smoe.__file__).parents[1])}
    done = subprocess.run(line, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "set()\n")
    assert "--tpot chooses alpha; give one of --tpot and --alpha" in done.stderr


def test_a_short_text_is_refused(run, checkpoint, tmp_path):
    path = tmp_path / "short.txt"
    path.write_text("once upon")
    ran = run("tune", checkpoint, *COMMON, "--text", path)
    assert ran.code == 2 and "at least" in ran.err
