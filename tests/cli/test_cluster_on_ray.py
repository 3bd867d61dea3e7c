"""`smoe cluster up --ray`, on a stand-in for Ray. Would catch options that are taken and forgotten, workers that go on
after Ctrl-C, a cluster that listens where nobody said.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("zmq")

from smoe.cli.cluster_on_ray import token_file
from smoe.cluster import on_ray
from smoe.cluster.stored_identity import read_coordinator
from tests.cluster.ray_stand_in import StandIn


@pytest.fixture(autouse=True)
def own_clusters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's clusters are not seen."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


@pytest.mark.parametrize(
    "options, words",
    [
        (["--workers", "2"], "--workers has an effect only with --ray"),
        (["--address", "192.0.2.7"], "--address has an effect only with --ray"),
        (["--allow-open-ray"], "--allow-open-ray has an effect only with --ray"),
        (["--ray", "auto", "--local", "2"], "give the number of workers with --workers"),
        (["--ray", "auto"], "pip install '.[ray]'"),
    ],
)
def test_what_does_not_go_together_is_refused(
    options: list[str], words: str, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    refused = run("cluster", "up", "demo", *options)
    assert refused.code == 2 and words in refused.err


def test_workers_end_with_the_command(run: Any, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = StandIn(["10.0.0.1", "10.0.0.2"])
    ray.installed(monkeypatch)
    monkeypatch.setattr(on_ray, "_answers", lambda address, mode: mode == "token")
    monkeypatch.setenv("RAY_AUTH_MODE", "token")

    def interrupted(*_: Any) -> None:
        assert len(ray.actors) == 2 and not any(actor.is_dead for actor in ray.actors)
        raise KeyboardInterrupt

    monkeypatch.setattr(on_ray.OnRay, "turn", interrupted)
    given = ["--ray", "10.0.0.1:6379", "--worker-memory", "512KiB", "--threads", "1"]
    near = run("cluster", "up", checkpoint, *given)
    assert near.code == 2 and "--address" in near.err
    monkeypatch.setattr("smoe.cluster.address.check_own", lambda address: None)
    ran = run("cluster", "up", checkpoint, *given, "--address", "192.0.2.7")
    assert ran.code == 130
    assert "--cluster local --set cluster_workers=2" in ran.err
    assert read_coordinator("local").address == "tcp://192.0.2.7:5717"
    assert all(actor.is_dead for actor in ray.actors) and ray.joined is None


@pytest.mark.skipif(os.name == "nt", reason="POSIX modes")
def test_a_token_that_others_may_read_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))
    assert token_file() is None
    (tmp_path / "token").write_text("secret", encoding="utf8")
    (tmp_path / "token").chmod(0o640)
    assert token_file() == tmp_path / "token"
    (tmp_path / "token").chmod(0o600)
    assert token_file() is None
    monkeypatch.setenv("RAY_AUTH_TOKEN", "another")
    (tmp_path / "token").chmod(0o644)
    assert token_file() is None, "it is not used"
