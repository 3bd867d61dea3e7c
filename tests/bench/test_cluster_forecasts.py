"""Forecasts of clusters beside what was measured, on figures that were made up.

Would catch: a forecast that has seen the cell, a hop counted twice, a run that is made again, a file of runs gone on
with under other options, an error of the wrong sign.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import astuple
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("zmq")
pytest.importorskip("fcntl")

from bench.cluster import forecast
from bench.cluster.forecast import Runs, foretold, rows_of, table
from bench.cluster.pieces import Hops, Pieces, main_of, port_of, worker_of
from bench.cluster.speed import Cell
from bench.cluster.workers import Shape

SHAPE = Shape(Path("toy"), layers=2, experts=4, chosen=2, expert_bytes=100, row_bytes=8)
HOPS = {"one": 2e-3, "most": 9e-3}
"""A millisecond for each message more."""


def decoded(seconds: float, there: float, computing: float, between: float, **worker: float) -> dict[str, Any]:
    """What a run has found; of a token."""
    return {
        "seconds": [seconds] * 2,
        "waits": {
            "loads there": there,
            "computing there": computing,
            "between": between,
            "waiting for its own loads": 0.0,
        },
        "workers": [{"seconds_per_load": 0.0} | worker],
        "at_workers": 4.0,
        "loads": {0: 0.0, 1: 2.0},
        "logits": "the same",
        "seconds_per_own_load": 7e-3,
        "seconds_per_draft_layer": None,
    }


def found() -> dict[str, Any]:
    """Main's part of a layer is 10 ms, an expert 1, a way 3, a load 20; both experts of a layer are always the same."""
    token = {"chosen": [[0, 1], [2, 3]], "named": [[0, 1], [2, 3]], "own_is_right": True, "astray": None}
    return {
        "asked": {"tokens": 4},
        "trace": {"texts": [{"prompt": [[0], [2]], "tokens": [token] * 20}] * 2, "draft_layer_seconds": 1e-3},
        "pieces, resident": decoded(30e-3, 1e-3, 3e-3, 6e-3),
        "pieces, loading": decoded(1.0, 0.0, 0.0, 0.0, seconds_per_load=20e-3),
        "pieces, main alone": decoded(1.0, 0.0, 0.0, 0.0),
        "hops, unshaped": HOPS,
        "hops, 1gbit": {"one": 3e-3, "most": 3e-3},
        "alone": {"logits": "the same"},
    }


def test_pieces_are_taken_apart() -> None:
    runs = found()
    pieces = Pieces.of(runs["pieces, resident"], runs["pieces, loading"], runs["pieces, main alone"], 2)
    assert astuple(pieces) == pytest.approx((10e-3, 1e-3, 3e-3, 20e-3, 7e-3, 0.0))
    near, far = Hops(**HOPS), Hops(3e-3, 3e-3)
    assert near.message == pytest.approx(1e-3) and far.message == 0
    assert main_of(pieces, near, 2).message == pytest.approx(1e-3)
    assert worker_of(pieces, near, near, 4, loads=True).hop == pytest.approx(1e-3), "two messages are main's"
    assert worker_of(pieces, far, near, 4, loads=False).hop == pytest.approx(4e-3), "a millisecond more than near"
    assert worker_of(pieces, far, near, 4, loads=False).load == 0
    assert port_of("1gbit", 8).bytes_per_second == 125e6


def test_a_cell_is_foretold_from_pieces() -> None:
    """Two workers and all experts there: a layer, two messages up, the way, an expert, the second's answer."""
    cell = Cell(2, "resident-od-moe", "unshaped", 0)
    for run in foretold(SHAPE, found(), cell):
        assert len(run.token_seconds) == 12, "eight that do not count"
        assert run.token_seconds[-1] == pytest.approx(2 * (10e-3 + 2e-3 + 1e-3 + 1e-3 + 1e-3))
        assert run.loads_since(8) == (0, 0)


def test_rows_have_signs_and_medians() -> None:
    cell = Cell(2, "resident-od-moe", "unshaped", 0)
    runs = found() | {
        f"{cell}, round {n + 1}": decoded(took, 0.0, 0.0, 0.0) for n, took in enumerate((0.02, 0.06, 0.04))
    }
    (row,) = rows_of(argparse.Namespace(rounds=3), SHAPE, runs, [cell, cell._replace(workers=4)])
    assert row["measured"] == {"median": 0.04, "least": 0.02, "most": 0.06}
    assert row["foretold"] == pytest.approx(0.03) and row["error"] == pytest.approx(-0.25)
    assert row["measured_loads"] == (2.0, 0.0) and row["is_exact"]
    text = table([row])
    assert "-25%" in text and "error is 25% in the middle, 25% at most" in text and "missed" in text
    assert "met" in table([row | {"error": 0.1}])


def test_runs_are_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    made: list[str] = []

    def make(name: str) -> dict[str, str]:
        made.append(name)
        return {"is": name}

    def work(*_: Any) -> Any:
        for name in ("first", "second"):
            yield name, partial(make, name)

    monkeypatch.setattr(forecast, "_work", work)
    folder = tmp_path / "model"
    folder.mkdir()
    monkeypatch.setattr(Shape, "of", lambda _: SHAPE)
    parser = argparse.ArgumentParser()
    forecast.options_of(parser)
    line = [str(folder), "--runs", str(tmp_path / "runs.jsonl"), "--workers", "1", "--kinds", "finish"]
    forecast.run(parser.parse_args([*line, "--seconds", "-1"]))
    assert made == [] and "the same command goes on" in capsys.readouterr().err
    forecast.run(parser.parse_args(line))
    forecast.run(parser.parse_args(line))
    assert made == ["first", "second"], "nothing twice"
    kept = [json.loads(each) for each in (tmp_path / "runs.jsonl").read_text().splitlines()]
    assert [each["what"] for each in kept] == ["asked", "first", "second"]
    with pytest.raises(SystemExit, match="is of other options"):
        Runs(parser.parse_args([*line, "--load-ms", "5"]))
