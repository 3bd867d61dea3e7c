from __future__ import annotations

import json
import sys

import pytest

from smoe.cli.prices import print_table
from smoe.eval.paired_bootstrap import Change
from smoe.eval.price import Price
from smoe.eval.stepwise import Quality


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.jsonl"
    path.write_text(json.dumps({"text": "once upon a time there was a cat " * 8}) + "\n")
    return path


def test_eval_prices_every_threshold_and_draws_it(run, checkpoint, text, tmp_path):
    questions, picture = tmp_path / "questions.jsonl", tmp_path / "price.png"
    questions.write_text('{"prompt": "once upon a", "answer": "time"}\n' * 3)
    more = ("--text", text, "--questions", questions, "--tokens", 60, "--plot", picture)
    ran = run("eval", checkpoint, "--memory", "2700KiB", "--context", 128, "--alphas", "0,0.6", *more)
    assert ran.code == 0, ran.err
    exact, lossy = ran.json["prices"]
    assert (exact["alpha"], exact["kl_nats"], lossy["alpha"]) == (0, 0, 0.6)
    assert exact["tokens"] == lossy["tokens"] > 20 and exact["questions"] == 3
    assert lossy.keys() >= {"perplexity", "perplexity_change", "seconds_per_token", "hit_ratio", "substituted_share"}
    assert picture.stat().st_size > 10_000 and "perplexity" in ran.err


def test_the_table_fits_an_ordinary_terminal(capsys):
    """With the longest figures that can come up: what does not fit would be cut, with an ellipsis."""
    blocks = {"tokens": 1280, "block_nats": [64 * 11.0] * 20, "block_tokens": [64] * 20, "right": [True] * 20}
    quality = Quality(0.35, **blocks, kl=12.3456, median_seconds=12.3456, substituted=1.0)
    print_table([Price(quality, Change(0.5, -0.123, 12.3), Change(-0.5, -1, 1))])
    lines = capsys.readouterr().err.splitlines()
    assert max(map(len, lines)) <= 80 and "change" in lines[0] and "points" in lines[1]
    assert " ".join(lines[2].split()) == ("0.35 59874.14 -12..+1230 12.3456 100.0 100.0 -100..+100 100.0 100.0 12,346")


def test_the_table_fits_with_two_precisions(capsys):
    blocks = {"tokens": 1280, "block_nats": [64 * 2.8] * 20, "block_tokens": [64] * 20, "right": [True] * 20}
    served = {"precision": "int8", "low": "int2 above 0.8", "hit_ratio": 0.858, "low_served": 0.07}
    quality = Quality(0.0, **blocks, kl=0.0004, median_seconds=0.0136, top1_agreement=0.987, **served)
    print_table([Price(quality, Change(0.0, -0.002, 0.001), Change(0.0, -0.01, 0.01))])
    lines = capsys.readouterr().err.splitlines()
    assert max(map(len, lines)) <= 80 and " ".join(lines[2].split()).startswith("int8+int2 16.44 -0.2..+0.1 0.0004")
    assert "…" not in "".join(lines)


def test_eval_goes_on_and_says_when_it_cannot(run, checkpoint, text, tmp_path):
    common = ("eval", checkpoint, "--memory", "2700KiB", "--context", 128, "--text", text, "--out", tmp_path / "out")
    first = run(*common, "--alphas", "0", "--tokens", 40)
    again = run(*common, "--alphas", "0", "--tokens", 40)
    assert first.json == again.json
    other = run(*common, "--alphas", "0", "--tokens", 30)
    assert other.code == 2 and "another" in other.err and "--out" in other.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--alphas", "a,b"), "separated by commas"),
        (("--alphas", "2"), "from 0 (exact) to 1"),
        (("--tokens", 1), "at least 2"),
        (("--text", "missing.txt"), "cannot read"),
        (("--plot", "price.bmp"), "must end in .png"),
        (("--plot", "/nowhere/price.png"), "does not exist: create it"),
        (("--alpha", 0.3), "this command sets alpha"),
        (("--tasks", "piqa", "--questions", "q.jsonl"), "both choose the questions"),
        (("--task-folder", "mine"), "has an effect only with --tasks"),
        (("--tasks", "piqa", "--most-questions", 0), "at least 1"),
        (("--tasks", " , "), "--tasks is ' , '; it must be names of tasks"),
        (("--most-questions", -1), "--most-questions is -1; it must be at least 0"),
        (("--alphas", "0,nan"), "--alphas is '0,nan'; it must be numbers from 0 (exact) to 1"),
    ],
)
def test_bad_options_are_refused_before_the_model_is_loaded(run, checkpoint, arguments, words):
    ran = run("eval", checkpoint, *arguments)
    assert ran.code == 2 and words in " ".join(ran.err.split())


