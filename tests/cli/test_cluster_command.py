"""`smoe cluster` as a user has it: real processes, killed and frozen for real.

Would catch workers that outlive `up`, a coordinator that waits for ever for a worker that was killed, a text that is
another one because of it, a port that the neighbours can reach.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("zmq")

import smoe
from smoe.cluster.stored_identity import keep_status, new_coordinator, read_coordinator, store_coordinator
from tests.forked import Forked
from tests.free_port import a_free_port
from tests.packs import pack_folder

LINE = [sys.executable, "-m", "smoe"]
SIZE = ["--memory", "2700KiB", "--context", "128", "--threads", "1"]

Up = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Of a cluster `local` of the test's own."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    found = a_free_port()
    store_coordinator(new_coordinator("local", f"127.0.0.1:{found}"))
    return found


@pytest.fixture
def up(port: int, tmp_path: Path) -> Iterator[Up]:
    started: list[subprocess.Popen[bytes]] = []

    def start(model: Path, count: int, *more: str) -> subprocess.Popen[bytes]:
        options = ["--local", str(count), "--worker-memory", "512KiB", "--threads", "1", *more]
        environment = {**os.environ, "PYTHONPATH": str(Path(smoe.__file__).parents[1])}
        log = (tmp_path / "up.log").open("wb")
        started.append(Forked([*LINE, "cluster", "up", model, *options], env=environment, stdout=log, stderr=log))
        log.close()
        return started[-1]

    yield start
    for process in started:
        children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        for child in children:
            child.send_signal(signal.SIGCONT)
        process.terminate()
        process.wait(30)
        assert not [child for child in children if child.is_running() and child.status() != "zombie"]


def workers_of(process: subprocess.Popen[bytes], count: int) -> list[psutil.Process]:
    """The worker processes, once all are there."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        found = psutil.Process(process.pid).children()
        if len(found) >= count:
            return found
        time.sleep(0.05)
    raise AssertionError("no workers came")


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
def test_workers_that_are_killed_and_frozen_change_no_word(
    run: Any, checkpoint: Path, up: Up, port: int, tmp_path: Path
) -> None:
    model = Path(shutil.copytree(checkpoint, tmp_path / "model"))
    pack_folder(model, precision="int8")
    size = ["--memory", "4200KiB", *SIZE[2:]]
    request = ["-p", "Once upon a time", "--max-new-tokens", "40", "--json"]
    alone = run("generate", model, *size, *request).json
    process = up(model, 3)
    with_cluster = ["--cluster", "local", "--preset", "od-moe"]
    waits = ["--set", "cluster_workers=3", "--set", "cluster_timeout_seconds=90"]
    whole = run("generate", model, *size, *with_cluster, *waits, *request).json
    assert whole["token_ids"] == alone["token_ids"]
    assert sum(each["experts_computed"] > 0 for each in whole["workers"]) == 3
    listening = [each.laddr for each in psutil.net_connections("tcp") if each.laddr and each.laddr.port == port]
    assert all(address.ip == "127.0.0.1" for address in listening)

    killed, frozen, _ = workers_of(process, 3)
    environment = {**os.environ, "PYTHONPATH": str(Path(smoe.__file__).parents[1])}
    line = [*LINE, "generate", str(model), *size, *with_cluster, *waits]
    line += request
    coordinator = Forked(line, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    until = time.monotonic() + 60
    while time.monotonic() < until and coordinator.poll() is None:
        said = run("cluster", "status", "--json").json
        if said["process"] == coordinator.pid and any(each["experts_computed"] > 40 for each in said["workers"]):
            break
        time.sleep(0.02)
    killed.kill()
    frozen.send_signal(signal.SIGSTOP)
    out, err = coordinator.communicate(timeout=120)
    assert coordinator.returncode == 0, err.decode()
    assert json.loads(out)["token_ids"] == alone["token_ids"]


@pytest.mark.slow
def test_a_draft_of_its_own_takes_no_memory_of_main_s(
    run: Any, checkpoint: Path, up: Up, port: int, tmp_path: Path
) -> None:
    """In 2700 KiB there is no room for one; it is killed, and started again."""
    model = Path(shutil.copytree(checkpoint, tmp_path / "model"))
    pack_folder(model, precision="int4")
    request = ["-p", "Once upon a time", "--max-new-tokens", "40", "--json"]
    alone = run("generate", model, *SIZE, *request).json
    with_cluster = ["--cluster", "local", "--preset", "cluster", "--set", "cluster_timeout_seconds=90"]
    none = run("generate", model, *SIZE, *with_cluster, *request)
    assert none.code == 2 and "draft" in none.err
    process = up(model, 1, "--draft")
    workers_of(process, 2)

    def until_followed() -> Any:
        """The coordinator goes on without a draft model that a busy machine has delayed for a second."""
        for _ in range(10):
            ran = run("generate", model, *SIZE, *with_cluster, *request)
            assert ran.json["token_ids"] == alone["token_ids"]
            if ran.json["shadow"]["tokens_followed"] > 1:
                break
        assert ran.json["shadow"]["name"] == "local-draft" and ran.json["shadow"]["tokens_followed"] > 1
        return ran

    until_followed()
    assert "draft model local-draft in int4" in run("cluster", "status").out
    (draft,) = [each for each in workers_of(process, 2) if "--draft" in each.cmdline()]
    draft.kill()
    again = until_followed()
    assert "draft model: local-draft, in int4" in again.err


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["cluster", "od-moe"])
def test_the_commands_of_a_refusal_work_as_printed(
    run: Any, checkpoint: Path, up: Up, port: int, tmp_path: Path, preset: str
) -> None:
    """As a reader would type them, and once more while the workers run: they are not started twice."""
    model = Path(shutil.copytree(checkpoint, tmp_path / "model"))
    asked = ["generate", str(model), *SIZE, "--preset", preset, "-p", "once", "--max-new-tokens", "8"]
    pack, start, again = printed(run(*asked))
    assert run(*pack[1:]).code == 0
    command, options = start[1:4], start[4 : start.index("#")]
    assert (command, options[:2]) == (["cluster", "up", str(model)], ["--local", "2"])
    up(model, 2, *options[2:])
    log = tmp_path / "up.log"
    until = time.monotonic() + 60
    while log.read_text().count(": ready") < 3:
        assert time.monotonic() < until, log.read_text()
        time.sleep(0.05)
    words = log.read_text()
    assert words.index("starting 2 workers and a draft model") < words.index("the workers wait for a coordinator at")
    ran = run(*again[1:])
    assert ran.code == 0 and ran.out.startswith(run(*asked[:-6], *asked[-4:]).out), ran.err
    assert "draft model: local-draft" in ran.err and "workers: local-" in ran.err
    assert printed(run(*asked)) == [pack, again]


