"""What a run on a cluster says of its workers.

Would catch: a worker that is lost without a word, workers that did nothing and are listed as if they had, a coordinator
that keeps no experts and says how many are resident.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from smoe.cli.session import describe, division
from smoe.cli.summary import _rows
from smoe.config import EngineConfig
from smoe.policy.budget import Demand, Ledger, SlotClass, allocate
from tests.machine.test_floor import report


def said(workers: list[dict[str, Any]], **more: Any) -> str:
    ran = replace(report([0.1], bytes_per_step=1.0, disk_rate=1e9), workers=workers, **more)
    (line,) = [text for name, text in _rows(ran) if name == "workers"]
    return line


def worker(name: str, computed: int, why: str = "") -> dict[str, Any]:
    return {"name": name, "experts_computed": computed, "why": why}


def test_who_was_lost_is_named() -> None:
    at = time.mktime((2026, 1, 2, 17, 52, 3, 0, 0, -1))
    lost = [{"name": "b", "why": "sent nothing for 1 s", "at": at}]
    assert said([worker("a", 7), worker("b", 3, "sent nothing for 1 s")], lost_workers=lost) == (
        "experts computed: a 7, b 3; b was lost at 17:52:03 (sent nothing for 1 s)"
    )
    assert said([worker("a", 7), worker("b", 3)], lost_workers=lost) == (
        "experts computed: a 7, b 3; b was lost at 17:52:03 (sent nothing for 1 s) and reconnected"
    )
    assert said([worker("a", 7), worker("c", 0, "has other bits")]) == "experts computed: a 7, c 0; c: has other bits"
    assert said([]) == "no worker connected"


@pytest.mark.parametrize(
    ("all_fit", "why"),
    [
        (True, "all experts fit into the coordinator's memory"),
        (False, "the coordinator was faster for every expert"),
    ],
)
def test_workers_that_were_not_needed(all_fit: bool, why: str) -> None:
    assert said([worker("a", 0), worker("b", 0)], all_fit=all_fit) == f"not needed: {why}"


def test_the_division_names_sequences_and_what_would_leave_more_to_experts() -> None:
    ledger = allocate(1000, Demand(10, 20, 30, (SlotClass(10, 2, 200),)))
    one, four, top_k = (
        division(ledger, 512, EngineConfig(**settings))
        for settings in ({}, {"max_sequences": 4}, {"expert_cache": "top-k"})
    )
    assert "non-expert weights 10 B" in one and "KV cache 30 B for 1 sequence of 512 tokens" in one
    assert "for 4 sequences of 512 tokens" in four and "--max-sequences" in four and "--max-sequences" not in one
    assert f"expert slots {ledger.cache_slots * 10} B" in one
    assert "leaves more for experts" in one and "leaves more" not in top_k, "a choice's number of experts is fixed"


def test_a_main_that_keeps_no_experts_says_so() -> None:
    ledger: Ledger = allocate(1000, Demand(10, 10, 10, (SlotClass(10, 2, 200),), draft_bytes=100))
    assert "fit in memory (" in describe(ledger, "as asked")
    by_turns = describe(ledger, "as asked", keeps_experts=False)
    assert "no experts resident while workers are connected (room for" in by_turns and "%" not in by_turns
    assert by_turns.endswith("with a draft model of 100 B")
