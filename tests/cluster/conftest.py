"""Clusters in one process: coordinator and workers are threads, the sockets are real."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("zmq")

from transformers import PreTrainedModel

from smoe.cluster.members import Member
from smoe.cluster.remote import Cluster
from smoe.cluster.stored_identity import Coordinator, Worker, accepted, invitation, new_coordinator, store_coordinator
from smoe.cluster.worker import WorkerProcess
from smoe.errors import ClusterError
from smoe.load.worker_experts import open_experts
from smoe.presets import configure
from tests.free_port import a_free_port

Start = Callable[..., list[WorkerProcess]]
GiveUpWhen = Callable[[Callable[[Cluster], Any]], None]
BY_TURNS: dict[str, Any] = {"placement": "round-robin", "prefetch": "next-gate", "eviction": "lru"}


@pytest.fixture(autouse=True)
def own_clusters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's clusters are not seen."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


@pytest.fixture
def coordinator(own_clusters: None) -> Coordinator:
    """A cluster on this machine, that nobody belongs to yet."""
    made = new_coordinator("test", f"127.0.0.1:{a_free_port()}")
    store_coordinator(made)
    return made


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as made:
            made.bind(("::1", 0))
        return True
    except OSError:
        return False


@pytest.fixture
def start(coordinator: Coordinator) -> Iterator[Start]:
    """`start(model, count, kind=WorkerProcess, slots=None, name=None, **switches)`: invited workers, each on a thread
    of its own, with 1 MiB each, or with so many slots; all called `name`, or w0, w1, ..."""
    running: list[tuple[WorkerProcess, threading.Thread]] = []
    opened: list[Any] = []

    def begin(
        model: Path,
        count: int,
        kind: type[WorkerProcess] = WorkerProcess,
        slots: int | None = None,
        name: str | None = None,
        **switches: Any,
    ) -> list[Any]:
        started = []
        for _ in range(count):
            config = configure(**({"threads": 1} | switches))
            served = open_experts(model, 1 << 20 if slots is None else None, config, slots)
            opened.append(served)
            worker = kind(member(name or f"w{len(running)}"), served)
            thread = threading.Thread(target=partial(served_or_refused, worker), daemon=True)
            thread.start()
            running.append((worker, thread))
            started.append(worker)
        return started

    yield begin
    for worker, _ in running:
        worker.end()
    for _, thread in running:
        thread.join(10)
    for served in opened:
        served.alone.close()


def served_or_refused(worker: WorkerProcess) -> None:
    """A worker that the coordinator refuses ends; a process would say why."""
    with suppress(ClusterError):
        worker.serve()


@pytest.fixture
def give_up_when(monkeypatch: pytest.MonkeyPatch) -> GiveUpWhen:
    """`give_up_when(is_over)`: the coordinator's time to wait for workers ends as soon as this is so."""
    wait = Cluster.wait

    def patched(is_over: Callable[[Cluster], Any]) -> None:
        def until_over(cluster: Cluster, workers: int, seconds: float) -> list[Member]:
            until = time.monotonic() + seconds
            while not is_over(cluster) and time.monotonic() < until:
                time.sleep(0.005)
            return wait(cluster, workers, 0.0)

        monkeypatch.setattr(Cluster, "wait", until_over)

    return patched


def member(name: str) -> Worker:
    """An invited worker of the cluster `test`."""
    from smoe.cluster.stored_identity import read_coordinator

    expecting, line = invitation(read_coordinator("test"))
    store_coordinator(expecting)
    return accepted(line, name)


def cluster_of(model: PreTrainedModel) -> Cluster:
    """The one that serves a model."""
    others = model.offload.executor.compute.others
    assert isinstance(others, Cluster)
    return others
