"""Commands and child processes in a folder whose files have the names of Python's and the libraries' modules.

Would catch a model folder whose `json.py` is run because a command was started there.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import smoe
from smoe import safe_path
from smoe.cli import app
from smoe.cluster import on_ray
from smoe.kernels import compiler
from smoe.simulator.sweep import sweep
from smoe.user_cache import PLACE
from tests.fixtures import cache_with

SOURCE = Path(smoe.__file__).parents[1]
LIBRARIES = (
    "torch", "numpy", "transformers", "safetensors", "gguf", "psutil", "llvmlite", "typer", "rich", "jinja2", "click",
    "zmq", "fastapi", "pydantic", "uvicorn", "prometheus_client", "llguidance", "huggingface_hub", "tokenizers", "ray",
    "matplotlib", "lm_eval", "triton", "tornado", "h11", "httptools", "uvloop", "accelerate", "kernels", "flash_attn",
    "sitecustomize", "usercustomize", "typing_extensions",
)  # fmt: skip
MARKER = "import sys; open({path!r}, 'a').write({name!r} + '\\n')\n"


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A folder that lacks no module's name; what is run of it is written to `ran`."""
    folder = tmp_path / "hostile"
    folder.mkdir()
    for name in {*sys.stdlib_module_names, *LIBRARIES} - set(sys.builtin_module_names):
        (folder / f"{name}.py").write_text(MARKER.format(path=str(tmp_path / "ran"), name=name))
    return folder


@pytest.fixture
def spared(hostile: Path) -> Path:
    """The same without the names that `python -m` itself imports before it comes to us."""
    before = "import sys; print(*sys.modules)"
    (empty := hostile.parent / "empty").mkdir()
    (empty / "probed.py").write_text(before)
    line = [sys.executable, "-m", "probed"]
    for name in subprocess.run(line, cwd=empty, capture_output=True, text=True, check=True).stdout.split():
        (hostile / f"{name}.py").unlink(missing_ok=True)
    return hostile


@pytest.fixture
def environment(tmp_path: Path, object_code: Path) -> dict[str, str]:
    found = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    places = {PLACE: cache_with(object_code, tmp_path / "cache"), "XDG_CONFIG_HOME": str(tmp_path / "config")}
    return found | places | {"PYTHONPATH": str(SOURCE), "HF_HUB_OFFLINE": "1"}


def ran_in(folder: Path) -> list[str]:
    """The names of those files that were run."""
    ran = folder.parent / "ran"
    return ran.read_text().split() if ran.exists() else []


def commands() -> Iterator[tuple[str, ...]]:
    for command in app.registered_commands:
        yield (str(command.name),)
    for group in app.registered_groups:
        assert group.typer_instance is not None
        for command in group.typer_instance.registered_commands:
            yield str(group.name), command.name or command.callback.__name__  # type: ignore[union-attr]


ALL_COMMANDS = """
import sys
sys.orig_argv, sys.argv = [sys.executable, "-m", "smoe", "--help"], ["-m", "--help"]  # read when smoe is imported
from smoe.cli import main
for command in {commands!r}:
    sys.argv = ["smoe", *command, "--help"]
    try:
        main()
    except SystemExit as end:
        assert not end.code, command
"""
"""As `python -m smoe` runs one command, in one process for all of them."""


