"""Would catch a heading or a figure that a terminal of 80 columns cuts, and a column without its unit."""

from __future__ import annotations

from typing import Any

import pytest

from bench.mechanisms.ablation import ABLATIONS, DEVICE_ABLATIONS, Line, Step, Turn
from bench.mechanisms.table import print_table
from smoe.metrics import Counters

COUNTS: dict[str, Any] = {
    "decode_uses": 1000,
    "decode_hits": 930,
    "host_computed": 70,
    "bytes_read": 5000 * 2**20,
    "routes": 1000,
    "substituted": 120,
    "prefetches": 100,
    "prefetches_used": 67,
    "wait_seconds": 130.0,
    "late_seconds": 1.0,
    "forward_seconds": 40.0,
}


def lines_of(steps: list[Step], seconds: float) -> list[Line]:
    """Every step a little slower than the one before; 10 tokens a turn."""
    counters = Counters(**COUNTS)
    return [
        Line(step, [Turn(step, 1.0, 2.0, [seconds * number] * 10, counters, 0.4, 0.0, 1.0)])
        for number, step in enumerate(steps, start=1)
    ]


@pytest.mark.parametrize("columns", ["80", "40"])
@pytest.mark.parametrize("seconds", [0.0123, 60.0])
@pytest.mark.parametrize("has_device", [False, True])
def test_a_terminal_of_80_columns_shows_all_of_it(monkeypatch, capsys, columns, seconds, has_device):
    monkeypatch.setenv("COLUMNS", columns)
    steps = (DEVICE_ABLATIONS if has_device else ABLATIONS)["smoe"]
    print_table(lines_of(steps, seconds), has_device, is_emulated=has_device)
    said = capsys.readouterr().err
    assert "…" not in said and max(len(line.rstrip()) for line in said.splitlines()) <= 80
    heads, units, *rows = said.splitlines()
    assert heads.split() == ["TPOT", "change", "hits", "CPU" if has_device else "read", "swap", "right", "wait"]
    assert units.split() == ["ms", "%", "%", "%" if has_device else "MiB", "%", "%", "ms"]
    for step, row in zip(steps, rows, strict=False):
        assert row.startswith(step.name) and len(row.removeprefix(step.name).split()) == 7


def test_figures_are_in_the_units_of_their_heads(capsys):
    print_table(lines_of(ABLATIONS["smoe"], 0.0123), has_device=False, is_emulated=False)
    said = capsys.readouterr().err.splitlines()
    assert said[2].split()[-7:] == ["12.3", "+0", "93", "500", "12", "67", "13,000"]
    assert said[3].split()[-7:-5] == ["24.6", "+100"]
    print_table(lines_of(DEVICE_ABLATIONS["smoe"], 0.0123), has_device=True, is_emulated=True)
    said = capsys.readouterr().err.splitlines()
    assert said[2].split()[-4:] == ["7", "12", "67", "13,000"]


def test_the_legend_says_every_unit(capsys):
    print_table(lines_of(ABLATIONS["smoe"], 0.0123), has_device=False, is_emulated=False)
    words = " ".join(capsys.readouterr().err.split())
    for text in ("40% of the experts resident", "TPOT: ms a token", "read: MiB a token", "wait: ms a token"):
        assert text in words
    assert all(f"{name}: %" in words for name in ("change", "hits", "swap", "right")) and "late" not in words
