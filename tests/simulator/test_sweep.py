"""Simulations beside each other: in order, all of them, and the first error ends them.

Would catch: results in the order in which they end, a setting that is left out, an error that is swallowed; results
that are made again though they were kept, or that an interrupt takes along.
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


class _Kept:
    def __init__(self, **found: int) -> None:
        self.found: dict[object, int] = {int(name[1:]): result for name, result in found.items()}

    def find(self, setting: object) -> int | None:
        return self.found.get(setting)

    def keep(self, setting: object, result: int) -> None:
        self.found[setting] = result


@pytest.mark.parametrize("cores", [1, 2])
def test_what_was_kept_is_not_made_again(cores: int) -> None:
    """A result that nobody would compute comes from where it was kept; all are kept in the end."""
    kept, ticks = _Kept(_3=7), list[int]()
    assert sweep(math.factorial, [5, 3, 0, 4], ticks.append, cores, kept) == [120, 7, 1, 24]
    assert ticks == [1, 1, 1, 1] and kept.found == {5: 120, 3: 7, 0: 1, 4: 24}
    assert sweep(_refuse, [5, 3, 0, 4], ticks.append, cores, kept) == [120, 7, 1, 24]


@pytest.mark.parametrize("cores", [1, 2])
def test_an_interrupt_leaves_what_is_done(cores: int) -> None:
    kept, done = _Kept(), list[int]()

    def tick(count: int) -> None:
        done.append(count)
        if len(done) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sweep(math.factorial, [5, 3, 0, 4, 6, 7], tick, cores, kept)
    assert {5: 120, 3: 6}.items() <= kept.found.items()
    assert cores > 1 or len(kept.found) == 2


def _refuse(setting: int) -> int:
    raise AssertionError(f"{setting} was simulated again")
