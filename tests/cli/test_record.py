from __future__ import annotations

import json

import numpy as np
import pytest

from smoe.trace.file import Trace
from tests.cli.conftest import SIZE

COMMON = (*SIZE, "--max-new-tokens", 6)


def test_prompts_one_after_the_other(run, checkpoint, tmp_path):
    lines, path = tmp_path / "prompts.jsonl", tmp_path / "a.trace"
    lines.write_text('{"prompt": "in the garden"}\n{"text": "a cat"}\n')
    ran = run("record", checkpoint, *COMMON, "-p", "once", "--prompt-file", lines, "--out", path, "--json")
    assert ran.code == 0, ran.err
    said, rows = ran.json, Trace(path).rows
    assert (said["sequences"], said["steps"], said["rows"]) == (3, 18, len(rows)) and not said["was_interrupted"]
    assert said["bytes"] == path.stat().st_size
    prompt_tokens = [np.sum((rows["sequence"] == n) & (rows["phase"] == 0)) / said["layers"] for n in range(3)]
    assert prompt_tokens == [4, 13, 5]  # one token a character


def test_the_text_is_what_generate_writes(run, checkpoint, tmp_path, monkeypatch):
    """Would catch a recording that changes the answer."""
    from smoe.generation import library_batch

    heard, original = [], library_batch.continue_batch

    def listening(*args):
        heard.append(original(*args)[0].tolist())
        return heard[-1]

    monkeypatch.setattr(library_batch, "continue_batch", listening)
    asked = (*COMMON, "-p", "once upon a time")
    exact = run("generate", checkpoint, *asked, "--json").json["token_ids"]
    assert run("record", checkpoint, *asked, "--out", tmp_path).code == 0
    assert len(heard) == 1 and heard[0][-len(exact) :] == exact
    assert (tmp_path / f"{checkpoint.name}.trace").exists()


def test_prompts_together(run, checkpoint, tmp_path):
    asked = ("-p", "once", "-p", "in the garden", "-p", "a cat", "--max-sequences", 2, "--memory", "4MiB")
    said = run("record", checkpoint, *COMMON, *asked, "--out", tmp_path / "a.trace", "--json").json
    assert (said["sequences"], said["steps"]) == (3, 12)
    assert set(Trace(tmp_path / "a.trace").rows["sequence"].tolist()) == {0, 1, 2}


def test_an_empty_prompt_is_refused_before_the_weights_are_read(run, checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr("smoe.models.safetensors_folder.SafetensorsFolder.load_dense", lambda *_: 1 / 0)
    ran = run("record", checkpoint, *COMMON, "-p", "once", "-p", "", "--out", tmp_path / "a.trace")
    assert ran.code == 2 and "prompt 2 is empty" in ran.err and not (tmp_path / "a.trace").exists()


def test_a_text_is_read_token_by_token(run, checkpoint, tmp_path):
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"text": words}) + "\n" for words in ("once upon a time", "a cat", "unread")))
    ran = run("record", checkpoint, *COMMON, "--text", text, "--tokens", 19, "--out", tmp_path / "a.trace")
    assert ran.code == 0 and ran.out.strip() == str(tmp_path / "a.trace") and "19 steps" in ran.err
    rows = Trace(tmp_path / "a.trace").rows
    assert (rows["phase"] == 1).all()
    assert [len(set(rows["step"][rows["sequence"] == n].tolist())) for n in range(3)] == [16, 3, 0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--out", "/nowhere/a.trace"), "the folder /nowhere does not exist; create it, or give another"),
        (
            ("--out", "/proc/a.trace"),
            "give another",
        ),
        (("--out", __file__), "--force"),
        (("--out", "a.trace", "--text", __file__, "-p", "x"), "leave out --prompt"),
        (("--out", "a.trace", "--text", "missing.txt"), "cannot read"),
        (("--out", "a.trace"), "nothing to record"),
        (("--out", "a.trace", "-p", "x", "--tokens", 9), "--tokens has an effect only with --text"),
        (("--out", "a.trace", "--text", __file__, "--tokens", 0), "--tokens is 0; it must be at least 1"),
        (("--out", "a.trace", "-p", "x", "--max-new-tokens", 0), "at least 1"),
        (("--out", "a.trace", "-p", "x", "--eviction", "fifo"), "fifo"),
    ],
)
def test_bad_options_are_refused_before_the_model_is_loaded(run, checkpoint, arguments, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delattr("smoe.cli.session.loaded")
    ran = run("record", checkpoint, *arguments)
    assert ran.code == 2 and words in " ".join(ran.err.split()) and [*tmp_path.iterdir()] == [tmp_path / "cache"]


def test_a_prompt_that_is_too_long_is_refused_before_the_first_one_runs(run, checkpoint, tmp_path):
    ran = run("record", checkpoint, *COMMON, "-p", "x", "-p", "y" * 200, "--out", tmp_path / "a.trace")
    assert ran.code == 2 and "200 tokens" in ran.err and [*tmp_path.iterdir()] == [tmp_path / "cache"]


def test_a_document_that_is_cut_at_the_context_says_so(run, checkpoint, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("once upon a time " * 20)  # one token a character
    asked = ("--memory", "2700KiB", "--context", 64, "--out", tmp_path / "a.trace", "--text", text)
    assert "only its first 64 tokens" in run("record", checkpoint, *asked).err
    assert "cut" not in run("record", checkpoint, *asked, "--tokens", 30, "--force").err


@pytest.mark.parametrize("given", ["-p", "--text"])
def test_an_interrupt_keeps_the_steps_that_have_ended(run, checkpoint, tmp_path, monkeypatch, given):
    from smoe.runtime.execute import LayerExecutor

    original, calls = LayerExecutor.run, []

    def interrupted(self, *args):
        calls.append(args)
        if len(calls) == stop:
            raise KeyboardInterrupt
        return original(self, *args)

    stop = 0
    monkeypatch.setattr(LayerExecutor, "run", interrupted)
    (tmp_path / "text.txt").write_text("once upon a time")
    asked = (given, tmp_path / "text.txt" if given == "--text" else "once upon a time")
    whole = run("record", checkpoint, *COMMON, *asked, "--out", tmp_path / "whole.trace", "--json").json
    stop, calls[:] = len(calls) - 2, []
    ran = run("record", checkpoint, *COMMON, *asked, "--out", tmp_path / "cut.trace", "--json")
    assert ran.code == 130 and ran.json["was_interrupted"] and ran.json["steps"] == whole["steps"] - 1
    cut = Trace(tmp_path / "cut.trace").rows
    assert np.array_equal(cut, Trace(tmp_path / "whole.trace").rows[: len(cut)])
