"""Python programs that have the libraries imported already: forked from a process that has done nothing else.

A fresh interpreter takes some five seconds to import torch and transformers, most of what a test of a process takes. A
forked one has its own arguments, environment, folder and files all the same; only what is read while libraries are
imported (a signal that comes then, their variables) wants a fresh one.

    the tests    --  what to run, and its files  ->    Zygote    -- fork -->    the program
                <--  its number, later its status --            <-- waits --
"""

from __future__ import annotations

import atexit
import contextlib
import io
import json
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_MOST = 1 << 20
_LOOKS = 0.005
"""Seconds between two looks whether a process has ended."""


class Zygote:
    """The process that others are forked from; started when the first is."""

    def __init__(self, modules: Sequence[str]) -> None:
        """`modules`: what it imports, with all that these do."""
        self._modules = modules
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None

    def start(self, request: dict[str, Any], files: Sequence[int]) -> int:
        """The number of a process that runs what is asked for, with these files as its 0, 1, 2."""
        return int(self._asked(request, files))

    def status(self, pid: int) -> int | None:
        """What `waitpid` says of one that has ended, once; None while it runs."""
        found = self._asked({"ended": pid}, [])
        return None if found is None else int(found)

    def _asked(self, request: dict[str, Any], files: Sequence[int]) -> Any:
        with self._lock:
            if self._socket is None:
                self._socket = _started(self._modules)
            socket.send_fds(self._socket, [json.dumps(request).encode() + b"\n"], files)
            answer, _ = _received(self._socket)
            return json.loads(answer)


def _received(connection: socket.socket) -> tuple[bytes, list[int]]:
    """A line, and the files that came with it; an empty one where the other end is gone."""
    data, files = b"", list[int]()
    while not data.endswith(b"\n"):
        part, some, _, _ = socket.recv_fds(connection, _MOST, 3)
        if not part:
            return b"", files
        data += part
        files += some
    return data, files


WHOLE = Zygote(("smoe.cli.session", "smoe.server.app", "smoe.cluster.worker"))
BEFORE_SMOE = Zygote(
    ("torch", "transformers.conversion_mapping", "transformers.integrations.flash_attention", "fastapi")
)
"""Of which all that is smoe's is still to be imported."""


class Forked(subprocess.Popen[Any]):
    """`subprocess.Popen` of `[sys.executable, "-m" or "-c", ...]`, without the interpreter's start.

    `closed`: which of the files 0, 1, 2 it finds closed; `of`: what has been imported.
    """

    def __init__(
        self, args: Sequence[object], *, closed: Sequence[int] = (), of: Zygote = WHOLE, **options: Any
    ) -> None:
        self._closed, self._zygote = closed, of
        super().__init__([str(word) for word in args], **options)

    def _execute_child(self, args: Any, *rest: Any) -> None:  # type: ignore[override]
        # (executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell, the ends of three
        # pipes, restore_signals, gid, gids, uid, umask, start_new_session, ...), in every Python from 3.10 to 3.13
        preexec_fn, cwd, env, pipes, own_session = rest[1], rest[4], rest[5], rest[9:15], rest[20]
        assert preexec_fn is None, "nothing of this process is in that one"
        _, kind, what, *arguments = args
        request = {
            "kind": kind,
            "what": what,
            "arguments": arguments,
            "closed": list(self._closed),
            "folder": os.fspath(cwd or Path.cwd()),
            "environment": dict(os.environ if env is None else env),
            "own_session": bool(own_session),
        }
        p2cread, _, _, c2pwrite, _, errwrite = pipes
        files = [n if given == -1 else given for n, given in enumerate((p2cread, c2pwrite, errwrite))]
        try:
            self.pid = self._zygote.start(request, files)
            self._child_created = True
        finally:
            self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]

    def _try_wait(self, flags: int) -> tuple[int, int]:
        while (status := self._zygote.status(self.pid)) is None:
            if flags & os.WNOHANG:
                return 0, 0
            time.sleep(_LOOKS)
        return self.pid, status

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        if self.returncode is None and self._waitpid_lock.acquire(False):  # type: ignore[attr-defined]
            try:
                if self.returncode is None:
                    pid, status = self._try_wait(os.WNOHANG)
                    if pid == self.pid:
                        self._handle_exitstatus(status)  # type: ignore[attr-defined]
            finally:
                self._waitpid_lock.release()  # type: ignore[attr-defined]
        return self.returncode


def run(words: Sequence[object], *, timeout: float | None = None, **options: Any) -> subprocess.CompletedProcess[Any]:
    """`subprocess.run` of such a program, its output captured."""
    with Forked(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def _started(modules: Sequence[str]) -> socket.socket:
    ours, theirs = socket.socketpair()
    line = [sys.executable, "-c", "from tests.forked import serve; serve()", str(theirs.fileno()), *modules]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.Popen(line, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=environment)
    theirs.close()
    atexit.register(process.wait)
    atexit.register(ours.close)  # before: it ends when nobody asks any more
    return ours


def serve() -> None:
    """Until nobody is there who asks; in a process that was asked for, run that, and leave."""
    asked = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal, for those who ask
    for name in sys.argv[2:]:
        with contextlib.suppress(ImportError):  # what is optional
            __import__(name)
    ended: dict[int, int] = {}
    while True:
        data, files = _received(asked)
        if not data:
            return
        request = json.loads(data)
        if "ended" in request:
            answer = _status(request["ended"], ended)
        else:
            answer = os.fork()
            if answer == 0:
                asked.close()
                _become(request, files)
                return
        for file in files:
            os.close(file)
        asked.sendall(json.dumps(answer).encode() + b"\n")


def _status(pid: int, ended: dict[int, int]) -> int | None:
    if pid not in ended:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            ended[pid] = status
    return ended.pop(pid, None)


def _become(request: dict[str, Any], files: Sequence[int]) -> None:
    """Run a program in this process as an interpreter that has just begun would."""
    for n, file in enumerate(files):
        os.dup2(file, n)
        os.close(file)
    if request["own_session"]:
        os.setsid()
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    random.seed()
    tempfile.tempdir = None
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.stdin, sys.stdout, sys.stderr = (_stream(n, n in request["closed"]) for n in range(3))
    if request["kind"] == "-m":
        sys.argv = [request["what"], *request["arguments"]]
        runpy.run_module(request["what"], run_name="__main__", alter_sys=True)
    else:
        sys.argv = ["-c", *request["arguments"]]
        exec(compile(request["what"], "<string>", "exec"), {"__name__": "__main__"})


def _stream(n: int, is_closed: bool) -> Any:
    """What Python makes of a file that it finds open, or closed, when it begins."""
    if is_closed:
        os.close(n)
        return None
    raw = open(n, "rb" if n == 0 else "wb", -1, closefd=False)  # noqa: SIM115
    return io.TextIOWrapper(raw, "utf-8", ("strict", "strict", "backslashreplace")[n], line_buffering=True)
