"""smoe on macOS and Windows, played: all of it is imported, and a toy model runs inside two budgets, bit for bit.

Would catch: a call, a constant or a module that is not there, a rename of an open file, a read that a system refuses.
Neither system has run these.
"""

from __future__ import annotations

import ast
import hashlib
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import oracle
from tests.systems import BREAK, MODULES, OTHERS, SOURCE, UNCACHED, is_absent, missing, names, play

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems are played on Linux")
NEW_TOKENS = 8
Toy = Callable[..., Path]

FOR_POSIX_ALONE = {
    "memory/arena.py": "MAP_PRIVATE MAP_ANONYMOUS",  # Windows leaves the function before
    "memory/page_cache.py": "geteuid O_CLOEXEC PROT_READ MAP_SHARED POSIX_FADV_DONTNEED posix_fadvise preadv",  # Linux
    "memory/expert_files.py": "fcntl pread POSIX_FADV_DONTNEED",  # `opening` gives Windows another; asked for before
    "machine/disk_rates.py": "POSIX_FADV_DONTNEED",  # where there is posix_fadvise
    "memory/stored_rows.py": "POSIX_FADV_WILLNEED",  # likewise
    "machine/process_memory.py": "resource getrusage RUSAGE_SELF",  # in a function that Windows leaves before
    "kernels/competition.py": "resource getrusage RUSAGE_THREAD",  # in a function that only Linux does not leave before
    "cluster/stored_identity.py": "fchmod",  # where os.name is posix
    "cli/interrupts.py": "termios tcgetattr error",  # after SIGHUP, which Windows has not
    # in a branch that only Linux takes
    "conversation/template_program.py": "resource setrlimit RLIMIT_AS RLIMIT_CORE",
    "server/connections.py": "resource getrlimit RLIMIT_NOFILE RLIM_INFINITY",  # after an import that may fail
    "load/stored_proofs.py": "uname confstr",  # where `private_cache.is_possible`
    "private_cache.py": "fchmod geteuid O_NOFOLLOW O_NONBLOCK",  # where `private_cache.is_possible`
    "kernels/machine_code.py": "mmap MAP_PRIVATE MAP_ANONYMOUS PROT_READ PROT_WRITE PROT_EXEC",  # x86-64 Linux
}
"""What is used without asking whether it is there, and why that is well."""


def used(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """(module, name) of the standard library that a file uses; ("", module) for what it imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in MODULES:
            yield node.value.id, node.attr
        elif isinstance(node, ast.ImportFrom) and node.module in MODULES:
            yield from ((node.module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (("", alias.name) for alias in node.names if alias.name in MODULES)


def asked(tree: ast.AST) -> set[tuple[str, str]]:
    """(module, name) whose being there a file asks: `hasattr` or `getattr`."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    return {
        (call.args[0].id, call.args[1].value)
        for call in calls
        if call.func.id in ("hasattr", "getattr") and isinstance(call.args[0], ast.Name)  # type: ignore[attr-defined]
        if isinstance(call.args[1], ast.Constant)
    }


def test_types_know_what_systems_lack() -> None:
    assert {"preadv", "O_DIRECT", "sched_getaffinity", "fork"} <= missing("os", "win32")
    assert {"O_DIRECT", "sched_getaffinity", "posix_fadvise"} <= missing("os", "darwin")
    assert "preadv" not in missing("os", "darwin") and "replace" in names("os", "win32")
    assert [name for name in MODULES if is_absent(name, "win32")] == ["fcntl", "pwd", "readline", "resource", "termios"]
    assert not [name for name in MODULES if is_absent(name, "darwin")]
    assert all(missing(name, "darwin") <= missing(name, "win32") for name in ("fcntl", "mmap", "os", "signal"))


