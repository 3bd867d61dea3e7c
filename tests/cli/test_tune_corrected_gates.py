"""Would catch: corrections that are not remembered, or not used; idle options; a predictor nobody knows."""

from __future__ import annotations

import pytest

from smoe.load.learned_file import path_of

SIZE = ("--memory", "4MiB", "--context", 128)
ASKED = ("--predictor", "corrected-gates")


@pytest.fixture
def text(tmp_path):
    words = " ".join(f"the {n} dogs saw {n * n} cats and ran {n % 7} times around the house;" for n in range(30))
    path = tmp_path / "mine.txt"
    path.write_text(words)
    return path


def test_corrections_are_learned_remembered_and_used(run, checkpoint, text):
    missing = run("generate", checkpoint, *SIZE, "--prefetch", "corrected-gates", "-p", "once")
    assert missing.code == 2 and "run smoe tune on the model with --predictor corrected-gates" in missing.err
    ran = run("tune", checkpoint, *SIZE, *ASKED, "--text", text, "--tokens", 900, "--json")
    assert ran.code == 0, ran.err
    assert ran.json["tokens"] == 900 and ran.json["text"] == "mine.txt" and ran.json["seconds_per_layer"] > 0
    judged = ran.json["judged"]
    assert [each["distance"] for each in judged] == [1, 2, 3]
    assert judged[0].keys() == {"distance", "next_gate", "corrected", "precision", "recall"}
    assert str(path_of("corrected-gates", checkpoint)) in ran.err.replace("\n", "")
    used = run("generate", checkpoint, *SIZE, "--prefetch", "corrected-gates", "-p", "once", "--max-new-tokens", 4)
    assert (
        used.code == 0
        and "--prefetch corrected-gates is used: corrections learned on 900 tokens of mine.txt" in used.err
    )
    plain = run("generate", checkpoint, *SIZE, "--prefetch", "none", "-p", "once", "--max-new-tokens", 4)
    assert used.out == plain.out, "what is guessed is not seen"
    table = run("tune", checkpoint, *SIZE, *ASKED, "--text", text)
    assert table.code == 0 and "layers ahead" in table.out and "a prediction takes" in table.out


def test_what_it_does_not_look_at_is_refused(run, checkpoint, text):
    unknown = run("tune", checkpoint, *SIZE, "--predictor", "oracle")
    assert unknown.code == 2 and "--predictor is 'oracle'; choose one of: corrected-gates, popularity" in unknown.err
    idle = run("tune", checkpoint, *SIZE, *ASKED, "--held-out", text)
    assert (
        idle.code == 2
        and "--held-out has an effect only with --predictor expert-mlp, or another that is fitted on traces"
        in " ".join(idle.err.split())
    )
    two = run("tune", checkpoint, *SIZE, *ASKED, "--prices")
    assert two.code == 2 and "are two different measurements" in two.err
    short = run("tune", checkpoint, *SIZE, *ASKED, "--text", text, "--tokens", 100)
    assert short.code == 2 and "--text has 100 tokens, and at least 500 are needed" in short.err
