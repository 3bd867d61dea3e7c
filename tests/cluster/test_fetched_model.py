"""A worker that had nothing computes for the coordinator that its files came from. Would catch a file too few, and
experts that wait for files.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from smoe.cluster.fetching import Fetcher
from smoe.cluster.remote import Cluster
from smoe.cluster.worker import WorkerProcess
from smoe.load.worker_experts import open_experts
from smoe.presets import configure
from tests import oracle
from tests.cluster.conftest import member
from tests.cluster.test_served import BY_TURNS


def test_files_come_while_others_compute(
    toy: Callable[..., Path],
    start: Callable[..., list[Any]],
    open_model: Callable[..., PreTrainedModel],
    tmp_path: Path,
) -> None:
    folder = toy("qwen3_moe", dtype=torch.bfloat16)
    start(folder, 1)
    model = open_model(folder, "minimum", cluster="test", cluster_workers=1, **BY_TURNS)
    cluster = model.offload.executor.compute.others
    assert isinstance(cluster, Cluster)
    fetcher = Fetcher(member("late"), tmp_path / "late", "auto")
    fetching = threading.Thread(target=fetcher.fetch, daemon=True)
    fetching.start()
    alone = oracle.greedy(oracle.reference(folder), new_tokens=8)
    oracle.assert_same_steps(oracle.greedy(model, new_tokens=8), alone)
    fetching.join(30)
    assert fetcher.is_whole
    assert [each.name for each in cluster.members] == ["w0"], "nobody plans with who fetches"
    assert all(path.read_bytes() == (folder / path.name).read_bytes() for path in (tmp_path / "late").iterdir())

    served = open_experts(tmp_path / "late", 1 << 20, configure(threads=1))
    worker = WorkerProcess(fetcher.me, served)
    serving = threading.Thread(target=worker.serve, daemon=True)
    serving.start()
    assert len(cluster.wait(2, 30)) == 2
    oracle.assert_same_steps(oracle.greedy(model, new_tokens=8), alone)
    assert all(each.experts for each in cluster.members)
    worker.end()
    serving.join(10)
    served.alone.close()