def test_what_a_system_lacks_is_asked_for_first() -> None:
    unasked: dict[str, set[str]] = {}
    is_about = re.compile(rf"^\s*(import|from) ({'|'.join(MODULES)})\b", re.MULTILINE)
    for path in sorted(SOURCE.rglob("*.py")):
        text, file = path.read_text(encoding="utf8"), path.relative_to(SOURCE).as_posix()
        if not is_about.search(text):
            continue
        tree = ast.parse(text)
        known = asked(tree)
        advice = {("os", "POSIX_FADV_DONTNEED"), ("os", "POSIX_FADV_RANDOM")}
        known |= advice if ("os", "posix_fadvise") in known else set()
        for platform, (module, name) in product(OTHERS, set(used(tree)) - known):
            lacks = is_absent(name, platform) if not module else name in missing(module, platform)
            if lacks and name not in FOR_POSIX_ALONE.get(file, "").split():
                unasked.setdefault(f"{file} ({platform})", set()).add(f"{module}.{name}".strip("."))
    assert not unasked


def import_everything() -> None:
    import importlib

    for path in sorted(SOURCE.rglob("*.py")):
        name = ".".join(("smoe", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__")
        if name.endswith("__main__"):
            continue
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:  # what smoe can do without
            if f"{error.name}".split(".")[0] in (*MODULES, "smoe"):
                raise


def run_toy(folder: Path, copy: Path) -> tuple[list[Any], dict[str, Any]]:
    """Inside another system: (steps at two budgets, what else was found)."""
    from smoe.machine.available_memory import least_room
    from smoe.machine.process_memory import process_memory
    from smoe.server.listening_socket import bound
    from smoe.server.settings import ServerConfig
    from smoe.user_cache import keep
    from tests import oracle, packs

    steps = []
    for budget in ("half", "minimum"):
        model = oracle.open_model(folder, budget, kernels="native", direct_io="on")
        try:
            steps.append(tuple(oracle.greedy(model, new_tokens=NEW_TOKENS)))
            read_bytes = model.offload.stats().bytes_read
        finally:
            model.offload.close()
    packed = packs.pack_folder(copy, precision="int4")
    bound(ServerConfig(port=0)).close()
    keep(copy / "kept.json", {"is": "kept"})
    found = {
        "packed": hashlib.sha256(packed.read_bytes()).hexdigest(),
        "files": sorted(path.name for path in copy.iterdir()),
        "room": least_room().nbytes,
        "whole": process_memory(0).whole,  # type: ignore[union-attr]
        "read_bytes": read_bytes,
    }
    return steps, found


def end_in_order() -> None:
    """By Ctrl-Break, which has a number of Linux's that nobody uses."""
    from smoe.cli import interrupts

    with interrupts.listening():
        with pytest.raises(interrupts.Terminated):
            os.kill(os.getpid(), BREAK)
        assert interrupts.exit_code() == 128 + BREAK


def write_words(path: Path) -> None:
    """Into a file, as `smoe generate > words.txt` does: Python gives it the code page of older programs."""
    from smoe.cli import _open_missing_streams

    before = sys.stdout
    with path.open("w", encoding="cp1252") as sys.stdout:
        _open_missing_streams()
        sys.stdout.write("żółw")
    sys.stdout = before
    assert path.read_text(encoding="utf8") == "żółw"
    path.unlink()


@pytest.mark.parametrize("platform", OTHERS)
def test_a_toy_runs_there(platform: str, toy: Toy, tmp_path: Path) -> None:
    folder = toy("qwen3_moe", dtype=torch.bfloat16)
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))

    def scene() -> Any:
        if platform == "win32":  # which lacks whatever macOS lacks
            import_everything()
            end_in_order()
            write_words(copy / "words.txt")
        steps, found = run_toy(folder, copy)
        return steps, found | {"past_cache": len(UNCACHED)}

    steps, found = play(platform, scene)
    theirs = oracle.greedy(oracle.reference(folder), new_tokens=NEW_TOKENS)
    for ours in steps:
        oracle.assert_same_steps(oracle.Steps(*ours), theirs)
    assert bool(found["past_cache"]) is (platform == "darwin")
    assert found["room"] > 0 and found["whole"] > 0 and found["read_bytes"] > 0
    here = packed_here(folder, tmp_path)
    assert found["packed"] == hashlib.sha256(here.read_bytes()).hexdigest()
    assert found["files"] == sorted([*os.listdir(folder), here.name, "kept.json"])  # noqa: PTH208


def packed_here(folder: Path, tmp_path: Path) -> Path:
    from tests import packs

    return packs.pack_folder(Path(shutil.copytree(folder, tmp_path / "here")), precision="int4")