def printed(refused: Any) -> list[list[str]]:
    """The commands behind a refusal, word by word, a comment and all."""
    _, _, commands = refused.err.partition("to make it work:\n")
    return [shlex.split(line) for line in commands.splitlines() if line.startswith("  smoe ")]


def test_an_invitation_is_printed_for_an_address(run: Any, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("smoe.cluster.address.check_own", lambda address: None)
    refused = run("cluster", "invite")
    assert refused.code == 2 and "--address" in refused.err
    everyone = run("cluster", "invite", "--address", "0.0.0.0")
    assert everyone.code == 2 and "--every-interface" in everyone.err
    ran = run("cluster", "invite", "--address", "192.0.2.7", "--json").json
    assert ran["invitation"].startswith("smoe://192.0.2.7:5717/home?")
    assert read_coordinator("home").expects_someone()
    shown = run("cluster", "invite")
    assert shown.code == 0 and "smoe cluster join 'smoe://192.0.2.7:5717/home?" in shown.out
    assert "open to every machine that reaches this address" in " ".join(shown.err.split())
    wide = run("cluster", "invite", "--every-interface")
    assert "tcp://*:5717, open to every machine" in " ".join(wide.err.split()) and read_coordinator("home").everywhere
    assert "smoe://192.0.2.7:5717/home?" in wide.out


def test_an_address_of_another_machine_is_refused_before_anything_changes(run: Any, port: int) -> None:
    """192.0.2.7 is nobody's (RFC 5737)."""
    refused = run("cluster", "invite", "--name", "local", "--address", "192.0.2.7")
    assert refused.code == 2 and "not an address of this machine" in refused.err and "--every-interface" in refused.err
    assert read_coordinator("local").address == f"tcp://127.0.0.1:{port}"
    assert run("cluster", "invite", "--name", "new", "--address", "192.0.2.7").code == 2
    assert run("cluster", "status", "--name", "new").code == 2, "it was not made"
    assert run("cluster", "invite", "--name", "new", "--address", "192.0.2.7", "--every-interface").code == 0


def test_a_cluster_that_moves_is_told_of(run: Any, port: int) -> None:
    store_coordinator(read_coordinator("local").with_worker("w", "k" * 40))
    stays = run("cluster", "invite", "--name", "local", "--address", f"127.0.0.1:{port}")
    assert stays.code == 0 and "moves" not in stays.err
    moved = run("cluster", "invite", "--name", "local", "--address", "127.0.0.1:5999")
    words = " ".join(moved.err.split())
    assert f"now listens at tcp://127.0.0.1:5999 instead of tcp://127.0.0.1:{port}; 1 known worker" in words


def test_refusals_name_what_was_typed(run: Any, checkpoint: Path, port: int) -> None:
    for command in (["up", str(checkpoint)], ["invite", "--address", "127.0.0.1"], ["status"], ["forget"]):
        refused = run("cluster", *command, "--name", "a/b")
        assert refused.code == 2 and "--name is 'a/b'" in refused.err and "--cluster" not in refused.err
    line = run("cluster", "invite", "--name", "local").out.split("'")[1]
    worker = run("cluster", "join", line, checkpoint, "--worker", "a b")
    assert worker.code == 2 and "--worker is 'a b'" in worker.err
    neither = run("cluster", "join", "a/b", checkpoint)
    assert neither.code == 2 and "neither an invitation" in neither.err and "--" not in neither.err
    small = run("cluster", "up", checkpoint, "--worker-memory", "1KiB")
    assert small.code == 2 and "--worker-memory" not in small.err and "hint" not in small.err


def test_a_budget_without_room_for_the_draft_says_so(run: Any, checkpoint: Path, port: int, tmp_path: Path) -> None:
    """What is said to be the least is enough, and the hint is of use."""
    model = Path(shutil.copytree(checkpoint, tmp_path / "model"))
    pack_folder(model, precision="int8")
    draft = ["--context", "128", "--threads", "1", "--prefetch", "draft-model", "--set", "draft_precision=int8"]
    refused = run("generate", model, "--memory", "1MiB", *draft, "-p", "x")
    words = " ".join(refused.err.split())
    assert refused.code == 2 and "\n  draft model  " in refused.err and "leave out the draft model" in words
    assert "without --memory and --prefetch draft-model, shows" in words
    least = run("generate", model, "--memory", "1MiB", *draft, "-p", "x", "--json").json["error"]["allowed"].split()[2]
    works = run("generate", model, "--memory", least, *draft, "-p", "x", "--max-new-tokens", "2")
    assert works.code == 0, works.err
    assert run("generate", model, "--memory", str(int(least) - 1), *draft, "-p", "x").code == 2
    preset = run("generate", model, "--memory", "1MiB", "--cluster", "local", "--preset", "od-moe", "-p", "x")
    assert "without --memory, --cluster and --preset od-moe, shows" in " ".join(preset.err.split())


def test_a_name_that_is_nobody_s_is_refused(
    run: Any, checkpoint: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(*_: object) -> Any:
        raise socket.gaierror(-2, "Name or service not known")

    run("cluster", "invite", "--address", "127.0.0.1")
    line = run("cluster", "invite").out.split("'")[1].replace("127.0.0.1", "nowhere")
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    refused = run("cluster", "join", line, checkpoint)
    assert refused.code == 2 and "'nowhere', which is a name that this machine cannot resolve" in refused.err


def test_status_of_a_cluster_that_never_ran(run: Any, port: int) -> None:
    assert run("cluster", "status", "--json").json == {
        "cluster": "local",
        "address": f"tcp://127.0.0.1:{port}",
        "is_running": False,
        "process": None,
        "known": [],
        "workers": [],
        "shadow": None,
    }
    shown = run("cluster", "status")
    assert shown.code == 0 and "no coordinator is running" in shown.out
    store_coordinator(new_coordinator("home"))
    several = run("cluster", "status")
    assert several.code == 2 and "choose one with --name: home, local" in " ".join(several.err.split())
    unknown = run("cluster", "status", "--name", "nowhere")
    assert unknown.code == 2 and "there are: home, local" in unknown.err


@pytest.mark.parametrize("columns", ["40", "80"])
def test_status_in_a_narrow_window(run: Any, port: int, monkeypatch: pytest.MonkeyPatch, columns: str) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    head = f"cluster local at tcp://127.0.0.1:{port}: no coordinator is running"
    assert run("cluster", "status").out.splitlines() == [head]
    times = dict.fromkeys(("seconds_per_load", "seconds_per_expert", "seconds_there_and_back"), 1e-3)
    worker = {"name": "w", "state": "out", "why": "", "slots": 2, "experts_computed": 7, "deadlines_missed": 0} | times
    keep_status("local", [worker], is_over=True)
    assert run("cluster", "status").out.splitlines()[0] == f"{head}; the last one had"


def test_bad_input_is_refused_at_once(run: Any, checkpoint: Path, port: int) -> None:
    small = run("cluster", "up", checkpoint, "--worker-memory", "1KiB")
    assert small.code == 2 and "needs" in small.err
    both = run("cluster", "up", checkpoint, "--worker-memory", "1MiB", "--slots", "1")
    assert both.code == 2 and "--worker-memory 1MiB and --slots 1 both set" in " ".join(both.err.split())
    none = run("cluster", "up", checkpoint, "--slots", "0")
    assert none.code == 2 and "equal to 1" in " ".join(none.err.split())
    line = run("cluster", "join", "smoe://nonsense", checkpoint)
    assert line.code == 2 and "not an invitation" in line.err
    never = run("cluster", "join", "local", checkpoint)
    assert never.code == 2 and "has not joined a cluster" in never.err
    line = ["cluster", "join", "smoe://127.0.0.1:1/x?key=k&code=c", checkpoint, "--draft"]
    for option, value in {"--slots": "2", "--worker-memory": "1MiB", "--precision": "int4"}.items():
        idle = run(*line, option, value)
        assert idle.code == 2 and f"{option} {value} applies only to" in idle.err
    nobody = run("generate", checkpoint, *SIZE, "--cluster", "local", "--set", "cluster_timeout_seconds=0.2", "-p", "x")
    assert nobody.code == 2 and "0 of 1 workers" in nobody.err
    said = " ".join(nobody.err.split())
    assert (
        f"listening for workers at tcp://127.0.0.1:{port}, open to this machine only; admitted: 0 known workers" in said
    )