def test_every_command_leaves_the_folder_alone_that_it_is_started_in(spared: Path, environment: dict[str, str]) -> None:
    every = ["-c", ALL_COMMANDS.format(commands=list(commands()))]
    for words in (["-m", "smoe", "generate", "--help"], every):
        line = [sys.executable, *words]
        ended = subprocess.run(line, cwd=spared, env=environment, capture_output=True, text=True, timeout=120)
        assert ended.returncode == 0, ended.stderr
        assert ran_in(spared) == [], words
    assert ended.stdout.count("Usage: ") == len(list(commands()))


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ["generate", "demo", "--memory", "20MiB", "--context", "64", "-p", "x", "--max-new-tokens", "2"],
        ["plan", "demo", "--memory", "24MiB", "--context", "64"],
    ],
)
def test_a_command_that_imports_the_libraries_takes_none_from_there(
    spared: Path, environment: dict[str, str], words: list[str]
) -> None:
    line = [sys.executable, "-m", "smoe", *words]
    ended = subprocess.run(line, cwd=spared, env=environment, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    assert ran_in(spared) == []


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
@pytest.mark.parametrize("kind", ["--torch", "--no-torch"])
def test_workers_take_nothing_from_the_folder_of_their_model(
    spared: Path, environment: dict[str, str], kind: str
) -> None:
    """They serve a model of that folder, by a path relative to it."""
    pytest.importorskip("zmq")
    from tests.toy import save_toy

    save_toy(spared / "model")
    line = [sys.executable, "-m", "smoe", "cluster", "up", "model", "--local", "1", kind, "--slots", "2"]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    process = subprocess.Popen(line, cwd=spared, env=environment, **streams)  # type: ignore[call-overload]
    try:
        os.set_blocking(process.stdout.fileno(), False)
        output, until = "", time.monotonic() + 120
        while "for the coordinator at" not in output and time.monotonic() < until:
            output += (process.stdout.read() or b"").decode()
            time.sleep(0.05)
        assert "for the coordinator at" in output, output
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert ran_in(spared) == []


def test_the_compiler_takes_nothing_from_there(hostile: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(hostile)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.setenv("PYTHONPATH", os.pathsep)
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    assert isinstance(compiler.host_features(), dict)
    assert ran_in(hostile) == []


def test_simulations_beside_each_other_take_nothing_from_there(hostile: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(hostile)
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    assert sweep(math.factorial, [3, 4], lambda _: None, 2) == [6, 24]
    assert sweep(os.path.abspath, [".", "x"], lambda _: None, 2) == [str(hostile), str(hostile / "x")]
    assert Path.cwd() == hostile
    assert ran_in(hostile) == []


def test_what_asks_ray_takes_nothing_from_there(hostile: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(hostile)
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    monkeypatch.setattr(on_ray, "_PROBE", "import json, socket, typing")
    assert on_ray._answers("127.0.0.1:1", "token")
    assert ran_in(hostile) == []


def test_a_child_has_our_path_and_its_arguments(hostile: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(hostile)
    line = safe_path.code_line("import json, os, smoe; print(json.dumps([sys.argv[1:], sys.path, smoe.__file__]))", "a")
    done = subprocess.run(
        line, cwd=safe_path.WORKING_FOLDER, env=safe_path.child_environment(), capture_output=True, check=True
    )
    arguments, path, file = json.loads(done.stdout)
    assert arguments == ["a"] and "" not in path and str(hostile) not in path
    assert Path(file) == Path(smoe.__file__)


def test_relative_places_stay_where_they_are_for_a_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "packages").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["", "packages", ".", str(tmp_path), str(SOURCE)]))
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    found = safe_path.child_environment()
    assert found["PYTHONPATH"].split(os.pathsep) == [str(tmp_path / "packages"), str(SOURCE)]
    assert found["XDG_CACHE_HOME"] == str(tmp_path / "cache")


@pytest.mark.parametrize(
    ("line", "is_ours"),
    [
        (["python", "-m", "smoe"], True),
        (["python", "-m", "smoe", "generate", "-m"], True),
        (["python", "-msmoe", "plan"], True),
        (["python", "-Wdefault", "-Imsmoe.server"], True),
        (["python", "-m", "smoe.light_worker", "3"], True),
        (["python", "-m", "smoetest"], False),
        (["python", "-m", "pytest", "smoe"], False),
        (["smoe", "plan"], False),
        (["python", "-c", "import smoe"], False),
        (["python"], False),
    ],
)
def test_only_our_own_programs_change_the_path(line: list[str], is_ours: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """An import of the package in a user's session, whose modules are in the current folder, changes nothing."""
    by_name = next((n for n, word in enumerate(line) if word.startswith("-") and "m" in word), None)
    given = ["-m", *line[by_name + (1 if line[by_name] != "-m" else 2) :]] if by_name is not None else line[-1:]
    monkeypatch.setattr(sys, "orig_argv", line)
    monkeypatch.setattr(sys, "argv", given)
    assert safe_path.is_run_by_name() == is_ours


def test_a_folder_that_we_are_imported_from_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """`python -m smoe` in a checkout's `src`."""
    monkeypatch.chdir(SOURCE)
    monkeypatch.setattr(sys, "path", ["", str(SOURCE), *sys.path])
    monkeypatch.setenv("PYTHONSAFEPATH", "")
    safe_path.drop_current_folder()
    assert "" not in sys.path and str(SOURCE) in sys.path
