"""Eight workers: four groups of as many as a token chooses take turns, or each expert goes where it is done first.

Would catch a group that is nobody's, and rows that come back to another's place once many answers are under way.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from smoe.cluster.members import Member
from smoe.policy.placement import WorkerView
from tests import oracle

WORKERS = 8
VIEW = Member.view


def as_quick_as_all(member: Member) -> WorkerView:
    return VIEW(member)._replace(load=1e-3, expert=1e-4, row=1e-5, hop=1e-4)


@pytest.mark.parametrize(
    "switches",
    [{}, {"placement": "round-robin", "prefetch": "next-gate", "eviction": "lru"}],
    ids=["finish", "by turns"],
)
def test_eight_workers_are_exact(
    switches: dict[str, Any],
    toy: Callable[..., Path],
    start: Callable[..., list[Any]],
    open_model: Callable[..., PreTrainedModel],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("smoe.cluster.members._LEAST_DEADLINE", 5.0)  # nine machines on one busy one,
    monkeypatch.setattr(Member, "view", as_quick_as_all)  # where one that was measured slow may never be asked again
    folder = toy("qwen3_moe", dtype=torch.bfloat16)
    start(folder, WORKERS)
    model = open_model(folder, "minimum", cluster="test", cluster_workers=WORKERS, **switches)
    cluster = model.offload.executor.compute.others
    cluster._here = cluster._here._replace(load=lambda: 1e9)  # workers are nearer than any disk
    theirs = oracle.greedy(oracle.reference(folder), new_tokens=2 * oracle.NEW_TOKENS)
    oracle.assert_same_steps(oracle.greedy(model, new_tokens=2 * oracle.NEW_TOKENS), theirs)
    assert sum(member.experts > 0 for member in cluster.members) == WORKERS, "all have worked"
    assert cluster.link is not None and cluster.link.under_way.rescued == 0, "and coordinator has not"
