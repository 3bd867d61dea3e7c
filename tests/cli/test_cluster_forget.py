"""`smoe cluster forget`: what it says is gone is gone, and nothing else is.

Would catch: keys of another cluster deleted, a worker that is still let in, a cluster forgotten while it runs.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("zmq")

from smoe.cluster.running import become_keeper, keeper_process
from smoe.cluster.stored_identity import (
    KeyPair,
    Worker,
    clusters,
    clusters_folder,
    joined,
    keep_keeper,
    keep_status,
    keep_worker,
    new_coordinator,
    read_coordinator,
    store_coordinator,
)
from smoe.errors import ClusterError


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster with two workers of this machine and one elsewhere; another one; and one that was joined."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    coordinator = new_coordinator("home")
    for name in ("home-1", "home-2", "far"):
        me = Worker(name, name, coordinator.address, coordinator.keys.public, KeyPair.new())
        coordinator = coordinator.with_worker(name, me.keys.public)
        if name != "far":
            keep_worker(me)
    store_coordinator(coordinator)
    keep_status("home", [], is_over=True)
    store_coordinator(new_coordinator("other"))
    keep_worker(Worker("work", "desk", "tcp://192.0.2.7:5717", "k" * 40, KeyPair.new()))


def test_a_worker_is_let_in_no_longer(run: Any) -> None:
    ran = run("cluster", "forget", "--name", "home", "--worker", "far")
    assert ran.out.splitlines() == ["removed worker far of the cluster home: it is no longer admitted"]
    assert sorted(read_coordinator("home").workers) == ["home-1", "home-2"] and joined() == ["home-1", "home-2", "work"]
    assert "its keys on this machine" in run("cluster", "forget", "--name", "home", "--worker", "home-1").out
    assert sorted(read_coordinator("home").workers) == ["home-2"] and joined() == ["home-2", "work"]


def test_a_cluster_goes_with_its_workers_here(run: Any) -> None:
    said = run("cluster", "forget", "--name", "home", "--json").json["removed"]
    assert len(said) == 3 and "far, home-1, home-2" in said[0]
    assert clusters() == ["other"] and joined() == ["work"]
    assert sorted(path.name for path in clusters_folder().iterdir()) == ["other", "work"]
    assert "worker desk of the cluster work at tcp://192.0.2.7:5717" in run("cluster", "forget", "--name", "work").out
    assert joined() == []


def test_what_is_not_there_or_in_use_stays(run: Any) -> None:
    nowhere = run("cluster", "forget", "--name", "nowhere")
    assert nowhere.code == 2 and "there are: home, other, work" in " ".join(nowhere.err.split())
    nobody = run("cluster", "forget", "--name", "home", "--worker", "x")
    assert nobody.code == 2 and "has no worker 'x'; there are: far, home-1, home-2" in " ".join(nobody.err.split())
    keep_status("home", [])
    busy = run("cluster", "forget", "--name", "home")
    assert (
        busy.code == 2 and f"process {os.getpid()} is its coordinator" in busy.err and clusters() == ["home", "other"]
    )
    assert "admits it until that process ends" in run("cluster", "forget", "--name", "home", "--worker", "far").out


def test_who_keeps_workers_running_is_known(run: Any) -> None:
    parent = psutil.Process(os.getppid())
    assert keeper_process("home") is None
    keep_keeper("home", parent.pid, parent.create_time() - 1e4)
    assert keeper_process("home") is None, "another process had that number"
    keep_keeper("home", parent.pid, parent.create_time())
    with pytest.raises(ClusterError, match=f"are already running: process {parent.pid}"):
        become_keeper("home")
    busy = run("cluster", "forget", "--name", "home")
    assert busy.code == 2 and "supervises its workers" in busy.err
