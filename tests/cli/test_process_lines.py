"""The whole process, line by line, where the budget is RAM: in plans, in doctor and in summaries."""

from __future__ import annotations

from pathlib import Path

import pytest

from smoe.machine import measure as hardware
from smoe.units import identifier

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system does not say what it holds")

LINES = ("interpreter and libraries", "their code, once they compute", "their kernels and scratch")


def test_a_run_says_what_its_process_is_made_of(run, checkpoint):
    asked = ("generate", checkpoint, "--memory", "4MiB", "-p", "Hello", "--max-new-tokens", 4)
    value = run(*asked, "--json").json
    parts = dict(value["process"])
    assert parts.pop("whole_bytes") == sum(parts.values()) and min(parts.values()) >= 0
    assert parts.keys() == {"libraries_bytes", "budget_bytes", "scratch_bytes"}
    assert parts["budget_bytes"] <= value["peak_memory_bytes"]
    said = run(*asked).err
    for word in ("whole process", "interpreter and libraries", "budget", "kernels and scratch"):
        assert word in said


def test_a_plan_has_a_line_for_each(run, checkpoint):
    beside = run("plan", checkpoint, "--memory", "4MiB", "--json").json["beside_budget_bytes"]
    assert tuple(beside) == tuple(map(identifier, LINES)) and min(beside.values()) > 0
    said = run("plan", checkpoint, "--memory", "4MiB").out
    assert all(line in said for line in (*LINES, "whole process at most"))


def test_what_the_budget_reserves_is_not_counted_twice():
    from smoe.machine.process_memory import outside_budget_bytes

    assert outside_budget_bytes(1 << 40)[LINES[-1]] == 0


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
