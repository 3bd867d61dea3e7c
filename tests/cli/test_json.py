"""What programs read: one JSON object on stdout, errors too, with keys that are names.

Would catch a message where a program expects an object, a key with spaces, an object nobody asked for in a terminal.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cli.conftest import SIZE

TEXT = "once upon a time there was a cat " * 8
BAD: dict[str, tuple[tuple[object, ...], str, object]] = {
    "generate": (("-p", "x", "--memory", "plenty"), "memory_bytes", "plenty"),
    "plan": (("--resident", "140%"), "resident_share", "140%"),
    "bench": (("--rounds", 2), "rounds", 2),
    "eval": (("--alphas", "a,b"), "alphas", "a,b"),
    "tune": (("--tpot", "fast"), "tpot", "fast"),
    "verify": (("--eviction", "belady"), "eviction", "belady"),
    "pack": (("--dtype", "int4"), "dtype", "int4"),
    "record": (("--out", "/nowhere/x.trace"), "out", "/nowhere/x.trace"),
    "replay": (("--slots", 4), "trace", "none.trace"),
    "doctor": (("--folder", "/nowhere"), "folder", "/nowhere"),
}
"""Of every command: options, and the setting and the value that its error is about."""


@pytest.mark.parametrize("name", BAD)
def test_an_error_is_an_object_for_programs(run, checkpoint, name):
    options, setting, given = BAD[name]
    model = {"doctor": (), "replay": ("none.trace",)}.get(name, (checkpoint,))
    ran = run(name, *model, *options, "--json")
    assert ran.code == 2 and ran.json.keys() == {"error"}
    error = ran.json["error"]
    assert error["type"] in ("ConfigError", "TraceError") and len(error["message"]) > 10
    assert (error["setting"], error["given"]) == (setting, given) and error["allowed"]
    assert "`" not in error["message"] + error["allowed"], "what a shell cannot type"
    assert "Traceback" not in ran.err


@pytest.mark.parametrize("arguments", [("--no-such-option",), ("--rounds", "many"), ()])
def test_a_mistyped_line_is_an_object_too(run, checkpoint, arguments):
    ran = run("bench" if arguments else "replay", *((checkpoint, *arguments) if arguments else ()), "--json")
    assert ran.code == 2 and ran.json["error"]["type"] and ran.json["error"]["message"]


@pytest.mark.parametrize(
    ("arguments", "setting", "given"),
    [
        (("--rounds", "many"), "rounds", "many"),
        (("--context", "long"), "context_tokens", "long"),
        (("--seed=x",), "seed", "x"),
        (("replay",), "trace", None),
    ],
)
def test_what_the_parser_refuses_has_facts(run, arguments, setting, given):
    ran = run(*(() if arguments == ("replay",) else ("bench",)), *arguments, "--json")
    error = ran.json["error"]
    assert (error["setting"], error["given"]) == (setting, given) and error["allowed"]


def test_a_model_that_is_none_has_facts(run):
    error = run("plan", "./nowhere", "--json").json["error"]
    assert error["type"] == "ModelError"
    assert (error["setting"], error["given"], error["allowed"]) == (
        "model", "./nowhere", "a model folder, a GGUF file, a hub id, or 'demo'"
    )  # fmt: skip


@pytest.mark.parametrize(("asked", "setting"), [("--memory", "memory_bytes"), ("--resident", "resident_share")])
def test_a_budget_that_cannot_work_has_facts(run, checkpoint, asked, setting):
    error = run("plan", checkpoint, asked, {"--memory": "64KiB", "--resident": "1%"}[asked], "--json").json["error"]
    assert error["type"] == "BudgetError" and error["setting"] == setting
    assert error["given"] == {"--memory": 65536, "--resident": 0.01}[asked] and error["allowed"].startswith("at least")


def test_a_prompt_beyond_the_context_has_facts(run, checkpoint):
    ran = run("generate", checkpoint, "-p", "once upon a time there was", "--context", 3, "--json")
    error = ran.json["error"]
    assert error["type"] == "ContextError" and (error["setting"], error["given"]) == ("context_tokens", 3)


def test_a_number_that_is_none_is_an_object_all_the_same(run, checkpoint):
    ran = run("generate", checkpoint, "--alpha", "nan", "--json")
    assert ran.code == 2 and (ran.json["error"]["setting"], ran.json["error"]["given"]) == ("alpha", "nan")


def test_a_surprise_is_an_object_and_keeps_its_traceback(run, checkpoint, monkeypatch, capsys):
    def fail(*_: object) -> None:
        raise ZeroDivisionError("who would have thought")

    monkeypatch.setattr("smoe.report.forecast.forecast", fail)
    with pytest.raises(ZeroDivisionError):
        run("plan", checkpoint, "--json")
    value = json.loads(capsys.readouterr().out)
    assert value == {"error": {"type": "ZeroDivisionError", "message": "who would have thought"}}


def keys_of(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        yield from value
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from keys_of(part)


def test_every_key_is_a_name(run, checkpoint, quick, tmp_path):
    trace = tmp_path / "one.trace"
    beside = ("--device", "emulated", "--profile", "rtx-4060-ti", "--balance", "optimal", "--set", "dilation=1")
    asked: list[tuple[object, ...]] = [
        ("generate", checkpoint, *SIZE, "-p", "once", "--max-new-tokens", 6),
        ("generate", checkpoint, *SIZE, "-p", "once", "--max-new-tokens", 6, *beside),
        ("generate", checkpoint, *SIZE, "-p", "once", "--max-new-tokens", 6, "--alpha", 0.9),
        ("plan", checkpoint, *SIZE),
        ("bench", checkpoint, "--memory", "4MiB", "--quick"),
        ("bench", checkpoint, *SIZE, "--ablation", "smoe", "--rounds", 1, "--text", quick),
        ("eval", checkpoint, *SIZE, "--alphas", "0,0.6", "--tokens", 20, "--text", quick),
        ("tune", checkpoint, *SIZE, "--text", quick, "--tpot", "10s"),
        ("tune", checkpoint, *SIZE, "--text", quick, "--tokens", 60, "--max-perplexity-increase", "50%"),
        ("verify", checkpoint, *SIZE),
        ("record", checkpoint, *SIZE, "--out", trace, "-p", "once", "--max-new-tokens", 6),
        ("replay", trace, "--resident", "40%"),
        ("doctor", "--folder", tmp_path),
    ]
    for line in asked:
        ran = run(*line, "--json")
        assert ran.code == 0, (line, ran.err)
        bad = sorted({key for key in keys_of(ran.json) if not (key.isidentifier() and key == key.lower())})
        assert not bad, (line[0], bad)


@pytest.mark.parametrize("name", ["bench", "eval"])
def test_a_terminal_gets_the_table_alone(run, checkpoint, quick, monkeypatch, name):
    eval_options = ("--alphas", "0", "--tokens", 20, "--text", quick, "--context", 128)
    asked = (name, checkpoint, "--memory", "4MiB", *(("--quick",) if name == "bench" else eval_options))
    assert run(*asked).json["memory_budget_bytes"] == 4 << 20
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert run(*asked).out == ""
    assert run(*asked, "--json").json["memory_budget_bytes"] == 4 << 20


def test_a_row_of_the_exact_model_has_no_interval_against_itself(run, checkpoint, quick, tmp_path):
    questions = tmp_path / "questions.jsonl"
    questions.write_text('{"prompt": "once upon a", "answer": "time"}\n' * 12)
    asked = ("eval", checkpoint, *SIZE, "--alphas", "0,0.9", "--tokens", 20, "--text", quick)
    ran = run(*asked, "--questions", questions)
    exact, lossy = ran.json["prices"]
    assert exact["perplexity_change"] is None is exact["accuracy_change"]
    assert lossy["perplexity_change"].keys() == lossy["accuracy_change"].keys() == {"value", "low", "high"}
    (row,) = [line.split() for line in ran.err.splitlines() if line.split()[:1] == ["0"]]
    assert row[2] == row[6] == "-"


@pytest.mark.skipif(os.name == "nt", reason="Windows has no bytes in arguments")
def test_a_byte_that_is_no_text_is_said(run, checkpoint, monkeypatch):
    for option in ("--prompt", "--stop"):
        ran = run("generate", checkpoint, "-p", "x", option, os.fsdecode(b"caf\xe9"), "--json")
        assert ran.code == 2 and ran.json["error"]["type"] == "ConfigError"
        assert option in ran.json["error"]["message"] and "UTF-8" in ran.json["error"]["message"]
    ran = run("record", checkpoint, "--out", "x.trace", "-p", os.fsdecode(b"caf\xe9"))
    assert ran.code == 2 and "UTF-8" in ran.err
    assert sys.argv[0] == "smoe"


def test_an_error_about_a_setting_has_its_facts(run, checkpoint):
    ran = run("generate", checkpoint, "-p", "x", "--set", "io_threads=0", "--json")
    assert ran.json["error"] == ran.json["error"] | {
        "setting": "io_threads", "given": 0, "allowed": "a whole number from 1 to 64"
    }  # fmt: skip
