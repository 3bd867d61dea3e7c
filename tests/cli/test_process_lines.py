"""The whole process, line by line, where the budget is RAM: in plans, in doctor and in summaries."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from smoe.errors import ConfigError
from smoe.load.tokenizer import load_tokenizer
from smoe.machine import measure as hardware
from smoe.units import identifier
from tests.cli.conftest import Run

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system does not say what it holds")

LINES = ("interpreter and libraries", "library code loaded later", "library scratch memory")


def test_a_run_says_what_its_process_is_made_of(run, checkpoint):
    asked = ("generate", checkpoint, "--memory", "4MiB", "-p", "Hello", "--max-new-tokens", 4)
    value = run(*asked, "--json").json
    parts = dict(value["process"])
    assert parts.pop("whole_bytes") == sum(parts.values()) and min(parts.values()) >= 0
    assert parts.keys() == {"libraries_bytes", "budget_bytes", "scratch_bytes"}
    assert parts["budget_bytes"] <= value["peak_memory_bytes"]
    said = run(*asked).err
    for word in ("whole process", "of the budget", "outside the budget", LINES[0], LINES[2]):
        assert word in said


def test_a_plan_has_a_line_for_each(run, checkpoint):
    beside = run("plan", checkpoint, "--memory", "4MiB", "--json").json["beside_budget_bytes"]
    assert tuple(beside) == tuple(map(identifier, (LINES[0], "tokenizer", *LINES[1:])))
    assert all(beside[identifier(line)] > 0 for line in LINES)
    said = run("plan", checkpoint, "--memory", "4MiB").out
    assert all(line in said for line in (*LINES, "outside the budget at most", "whole process at most"))


def test_what_the_budget_reserves_is_not_counted_twice():
    from smoe.machine.process_memory import outside_budget_bytes

    assert outside_budget_bytes(1 << 40)[LINES[-1]] == 0


def test_a_plan_without_libraries_counts_the_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is one of the libraries where they are measured, as commands load it first. Would catch 50 MiB that a real
    vocabulary takes from nowhere."""
    from smoe.machine import process_memory

    assert process_memory.outside_budget_bytes(0, vocabulary=152_000)["tokenizer"] == 0
    monkeypatch.delitem(sys.modules, "torch")
    assert 40 << 20 < process_memory.outside_budget_bytes(0, vocabulary=152_000)["tokenizer"] < 60 << 20


@pytest.mark.parametrize("words", [("generate", "-p", "Hello"), ("serve", "--port", "0"), ("chat",)])
def test_the_tokenizer_is_built_before_the_budget_is_divided(
    words: tuple[str, ...], run: Run, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Would catch one that is built while experts fill the budget: 230 MiB for a moment, for 152,000 tokens."""
    order = list[str]()
    build = load_tokenizer

    def tokenizer(*arguments: Any) -> Any:
        order.append("tokenizer")
        return build(*arguments)

    def divide(*arguments: Any) -> Any:
        order.append("budget")
        raise ConfigError("far enough")

    monkeypatch.setattr("smoe.cli.session.load_tokenizer", tokenizer)
    monkeypatch.setattr("smoe.load.pretrained.divide", divide)
    assert "far enough" in run(words[0], checkpoint, *words[1:], "--memory", "16MiB").err
    assert order == ["tokenizer", "budget"]


def test_what_takes_nothing_is_no_line(run, checkpoint, monkeypatch):
    """Of a large model the budget reserves all scratch; programs still find the entry."""
    monkeypatch.setattr("smoe.machine.process_memory.LIBRARY_SCRATCH_BYTES", 0)
    said = run("plan", checkpoint, "--memory", "4MiB").out
    assert LINES[-2] in said and LINES[-1] not in said
    beside = run("plan", checkpoint, "--memory", "4MiB", "--json").json["beside_budget_bytes"]
    assert beside[identifier(LINES[-1])] == 0


def test_doctor_measures_them(run, tmp_path, monkeypatch):
    monkeypatch.setattr(hardware, "measure_disk", lambda *args, **named: (0.3e9, False))
    monkeypatch.setattr(hardware, "measure_experts", lambda *args, **named: 4e9)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    said = run("doctor", "--folder", tmp_path).out
    assert all(line in said for line in ("outside the budget", *LINES))
