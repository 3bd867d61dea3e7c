"""How long a load is thought to take. Would catch a slow disk that is taken for a fast one until many loads have been
waited for, which then go nowhere else: to no worker of a cluster, to no other answer.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from smoe.runtime.answer_costs import FIRST_BYTES_PER_SECOND, LoadRate


def transfers(nbytes: int, seconds: float) -> Any:
    return SimpleNamespace(bytes_read=nbytes, busy_seconds=seconds)


def test_what_was_read_before_says_it_first() -> None:
    moved = transfers(1000, 2.0)
    rate = LoadRate(moved, None)
    assert rate.seconds_per_byte() == pytest.approx(0.002)
    moved.bytes_read, moved.busy_seconds = 2000, 3.0
    assert rate.seconds_per_byte() == pytest.approx(0.9 * 0.002 + 0.1 * 0.001), "then a decaying mean"
    moved.bytes_read, moved.busy_seconds = 0, 0.0
    assert rate.seconds_per_byte() == pytest.approx(0.9 * 0.002 + 0.1 * 0.001), "counted anew, and nothing read since"


def test_before_anything_was_read_a_disk_is_taken_for_a_usual_one() -> None:
    assert LoadRate(transfers(0, 0.0), None).seconds_per_byte() == 1 / FIRST_BYTES_PER_SECOND


def test_beside_a_link_only_its_copies_count() -> None:
    link: Any = SimpleNamespace(measured=lambda: iter([(1.0, 10)]))
    usual = 1 / FIRST_BYTES_PER_SECOND
    assert LoadRate(transfers(1000, 2.0), link).seconds_per_byte() == pytest.approx(0.9 * usual + 0.1 * 0.1)
