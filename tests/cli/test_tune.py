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
