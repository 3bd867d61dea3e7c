"""Workers that Ray starts and keeps: exact as any others, no call of Ray between tokens, nothing secret through it.

Most of it on a stand-in for Ray; the last ones on Ray itself, where it is installed. Would catch a hop through Ray, a
worker that is started again and not let in, a secret key in Ray's object store, an open Ray that is joined unasked.
"""

from __future__ import annotations

import ast
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import PreTrainedModel

import smoe
from smoe.cli.cluster_on_ray import opened
from smoe.cluster import on_ray
from smoe.cluster.on_ray import OnRay, join_ray
from smoe.cluster.remote import Cluster
from smoe.cluster.stored_identity import (
    Coordinator,
    KeyPair,
    Worker,
    new_coordinator,
    read_coordinator,
    store_coordinator,
)
from smoe.cluster.worker import WorkerProcess
from smoe.errors import ClusterError, ConfigError
from tests import oracle
from tests.cluster.conftest import GiveUpWhen
from tests.cluster.ray_stand_in import StandIn
from tests.free_port import a_free_port
from tests.test_layering import ALL, imports

Open = Callable[..., PreTrainedModel]
BY_TURNS: dict[str, Any] = {"placement": "round-robin", "prefetch": "next-gate", "eviction": "lru"}


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    stand_in = StandIn()
    stand_in.installed(monkeypatch)
    return stand_in


class Kept:
    """Workers on Ray, and what was said of them."""

    def __init__(self, ray: StandIn, coordinator: Coordinator) -> None:
        self.said: list[str] = []
        self.workers = OnRay(ray, coordinator, self.said.append, self.said.append)

    def turns_until(self, what: Callable[[], bool]) -> None:
        until = time.monotonic() + 30
        while not what():
            assert time.monotonic() < until, self.said
            self.workers.turn(0.05)

    def start(self, model: Path, count: int | None) -> None:
        self.workers.start(count, partial(opened, str(model), 1 << 20, None, "auto"), 1)
        self.turns_until(lambda: sum("room for" in words for words in self.said) == len(self.workers.names))


@pytest.fixture
def kept(ray: StandIn, coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kept]:
    monkeypatch.setattr(on_ray, "_PAUSE_SECONDS", 0.1)
    made = Kept(ray, coordinator)
    yield made
    made.workers.close()


def cluster_of(model: PreTrainedModel) -> Cluster:
    others = model.offload.executor.compute.others
    assert isinstance(others, Cluster)
    return others


def test_no_call_of_ray_between_tokens(toy: Callable[..., Path], kept: Kept, ray: StandIn, open_model: Open) -> None:
    folder = toy("qwen3_moe", dtype=torch.bfloat16)
    kept.start(folder, 2)
    calls = ray.calls
    model = open_model(folder, "minimum", cluster="test", cluster_workers=2, **BY_TURNS)
    oracle.assert_same_steps(oracle.greedy(model), oracle.reference_steps(folder))
    assert ray.calls == calls
    worked = {member.name for member in cluster_of(model).members if member.experts}
    assert worked == {"test-ray-1", "test-ray-2"}


def test_who_has_died_is_let_in_again_with_other_keys(
    toy: Callable[..., Path], kept: Kept, ray: StandIn, open_model: Open
) -> None:
    folder = toy("qwen3_moe", dtype=torch.bfloat16)
    kept.start(folder, 2)
    model = open_model(folder, "minimum", cluster="test", cluster_workers=2, **BY_TURNS)
    before = read_coordinator("test").workers
    ray.actors[0].dies()
    kept.turns_until(lambda: sum("room for" in words for words in kept.said) == 3)
    after = read_coordinator("test").workers
    assert any("test-ray-1" in words and "died;" in words for words in kept.said)
    assert after.keys() == before.keys()
    assert after["test-ray-1"] != before["test-ray-1"] and after["test-ray-2"] == before["test-ray-2"]
    until = time.monotonic() + 20
    while time.monotonic() < until and after["test-ray-1"] not in {each.key for each in here(model)}:
        time.sleep(0.02)
    assert {each.key for each in here(model)} == set(after.values()), "both are proven"
    oracle.assert_same_steps(oracle.greedy(model), oracle.reference_steps(folder))


def here(model: PreTrainedModel) -> list[Any]:
    return [member for member in cluster_of(model).members if member.is_here]


