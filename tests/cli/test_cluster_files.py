"""A model's files reach a worker, as a user has it done. Would catch a worker that never becomes one, a sender that
waits for ever, options that contradict each other and are taken.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("zmq")

import smoe
from smoe.cluster.identity import invitation, new_coordinator, read_coordinator, read_worker, store_coordinator
from tests import forked
from tests.forked import Forked
from tests.free_port import a_free_port

LINE = [sys.executable, "-m", "smoe"]
SIZE = ["--memory", "2700KiB", "--context", "128", "--threads", "1"]


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A cluster `local` of the test's own; an invitation's line."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    coordinator, line = invitation(new_coordinator("local", f"127.0.0.1:{a_free_port()}"))
    store_coordinator(coordinator)
    return line


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
def test_a_machine_without_the_model_becomes_a_worker(run: Any, checkpoint: Path, cluster: str, tmp_path: Path) -> None:
    request = ["-p", "Once upon a time", "--max-new-tokens", "20", "--json"]
    alone = run("generate", checkpoint, *SIZE, *request).json
    environment = {**os.environ, "PYTHONPATH": str(Path(smoe.__file__).parents[1])}
    folder, log = tmp_path / "fetched", tmp_path / "join.log"
    options = ["--fetch", str(folder), "--worker", "shelf", "--worker-memory", "512KiB", "--threads", "1"]
    with log.open("wb") as said:
        joining = Forked(
            [*LINE, "cluster", "join", cluster, *options, "--rate", "100MiB/s"],
            env=environment,
            stdout=said,
            stderr=said,
        )
    try:
        line = [*LINE, "cluster", "send", checkpoint, "--name", "local"]
        sent = forked.run(line, env=environment, text=True, timeout=120)
        assert sent.returncode == 0 and "every worker of the cluster has all files" in sent.stderr, sent.stderr
        names = {"model.safetensors", "config.json"}
        assert {path.name for path in folder.iterdir()} == names
        assert all((folder / name).read_bytes() == (checkpoint / name).read_bytes() for name in names)
        waits = ["--set", "cluster_workers=1", "--set", "cluster_timeout_seconds=90"]
        turns = ["--set", "placement=round-robin", "--prefetch", "next-gate", "--eviction", "lru"]
        whole = run("generate", checkpoint, *SIZE, "--cluster", "local", *turns, *waits, *request).json
        assert whole["token_ids"] == alone["token_ids"]
        assert [each["experts_computed"] > 0 for each in whole["workers"]] == [True]
        assert set(read_coordinator("local").workers) == {"shelf"}
        assert read_worker("local").code is None
    finally:
        joining.send_signal(signal.SIGTERM)
        joining.wait(30)
    assert "worker shelf has ended" in log.read_text()


def test_bad_input_is_refused_at_once(run: Any, checkpoint: Path, cluster: str, tmp_path: Path) -> None:
    both = run("cluster", "join", cluster, checkpoint, "--fetch", tmp_path / "f")
    assert both.code == 2 and "downloads the coordinator's model" in both.err
    alone = run("cluster", "join", cluster, checkpoint, "--rate", "1MiB/s")
    assert alone.code == 2 and "--rate has an effect only with --fetch" in alone.err
    for rate, why in (("fast", "is not a size"), ("0", "is nothing"), ("20/s", "has no unit")):
        wrong = run("cluster", "join", cluster, "--fetch", tmp_path / "f", "--rate", rate)
        assert wrong.code == 2 and why in wrong.err
    file = run("cluster", "join", cluster, "--fetch", checkpoint / "config.json")
    assert file.code == 2 and "must be a folder" in file.err
    nobody = run("cluster", "send", checkpoint, "--name", "nowhere")
    assert nobody.code == 2 and "there are: local" in nobody.err
    unpacked = run("cluster", "send", checkpoint, "--name", "local", "--precision", "int4")
    assert unpacked.code == 2 and "int4" in unpacked.err
    assert not (tmp_path / "f").exists()
