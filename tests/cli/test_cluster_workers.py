"""The processes of `smoe cluster up`.

Would catch: a worker that the coordinator refuses and that is started over and over, workers whose keys a second `up`
takes away.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("zmq")

from smoe.cli import cluster_workers
from smoe.cli.cluster import app
from smoe.cli.cluster_workers import keep_running, line_for_coordinator, local_workers
from smoe.cli.interrupts import REFUSED, listening
from smoe.cluster.stored_identity import keep_keeper, read_coordinator
from smoe.errors import ClusterError, WorkerRefusedError


def ends(code: int) -> list[str]:
    return [sys.executable, "-c", f"raise SystemExit({code})"]


def test_who_is_refused_is_not_started_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cluster_workers, "_LEAST_RUN_SECONDS", 0.0)
    with pytest.raises(ClusterError, match="no worker is left"):
        keep_running({"home-1": ends(REFUSED), "home-2": ends(REFUSED)})
    said = " ".join(capsys.readouterr().err.split())
    for name in ("home-1", "home-2"):
        assert said.count(f"worker {name} is not started again: the coordinator refused it") == 1


def test_a_worker_that_ends_by_itself_at_once_is_not_started_again(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ClusterError, match="no worker is left"):
        keep_running({"home-1": ends(2)})
    said = capsys.readouterr().err
    assert "is not started again" in said and "; it is started again" not in said


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
def test_a_worker_that_a_signal_ends_at_once_is_started_again_once(capsys: pytest.CaptureFixture[str]) -> None:
    killed = [sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"]
    with pytest.raises(ClusterError, match="no worker is left"):
        keep_running({"home-1": killed})
    said = " ".join(capsys.readouterr().err.split())
    assert said.count("home-1 ended (exit code -9); it is started again") == 1
    assert said.count("home-1 ended at once (exit code -9) and is not started again") == 1


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
def test_an_interrupt_while_a_worker_starts_leaves_none_running(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def interrupted(line: Sequence[str]) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen(line, stdin=subprocess.DEVNULL))
        signal.raise_signal(signal.SIGINT)
        return started[-1]

    monkeypatch.setattr(cluster_workers, "_started", interrupted)
    sleeper = [sys.executable, "-c", "import time; time.sleep(60)"]
    with listening(), pytest.raises(KeyboardInterrupt):
        keep_running({"home-1": sleeper, "home-2": sleeper})
    codes = [each.poll() for each in started]
    for each in started:
        each.kill()
        each.wait()
    assert codes == [-signal.SIGTERM]


def test_a_refusal_has_an_exit_code_of_its_own(run: Any, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> None:
        raise WorkerRefusedError("main refuses worker home-1: its weights is 'a', coordinator has 'b'")

    monkeypatch.setattr("smoe.cli.cluster.be_worker", refused)
    monkeypatch.setattr("smoe.cluster.stored_identity.read_worker", lambda name: None)
    ran = run("cluster", "work", checkpoint)
    assert ran.code == REFUSED and "worker home-1: its weights" in ran.err


def test_one_process_keeps_a_cluster_s_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Any) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    first, _ = local_workers("local", 2)
    assert local_workers("local", 1)[0].keys == first.keys, "the same process may"
    parent = psutil.Process(os.getppid())
    keep_keeper("local", parent.pid, parent.create_time())
    before = read_coordinator("local")
    ran = run("cluster", "up", "demo")
    words = " ".join(ran.err.split())
    assert ran.code == 2 and f"are already running: process {parent.pid}" in words and "another --name" in words
    assert read_coordinator("local") == before, "their keys are good still"


def test_the_example_is_one() -> None:
    """What is printed, what help says, and what the documentation says."""
    page = (Path(__file__).parents[2] / "docs" / "cluster.md").read_text(encoding="utf8")
    line = line_for_coordinator("demo", "local", 2)
    assert "--preset cluster --set draft_on=cluster " in line_for_coordinator("demo", "local", 2, draft=True)
    assert f"$ {line}\n" in page and line in str(app.info.epilog)
    assert "smoe cluster up demo --local 2 --worker-memory 8MiB" in page
    assert "smoe cluster up demo --local 2 --worker-memory 8MiB" in str(app.info.epilog)