def test_nothing_secret_goes_through_ray(toy: Callable[..., Path], kept: Kept, ray: StandIn, tmp_path: Path) -> None:
    kept.start(toy("qwen3_moe", dtype=torch.bfloat16), 2)
    secrets = [actor.one._me.keys.secret for actor in ray.actors] + [read_coordinator("test").keys.secret]
    assert len(set(secrets)) == 3
    assert ray.passed and not any(secret.encode() in each for secret in secrets for each in ray.passed)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert files and not any(secret.encode() in path.read_bytes() for secret in secrets[:2] for path in files)


def test_workers_are_spread_and_started_again_for_ever(
    toy: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, coordinator: Coordinator
) -> None:
    store_coordinator(new_coordinator("test", "192.0.2.7"))
    ray = StandIn(["10.0.0.1", "10.0.0.2"])
    ray.installed(monkeypatch)
    kept = Kept(ray, read_coordinator("test"))
    kept.start(toy("qwen3_moe", dtype=torch.bfloat16), None)
    assert [each["max_restarts"] for each in ray.asked] == [-1, -1], "one a node"
    assert [group.strategy for group in ray.groups] == ["STRICT_SPREAD"]
    kept.workers.close()
    assert ray.joined is None and not ray.groups and all(actor.is_dead for actor in ray.actors)
    assert read_coordinator("test").workers == {}, "their keys are good no longer"


@pytest.mark.parametrize(
    "opening, why",
    [(partial(opened, "nothing", 1 << 20, None, "auto"), "nothing"), (partial(int, "x"), "ValueError: invalid")],
)
def test_who_cannot_work_is_given_up(opening: Any, why: str, kept: Kept, ray: StandIn) -> None:
    kept.workers.start(1, opening, 1)
    with pytest.raises(ClusterError, match="no worker is left"):
        kept.turns_until(lambda: False)
    assert "ended at once" in kept.said[0] and why in kept.said[0]
    assert ray.actors[0].is_dead


def slowly(folder: Path) -> Any:
    time.sleep(0.5)
    return opened(str(folder), 1 << 20, None, "auto")


def test_who_dies_before_it_serves_is_asked_again(toy: Callable[..., Path], kept: Kept, ray: StandIn) -> None:
    kept.workers.start(1, partial(slowly, toy("qwen3_moe", dtype=torch.bfloat16)), 1)
    ray.actors[0].dies()
    kept.turns_until(lambda: "room for" in kept.said[-1] if kept.said else False)
    assert "Ray keeps trying" in kept.said[0] and len(kept.said) == 2


