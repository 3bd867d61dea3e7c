"""Other systems, as far as this one can play them.

What a system lacks is known from the types of Python's own library (typeshed, which comes with mypy): a name that is
there on Linux and not for another platform. In a forked process smoe's modules are imported anew and find a platform, a
standard library as there; the libraries that they use see this system.
"""

from __future__ import annotations

import ast
import builtins
import ctypes
import errno
import fcntl
import importlib
import os
import pickle
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

SOURCE = Path(__file__).parent.parent / "src" / "smoe"
MODULES = ("errno", "fcntl", "mmap", "os", "pwd", "readline", "resource", "signal", "socket", "termios", "time")
"""Of the standard library, where systems differ and smoe might ask."""
OTHERS = ("darwin", "win32")


@cache
def names(module: str, platform: str) -> frozenset[str]:
    """What a module of the standard library has on a platform."""
    import mypy

    stubs = Path(mypy.__file__).parent / "typeshed" / "stdlib"
    plain = stubs / f"{module}.pyi"
    path = plain if plain.exists() else stubs / module / "__init__.pyi"
    told = SimpleNamespace(platform=platform, version_info=sys.version_info)
    return frozenset(_names(ast.parse(path.read_text(encoding="utf8")).body, told))


def _names(statements: list[ast.stmt], told: SimpleNamespace) -> list[str]:
    found: list[str] = []
    for statement in statements:
        if isinstance(statement, ast.If):
            holds = eval(compile(ast.Expression(statement.test), "stub", "eval"), {"sys": told, "bool": bool})
            found += _names(statement.body if holds else statement.orelse, told)
        elif isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
            found.append(statement.name)
        elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            found.append(statement.target.id)
        elif isinstance(statement, ast.Assign):
            found += [target.id for target in statement.targets if isinstance(target, ast.Name)]
        elif isinstance(statement, ast.ImportFrom) and f"{statement.module}" in ("_socket", "_signal", "_mmap"):
            found += [alias.asname or alias.name for alias in statement.names]
    return found


def missing(module: str, platform: str) -> frozenset[str]:
    """What Linux has, and this platform not."""
    return names(module, "linux") - names(module, platform)


def is_absent(module: str, platform: str) -> bool:
    """Whether the platform has no such module: its types are all for others."""
    return all(name.startswith("_") for name in names(module, platform))


BREAK = 21
"""SIGBREAK; here the number of what a background process gets that reads from its terminal."""
UNCACHED: list[int] = []
"""Descriptors whose files are not to be kept in the page cache, where macOS is played."""


class Played:
    """A module of the standard library as another system has it."""

    def __init__(self, real: Any, without: frozenset[str] = frozenset(), **instead: Any) -> None:
        vars(self).update(_real=real, _without=without - instead.keys(), _instead=instead)

    def __getattr__(self, name: str) -> Any:
        if name in self._without:
            raise AttributeError(f"module {self._real.__name__!r} has no attribute {name!r} on this system", name=name)
        return self._instead[name] if name in self._instead else getattr(self._real, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._real, name, value)


def play(platform: str, scene: Callable[[], Any]) -> Any:
    """What `scene`, which imports what it uses, returns on another platform, in a process of its own. Raises
    `AssertionError` with the traceback of what failed there."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        try:
            _become(platform)
            answer = (True, scene())
        except BaseException:
            answer = (False, traceback.format_exc())
        with os.fdopen(writing, "wb") as file:
            pickle.dump(answer, file)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as file:
        data = file.read()
    os.waitpid(child, 0)
    assert data, "the process has died"
    went_well, found = pickle.loads(data)
    assert went_well, found
    return found


def _become(platform: str) -> None:
    """This process imports smoe anew, and finds that platform."""
    for name in [name for name in sys.modules if name.split(".")[0] in ("smoe", "tests") and name != __name__]:
        del sys.modules[name]
    signal.alarm(120)
    patch = pytest.MonkeyPatch()
    patch.setenv("SMOE_MAX_CPU_ISA", "none")  # kernels are no business of this test, and take seconds to compile
    played: dict[str, Any] = {
        name: Played(importlib.import_module(name), missing(name, platform))
        for name in MODULES
        if not is_absent(name, platform)
    }
    played["sys"] = Played(sys, platform=platform)
    played["ctypes"] = Played(ctypes, CDLL=_no_library)
    if platform == "darwin":
        played["fcntl"] = Played(fcntl, missing("fcntl", platform), F_NOCACHE=48, fcntl=_uncached)
    else:
        played["signal"] = Played(signal, missing("signal", platform), SIGBREAK=BREAK)
        played["os"] = Played(os, missing("os", platform), name="nt", O_BINARY=0, O_NOINHERIT=os.O_CLOEXEC)
        played["socket"] = Played(socket, missing("socket", platform), SO_EXCLUSIVEADDRUSE=socket.SO_REUSEADDR)
    absent = {name for name in MODULES if name not in played}
    real = builtins.__import__

    def importing(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        if globals and str(globals.get("__name__")).split(".")[0] == "smoe":
            if name in absent:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)
            if name in played:
                return played[name]
        return real(name, globals, locals, fromlist, level)

    patch.setattr(builtins, "__import__", importing)
    patch.setattr(Path, "read_text", _without_proc(Path.read_text))
    held = psutil.Process.memory_info
    if platform == "win32":
        patch.setattr(psutil.Process, "memory_info", lambda self: _with_peak(held(self)))
        for name in ("replace", "rename", "unlink"):
            patch.setattr(Path, name, _of_closed_files(getattr(Path, name)))


def _uncached(descriptor: int, command: int, value: int) -> int:
    assert (command, value) == (48, 1)
    UNCACHED.append(descriptor)
    return 0


def _no_library(name: str | None, *_: Any, **__: Any) -> Any:
    """macOS' C library has `sysctlbyname`, which knows nothing here."""
    if name is not None:
        raise OSError(errno.ENOENT, f"no library {name!r} on this system")

    def sysctlbyname(*_: Any) -> int:
        return -1

    return SimpleNamespace(sysctlbyname=sysctlbyname)


def _with_peak(found: Any) -> Any:
    return SimpleNamespace(**found._asdict(), peak_wset=found.rss + 1)


class InUseError(PermissionError):
    """Of a file that somebody has open, as Windows words it."""

    winerror = 32


def _of_closed_files(original: Callable[..., Any]) -> Callable[..., Any]:
    """Windows renames and deletes no file that is open, and takes no such file's place."""

    def checked(self: Path, *arguments: Any, **named: Any) -> Any:
        opened = {os.path.realpath(each.path) for each in os.scandir("/proc/self/fd")}
        for path in (self, *(each for each in arguments if isinstance(each, Path))):
            if str(path.resolve()) in opened:
                raise InUseError(errno.EACCES, "The process cannot access the file", str(path))
        return original(self, *arguments, **named)

    return checked


def _without_proc(original: Callable[..., str]) -> Callable[..., str]:
    def read_text(self: Path, *arguments: Any, **named: Any) -> str:
        if str(self).startswith(("/proc/", "/sys/")):
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(self))
        return original(self, *arguments, **named)

    return read_text
