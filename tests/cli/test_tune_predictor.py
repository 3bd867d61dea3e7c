"""`smoe tune --predictor`: fitted, remembered, used, judged; what cannot be is refused.

Would catch: a predictor that is not remembered, or for another model; held-out traces that are fitted on; idle options.
"""

from __future__ import annotations

import json

import pytest

from smoe.policy.registry import FITTED
from tests.cli.conftest import SIZE


@pytest.fixture(autouse=True)
def quickly(monkeypatch):
    monkeypatch.setattr("smoe.prediction.expert_mlp.network.__defaults__", ((32, 16),))
    monkeypatch.setattr("smoe.eval.train_expert_mlp.LEAST_EPOCHS", 2)
    monkeypatch.setattr("smoe.eval.train_expert_mlp.MOST_EPOCHS", 3)


@pytest.mark.parametrize("name", FITTED)
def test_a_predictor_is_fitted_remembered_and_used(name, run, checkpoint, traces):
    first, second = traces
    refused = run("generate", checkpoint, *SIZE, "--prefetch", name, "-p", "once")
    assert refused.code == 2 and f"with --predictor {name}" in refused.err
    ran = run("tune", checkpoint, *SIZE, "--predictor", name, "--trace", first, "--held-out", second, "--json")
    assert ran.code == 0, ran.err
    said = ran.json
    assert said["predictor"] == name and said["rates"].keys() == {"second"}
    others = {"previous-token", "popularity", "affinity", "activation-matrix", name}
    assert said["rates"]["second"].keys() == others
    assert all(0 <= rates["exact"] <= rates["at_least_one"] <= 1 for rates in said["rates"]["second"].values())
    assert (said["epochs"] > 0) == (name == "expert-mlp")
    used = run("generate", checkpoint, *SIZE, "--prefetch", name, "-p", "once", "--max-new-tokens", 2)
    assert used.code == 0, used.err


def test_the_table_has_the_paper_s_figures(run, checkpoint, traces):
    ran = run("tune", checkpoint, *SIZE, "--predictor", "affinity", "--trace", traces[0], "--held-out", traces[1])
    assert ran.code == 0, ran.err
    assert "previous-token" in ran.out and "54.2% / 90.3%" in ran.out and "all predicted / at least one" in ran.out
    assert "stored for --prefetch affinity" in ran.err
    alone = run("tune", checkpoint, *SIZE, "--predictor", "affinity", "--trace", traces[0])
    assert "give traces of other text with --held-out" in alone.err and "54.2%" not in alone.out


def test_a_text_is_recorded_first_and_tokens_count(run, checkpoint, traces, tmp_path):
    text = tmp_path / "mine.txt"
    text.write_text("Once upon a time there was a small dog who liked to dig and to run. " * 3)
    asked = ("tune", checkpoint, *SIZE, "--predictor", "popularity", "--json")
    assert run(*asked, "--text", text, "--tokens", 60).json["tokens"] == 60
    both = run(*asked, *(part for path in traces for part in ("--trace", path)), "--tokens", 30).json
    assert both["tokens"] == 60, "of each"


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (("--predictor", "next-gate", "--trace", "x.trace"), "--predictor"),
        (("--predictor", "affinity", "--tpot", "80ms"), "are two different measurements"),
        (("--predictor", "affinity", "--trace", "x.trace", "--text", "y.txt"), "both give the data to fit on"),
        (("--predictor", "affinity", "--trace", "x.trace"), "cannot read x.trace"),
    ],
)
def test_what_cannot_be(run, checkpoint, asked, says):
    ran = run("tune", checkpoint, *SIZE, *asked)
    assert ran.code == 2 and says in ran.err


def test_traces_of_another_model_and_of_few_tokens_are_refused(run, checkpoint, traces):
    ran = run("tune", "demo", "--resident", "40%", "--predictor", "affinity", "--trace", traces[0], "--json")
    assert ran.code == 2 and json.loads(ran.out)["error"]["setting"] == "trace"
    assert "differ from this model's" in ran.err
    few = run("tune", checkpoint, *SIZE, "--predictor", "affinity", "--trace", traces[0], "--tokens", 9)
    assert few.code == 2 and "--trace has 9 tokens, and at least 40 are needed" in few.err


def test_how_long_training_takes_is_said_before_and_after_its_first_pass(capsys):
    from smoe.cli.console import progress
    from smoe.cli.tune_predictor import _Course
    from smoe.policy.prediction import Epochs

    with progress("tune", "epochs") as bars:
        task = bars.add_task("training", total=45, amount="")
        course = _Course(bars, task, Epochs(15, 45))
        for epochs in (3, 4, 5):  # an interrupted one goes on
            course(epochs)
        assert bars.tasks[0].completed == 5 and bars.tasks[0].fields["skipped"] == 3
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "more, estimated from its first epoch" in line]
    assert line.startswith("training will take ")