def test_a_worker_ends_that_is_ended_while_it_begins_to_serve(
    toy: Callable[..., Path], coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or whoever ends the workers would wait for it in vain."""
    me = Worker("test", "w", coordinator.address, coordinator.keys.public, KeyPair("", ""))
    actor = on_ray.Actor(me, partial(opened, str(toy("qwen3_moe", dtype=torch.bfloat16)), 1 << 20, None, "auto"), 1)
    key = actor.begin()["key"]

    class Ended(WorkerProcess):
        def __init__(self, *given: Any) -> None:
            actor.end()
            super().__init__(*given)

    monkeypatch.setattr("smoe.cluster.worker.WorkerProcess", Ended)
    serving = threading.Thread(target=actor.serve, args=(key,), daemon=True)
    serving.start()
    serving.join(20)
    assert not serving.is_alive()


def test_whom_ray_cannot_make_is_given_up(kept: Kept, ray: StandIn) -> None:
    kept.workers.start(1, partial(time.sleep, 1), 1)
    ray.actors[0].dies(is_for_ever=True)
    kept.turns_until(lambda: bool(kept.said))
    assert "ended at once (the process died)" in kept.said[0]
    assert not kept.workers.names


def test_who_is_refused_by_main_is_given_up(
    toy: Callable[..., Path], kept: Kept, open_model: Open, give_up_when: GiveUpWhen
) -> None:
    kept.start(toy("mixtral", dtype=torch.bfloat16), 1)
    give_up_when(lambda cluster: cluster.refused)
    with pytest.raises(ClusterError, match="0 of 1 workers"):
        open_model(toy("qwen3_moe", dtype=torch.bfloat16), "minimum", cluster="test")
    kept.turns_until(lambda: "its weights" in kept.said[-1])
    assert kept.workers.names == [] and read_coordinator("test").workers == {}


def test_nodes_that_could_not_reach_main_are_refused(monkeypatch: pytest.MonkeyPatch, coordinator: Coordinator) -> None:
    ray = StandIn(["10.0.0.1", "10.0.0.2"])
    ray.installed(monkeypatch)
    with pytest.raises(ClusterError, match=r"10\.0\.0\.2 could not reach the coordinator at tcp://127") as refused:
        Kept(ray, coordinator).workers.start(None, partial(opened, "demo", None, 1, "auto"), 1)
    assert refused.value.setting == "address"
    assert not ray.actors


def test_a_ray_without_cpus_is_refused(monkeypatch: pytest.MonkeyPatch, coordinator: Coordinator) -> None:
    ray = StandIn(cpus=0)
    ray.installed(monkeypatch)
    with pytest.raises(ClusterError, match="no node of the Ray cluster has a CPU"):
        Kept(ray, coordinator).workers.start(None, partial(opened, "demo", None, 1, "auto"), 1)


def test_more_workers_than_ray_has_places_for_are_refused(kept: Kept, ray: StandIn) -> None:
    with pytest.raises(ClusterError, match="no room for 5 workers"):
        kept.workers.start(5, partial(opened, "demo", None, 1, "auto"), 1)
    assert not ray.actors and not ray.groups


def test_an_open_ray_is_joined_only_where_somebody_insists(ray: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_ray, "_answers", lambda address, mode: True)
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    with pytest.raises(ClusterError, match="RAY_AUTH_MODE=token"):
        join_ray("auto", False, False)
    assert ray.calls == 0
    assert join_ray("auto", True, False) is ray
    assert ray.joined is not None and ray.joined["address"] == "auto"
    assert "RAY_AUTH_MODE" not in os.environ


def test_who_has_not_the_token_is_told(ray: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_ray, "_answers", lambda address, mode: False)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    with pytest.raises(ClusterError, match="it requires a token"):
        join_ray("auto", True, False)
    assert ray.calls == 0


def test_rays_one_thread_is_not_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    me = Worker("w", "w", "tcp://127.0.0.1:1", "k", KeyPair("", ""))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    on_ray.Actor(me, partial(opened, "demo", None, 1, "auto"), 2)
    assert os.environ["OMP_NUM_THREADS"] == "1"
    on_ray.Actor(me, partial(opened, "demo", None, 1, "auto"), None)
    assert "OMP_NUM_THREADS" not in os.environ


@pytest.mark.parametrize("address", ["local", "ray://10.0.0.1:10001"])
def test_what_is_no_cluster_of_this_machine_is_refused(address: str, ray: StandIn) -> None:
    with pytest.raises(ClusterError, match="HOST:PORT of the cluster's head"):
        join_ray(address, True, False)
    assert ray.calls == 0


def test_without_ray_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install '\.\[ray\]'"):
        join_ray("auto", False, False)


def test_one_module_knows_ray_and_loads_it_late() -> None:
    knowing = {module for module, path in ALL.items() if any(name.split(".")[0] == "ray" for name in imports(path))}
    assert knowing == {"smoe.cluster.on_ray"}
    top = ast.parse(ALL["smoe.cluster.on_ray"].read_text(encoding="utf8")).body
    late = [node for node in top if isinstance(node, (ast.Import, ast.ImportFrom))]
    assert not any("ray" in ast.unparse(node).split() or "torch" in ast.unparse(node) for node in late)


# -- on Ray itself ----------------------------------------------------------------------------------------------------


class RayItself:
    """A Ray of the test's own: a head without CPUs, and nodes of one each; all on this machine."""

    def __init__(self, mode: str, nodes: int) -> None:
        self.address = f"127.0.0.1:{a_free_port()}"
        self.folder = Path(tempfile.mkdtemp(prefix="r"))  # its sockets' names must be short
        self.environment = {
            **os.environ,
            "RAY_AUTH_MODE": mode,
            "RAY_AUTH_TOKEN": secrets.token_hex(16),
            "PYTHONPATH": str(Path(smoe.__file__).parents[1]),
        }
        self.processes: list[subprocess.Popen[bytes]] = []
        head = ["--head", "--port", self.address.rpartition(":")[2], "--num-cpus", "0", "--include-dashboard", "false"]
        self.start([*head, "--temp-dir", str(self.folder)])
        for _ in range(nodes):
            self.start_node()

    def start_node(self) -> None:
        self.start(["--address", self.address, "--num-cpus", "1"])

    def start(self, options: list[str]) -> None:
        line = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats", *options]
        line += ["--object-store-memory", "80000000"]
        log = self.folder / f"start{len(self.processes)}.log"
        with log.open("wb") as file:
            self.processes.append(subprocess.Popen(line, env=self.environment, stdout=file, stderr=file))
        until = time.monotonic() + 60
        while "Ray runtime started" not in log.read_text(encoding="utf8"):
            assert time.monotonic() < until and self.processes[-1].poll() is None, log.read_text(encoding="utf8")
            time.sleep(0.1)

    def lose_node(self) -> None:
        """The one that was started last, at once."""
        end_all([self.processes.pop()], is_lost=True)

    def end(self) -> None:
        """It and what it has started, and nothing else of Ray."""
        end_all(self.processes[::-1])
        shutil.rmtree(self.folder, ignore_errors=True)


def end_all(processes: list[subprocess.Popen[bytes]], is_lost: bool = False) -> None:
    found = [psutil.Process(each.pid) for each in processes if each.poll() is None]
    found += [child for each in found for child in each.children(recursive=True)]
    for process in [] if is_lost else processes:
        process.terminate()
    for each in found if is_lost else psutil.wait_procs(found, timeout=15)[1]:
        with suppress(psutil.NoSuchProcess):
            each.kill()
    for process in processes:
        process.wait(10)


@pytest.fixture
def ray_itself() -> Iterator[Callable[..., RayItself]]:
    pytest.importorskip("ray")
    started: list[RayItself] = []

    def start(mode: str, nodes: int) -> RayItself:
        started.append(RayItself(mode, nodes))
        return started[-1]

    yield start
    for each in started:
        each.end()


@pytest.mark.slow
def test_ray_itself_starts_workers_again(
    toy: Callable[..., Path],
    coordinator: Coordinator,
    ray_itself: Callable[..., RayItself],
    open_model: Open,
    tmp_path: Path,
) -> None:
    """One process is killed, then a whole node, in whose place another one comes."""
    folder, ray = toy("qwen3_moe", dtype=torch.bfloat16), ray_itself("token", 2)
    line = [sys.executable, "-m", "smoe", "cluster", "up", str(folder), "--name", "test", "--worker-memory", "1MiB"]
    line += ["--threads", "1", "--ray", ray.address]
    said = tmp_path / "up.log"
    with said.open("wb") as log:
        up = subprocess.Popen(line, env=ray.environment, stdout=log, stderr=log)
    try:
        first = begun(up, said, 2)
        model = open_model(folder, "minimum", cluster="test", cluster_workers=2, **BY_TURNS)

        def is_exact() -> None:
            until = time.monotonic() + 30
            while {each.key for each in here(model)} != set(read_coordinator("test").workers.values()):
                assert time.monotonic() < until, said.read_text(encoding="utf8")
                time.sleep(0.1)
            oracle.assert_same_steps(oracle.greedy(model), oracle.reference_steps(folder))
            assert len(here(model)) == 2, "both are proven"

        is_exact()
        psutil.Process(first[0]).kill()
        assert begun(up, said, 3)[2] not in first
        is_exact()
        ray.lose_node()
        oracle.assert_same_steps(oracle.greedy(model), oracle.reference_steps(folder))
        ray.start_node()
        last = begun(up, said, 4)
        is_exact()
    finally:
        up.terminate()
        up.wait(30)
    assert up.returncode == 143, "Ray would end it with 15"
    assert not [each for each in last if psutil.pid_exists(each) and psutil.Process(each).status() != "zombie"]
    assert read_coordinator("test").workers == {}


def begun(up: subprocess.Popen[bytes], said: Path, count: int) -> list[int]:
    """The workers' processes, in the order in which they have begun, once so many have."""
    until = time.monotonic() + 90
    while time.monotonic() < until and up.poll() is None:
        found = re.findall(r"process (\d+): room for \d+ experts", said.read_text(encoding="utf8"))
        if len(found) >= count:
            return [int(each) for each in found]
        time.sleep(0.1)
    raise AssertionError(said.read_text(encoding="utf8"))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["token", "disabled"])
def test_ray_itself_says_whether_it_is_open(
    mode: str, ray_itself: Callable[..., RayItself], monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = ray_itself(mode, 0)
    monkeypatch.setenv("RAY_AUTH_TOKEN", ray.environment["RAY_AUTH_TOKEN"])
    assert on_ray._answers(ray.address, "token")
    assert on_ray._answers(ray.address, "disabled") is (mode == "disabled")
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(16))
    assert on_ray._answers(ray.address, "token") is (mode == "disabled")


def test_nobody_at_an_address_is_said(coordinator: Coordinator) -> None:
    pytest.importorskip("ray")
    with pytest.raises(ClusterError, match="cannot be joined"):
        on_ray._answers(coordinator.address.removeprefix("tcp://"), "disabled")