def test_results_that_could_not_be_kept_are_refused_first(run, checkpoint, tmp_path):
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", "/proc/nowhere"):
        ran = run("eval", checkpoint, "--out", out)
        assert (
            ran.code == 2 and "where no results can be stored" in " ".join(ran.err.split()) and "budget" not in ran.err
        )
    ran = run("eval", checkpoint, "--plot", tmp_path)
    assert ran.code == 2 and "must end in" in ran.err


def test_a_plot_that_could_not_be_drawn_is_refused_first(run, checkpoint, tmp_path, monkeypatch):
    """Would catch an hour of measuring that ends with a missing library."""
    monkeypatch.setattr("smoe.cli.plot_file.find_spec", lambda name: None)
    ran = run("eval", checkpoint, "--plot", tmp_path / "price.png")
    assert (
        ran.code == 2 and "a plot needs matplotlib: run pip install matplotlib" in ran.err and "budget" not in ran.err
    )


def test_tasks_without_the_harness_say_what_to_install(run, checkpoint, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "smoe.eval.harness", raising=False)
    ran = run("eval", checkpoint, "--tasks", "piqa")
    assert ran.code == 2 and "pip install lm_eval" in " ".join(ran.err.split())


def test_what_will_be_measured_is_said_before_it_begins(run):
    """Would catch a hundred questions that are added to a short text without a word."""
    asked = ("demo", "--memory", "20MiB", "--context", 128, "--alphas", "0,0.3", "--tokens", 8)
    lines = run("eval", *asked, "--most-questions", 1).err.splitlines()
    place = next(n for n, line in enumerate(lines) if line.startswith("for each alpha"))
    assert lines[place] == (
        "for each alpha (0, 0.3), the model computes 8 tokens of stories of the demo and 1 question of the demo, with "
        "some 40 tokens each; --most-questions 0 leaves the questions out"
    )
    assert place < next(n for n, line in enumerate(lines) if "perplexity" in line)


def test_questions_too_long_are_left_out_and_said(run, checkpoint, text, tmp_path):
    questions = tmp_path / "questions.jsonl"
    long = "once upon a time " * 40
    questions.write_text("".join(json.dumps({"prompt": p, "answer": "x"}) + "\n" for p in ("once", long)))
    asked = (
        "eval",
        checkpoint,
        "--memory",
        "2700KiB",
        "--context",
        64,
        "--alphas",
        "0",
        "--text",
        text,
        "--tokens",
        20,
    )
    ran = run(*asked, "--questions", questions)
    assert (
        ran.json["questions"] == 1
        and "1 of 2 questions are skipped, because they leave no room for an answer in the context of 64 tokens"
        in ran.err
    )
    questions.write_text(json.dumps({"prompt": long, "answer": "x"}) + "\n")
    refused = run(*asked, "--questions", questions)
    assert refused.code == 2 and "no question fits in the context of 64 tokens; raise --context" in refused.err


def test_a_text_without_anything_to_predict_is_refused(run, checkpoint, tmp_path):
    path = tmp_path / "short.txt"
    path.write_text("o")
    ran = run("eval", checkpoint, "--memory", "2700KiB", "--context", 128, "--text", path, "--most-questions", 0)
    assert ran.code == 2 and "needs at least 2" in ran.err


def test_an_interrupt_says_what_is_kept(run, checkpoint, text, tmp_path, monkeypatch):
    from smoe.eval import price

    measure = price.measure

    def interrupt(model, tokenizer, alpha, *more):
        if alpha >= first:
            raise KeyboardInterrupt
        return measure(model, tokenizer, alpha, *more)

    monkeypatch.setattr(price, "measure", interrupt)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    common = ("eval", checkpoint, "--memory", "2700KiB", "--context", 128, "--text", text, "--tokens", 40)
    first = 0.1
    ran = run(*common, "--out", tmp_path / "out")
    assert ran.code == 130 and f"is in {tmp_path / 'out'}; the same command continues" in " ".join(ran.err.split())
    ran = run(*common, "--json")
    (kept,) = tmp_path.glob("smoe-eval-*")
    assert (
        ran.json["error"]["type"] == "Interrupted"
        and f"--out {kept} continues from there" in ran.json["error"]["message"]
    )
    assert [entry["alpha"] for entry in json.loads((kept / "quality.json").read_text())["qualities"]] == [0]
    first = 0
    ran = run(*common)
    assert ran.code == 130 and "nothing is stored" in ran.err and list(tmp_path.glob("smoe-eval-*")) == [kept]


def test_generate_says_what_was_replaced(run, checkpoint):
    ran = run(
        "generate",
        checkpoint,
        "--memory",
        "2700KiB",
        "--context",
        128,
        "--preset",
        "smoe",
        "--alpha",
        0.9,
        "-p",
        "once upon a time",
        "--max-new-tokens",
        12,
    )
    assert ran.code == 0 and "alpha 0.9" in ran.err and "were replaced" in ran.err
    exact = run("generate", checkpoint, "--memory", "2700KiB", "--context", 128, "-p", "once", "--max-new-tokens", 2)
    assert "replaced" not in exact.err
