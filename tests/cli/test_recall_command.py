"""`smoe eval --recall` as people and programs meet it."""

from __future__ import annotations

import json
import re

import pytest

from smoe.cli.recall import RecallOptions
from smoe.errors import ConfigError
from tests.packs import pack_folder
from tests.toy import save_toy


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    folder = save_toy(tmp_path_factory.mktemp("packed"))
    pack_folder(folder, precision="int4")
    return folder


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.jsonl"
    path.write_text("".join(json.dumps({"text": f"{n} times upon a time there was a cat"}) + "\n" for n in range(3)))
    return path


def test_a_table_for_people_and_json_for_programs(run, packed, text, tmp_path):
    few = ("--text", text, "--prompts", 2, "--prompt-tokens", 12, "--tokens", 6)
    ran = run("eval", packed, "--recall", "--draft", "int4,auto", "--periods", "0,1", *few, "--plot", tmp_path / "new")
    assert ran.code == 0, ran.err
    said = ran.json
    assert [(of["precision"], of["token_period"], of["kv_period"]) for of in said["shadows"]] == [
        (precision, token, kv) for precision in ("int4", "auto") for token in (0, 1) for kv in (0, 1)
    ]
    assert all(of["recall"] == of["own_token"] == 1.0 for of in said["shadows"][4:])
    assert all(len(of["by_token"]) == 6 and len(of["by_layer"]) == 4 for of in said["shadows"] + said["predictors"])
    assert {of["name"] for of in said["predictors"]} >= {"previous token", "popularity", "gate 1 ahead"}
    assert said["prompt_tokens"] == [12, 12] and said["context_tokens"] == 18 and said["top_k"] == [4] * 4
    assert "corrected gates" in said["refused"]
    assert {path.name for path in (tmp_path / "new").iterdir()} == {"recall-by-token.png", "recall-by-periods.png"}
    words = " ".join(ran.err.split())
    assert (
        "all draft models are loaded completely and take at most int4" in words
        and "smoe tune on the model with --predictor" in words
    )
    lines = ran.err.splitlines()
    begin = next(n for n, line in enumerate(lines) if line.startswith("draft  "))
    table = [line for line in lines[begin - 1 :] if not line.startswith(str(tmp_path))]
    assert len(table) > 15 and max(map(len, table)) <= 80 and "…" not in ran.err


def test_the_model_may_be_smaller_than_its_draft(run, packed, text):
    few = ("--text", text, "--prompts", 1, "--tokens", 3, "--periods", "T1KV1,T0KV0")
    ran = run("eval", packed, "--recall", "--draft", "auto", "--resident", "40%", *few)
    assert ran.code == 0, ran.err
    assert [of["recall"] for of in ran.json["shadows"]] == [1.0, 1.0]
    residents = re.findall(r"(all|\d+ of) 32 experts (?:resident|(?:always )?fit)", ran.err)
    assert len(residents) == 2 and residents[0] == "all" and int(residents[1].split()[0]) < 16, ran.err


def test_a_missing_pack_names_the_command_that_writes_it(run, packed):
    ran = run("eval", packed, "--recall", "--tokens", 20, "--draft", "int4,int8", "--json")
    assert ran.code == 2 and f"run smoe pack --precision int8 {packed}" in " ".join(ran.err.split())
    assert ran.json["error"]["setting"] == "draft" and "budget" not in ran.err, "before anything is loaded"


def test_drafts_that_do_not_fit_are_refused(run, packed, monkeypatch):
    monkeypatch.setattr("smoe.machine.available_memory.free_device_bytes", lambda device: (300 << 20, "some RAM"))
    monkeypatch.setattr("smoe.machine.available_memory.less_margin", lambda free: 1 << 20)
    ran = run("eval", packed, "--recall", "--tokens", 20, "--draft", "int4")
    assert ran.code == 2 and "1.00 MiB are available (some RAM less a margin)" in " ".join(ran.err.split())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--recall", "--draft", "int5"), "choose one of: auto, int8"),
        (("--recall", "--periods", "T1"), "it must be numbers of tokens such as"),
        (("--recall", "--periods", "1,-2"), "it must be numbers of tokens such as"),
        (("--recall", "--prompts", 0), "--prompts is 0; it must be at least 1"),
        (("--recall", "--prompt-tokens", 0), "--prompt-tokens is 0; it must be at least 1"),
        (("--recall", "--tokens", 0), "--tokens is 0; it must be at least 1"),
        (("--recall", "--alphas", "0,0.1"), "--alphas applies to measurements"),
        (("--recall", "--most-questions", 5), "--most-questions applies to measurements"),
        (("--recall", "--out", "somewhere"), "--out applies to measurements"),
        (("--recall", "--precision", "int4"), "experts in int4; leave these settings out"),
        (("--recall", "--context", 64), "prompts and answers need 296 tokens"),
        (("--recall", "--context", 512), "--context 512 is more than the 256 positions"),
        (("--recall", "--tokens", 250), "290 tokens together: lower --tokens or --prompt-tokens"),
        (("--recall", "--tokens", 20, "--text", "missing.txt"), "cannot read"),
        (("--recall", "--plot", "/nowhere/pictures"), "the folder /nowhere does not exist; create it"),
        (("--recall", "--plot", "/proc/nowhere"), "nothing can be written in /proc"),
        (("--draft", "int4"), "--draft has an effect only with --recall"),
        (("--periods", "1"), "--periods has an effect only with --recall"),
        (("--prompt-tokens", "1"), "--prompt-tokens has an effect only with --recall"),
    ],
)
def test_what_cannot_be_is_refused_before_the_model_is_loaded(run, packed, arguments, words):
    ran = run("eval", packed, *arguments)
    assert ran.code == 2 and words in " ".join(ran.err.split()) and "budget" not in ran.err, ran.err


def test_periods_and_pairs():
    assert RecallOptions(periods="1, 0").pairs == [(1, 1), (1, 0), (0, 1), (0, 0)]
    assert RecallOptions(periods="T1KV16,t0_kv0,T1KV16").pairs == [(1, 16), (0, 0)]
    assert len(RecallOptions().pairs) == 16 and RecallOptions().precisions == ["int8", "int4"]
    assert RecallOptions(draft="int4, bfloat16,int4").precisions == ["int4", "bfloat16"]
    for periods in ("1,T1KV1", "", "1.5", "99999999"):
        with pytest.raises(ConfigError, match="`periods`"):
            _ = RecallOptions(periods=periods).pairs
