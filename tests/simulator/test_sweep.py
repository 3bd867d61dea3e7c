"""Simulations beside each other: in order, all of them, and the first error ends them.

Would catch: results in the order in which they end, a setting that is left out, an error that is swallowed.
"""

from __future__ import annotations

import math

import pytest

from smoe.simulator.sweep import sweep


@pytest.mark.parametrize("cores", [1, 3])
def test_every_setting_in_its_place(cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("smoe.simulator.sweep.os.cpu_count", lambda: cores)
    ticks: list[int] = []
    assert sweep(math.factorial, [5, 3, 0, 4], ticks.append) == [120, 6, 1, 24]
    assert ticks == [1, 1, 1, 1]


@pytest.mark.parametrize("cores", [1, 2])
def test_an_error_ends_it(cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("smoe.simulator.sweep.os.cpu_count", lambda: cores)
    ticks: list[int] = []
    with pytest.raises(ValueError, match="factorial"):
        sweep(math.factorial, [2, -1, 3], ticks.append)
    assert sum(ticks) == 1
