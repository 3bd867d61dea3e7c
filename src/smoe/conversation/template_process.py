"""Renders chat templates in a child process, which is limited in time and memory and can be ended at any moment.

The process starts with the first conversation and is used for later ones too. If a conversation takes too long, the
process is killed, and the next conversation starts another.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import threading
import time
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

from smoe.conversation import template_program
from smoe.conversation.template_program import FAILED, LENGTH_BYTES, MEMORY_BYTES, RENDERED, SECONDS
from smoe.errors import ChatTemplateError, ChatTemplateLimitError, EngineStateError

_LIBRARIES = ("jinja2", "markupsafe")
_ENVIRONMENT = ("LANG", "LC_ALL", "LD_LIBRARY_PATH", "SYSTEMROOT", "TZ")
"""The environment variables that the process inherits. Variables that may contain keys are left out."""
_LOOK_SECONDS = 0.1
"""The seconds between two checks for Ctrl-C, because Windows does not wake a waiting thread."""
_START_SECONDS = 60.0
"""The time limit for the start of the process, on a machine that is busy loading a model. Usually it takes a tenth of a
second."""
_NOTHING = json.dumps({"template": "", "variables": {}}).encode()
"""The first request to a new process, whose response shows that the process works."""


class TemplateProcess:
    """Renders one conversation at a time in a child process. Any thread may call `render` and `close`."""

    def __init__(self) -> None:
        self.seconds = SECONDS
        """The time limit of one conversation in seconds."""
        self._turn = threading.Lock()
        self._is_closed = False
        self._child = _Child()
        weakref.finalize(self, self._child.kill)

    def deadline(self) -> float:
        """Return the deadline of a conversation that begins now, on the clock of `time.monotonic`."""
        return time.monotonic() + self.seconds

    def render(self, template: str, variables: dict[str, Any], deadline: float) -> str:
        """Return the rendered template. `variables`: plain data. Raise `ChatTemplateError` if the template fails,
        `ChatTemplateLimitError` if it exceeds a limit, and `EngineStateError` after `close`."""
        try:
            request = json.dumps({"template": template, "variables": variables}, default=str).encode()
        except (ValueError, RecursionError) as error:
            raise ChatTemplateError(
                f"the conversation and its variables are not valid JSON: {type(error).__name__}: {error}"
            ) from error
        with self._turn:
            if self._is_closed:
                raise _ending()
            if not self._child.is_alive:
                deadline += self._start()
            return self._exchanged(request, deadline)

    def close(self) -> None:
        """End the process, and refuse later requests."""
        self._is_closed = True
        self._child.kill()

    def _start(self) -> float:
        """Start the process. Return the seconds until its first response."""
        began = time.monotonic()
        self._child.start(self.seconds)
        if self._is_closed:  # meanwhile, when there was no process to end
            self._child.kill()
        self._exchanged(_NOTHING, began + _START_SECONDS)
        return time.monotonic() - began

    def _exchanged(self, request: bytes, deadline: float) -> str:
        try:
            exchange = _Exchange(self._child.process, request)
            while exchange.is_alive() and time.monotonic() < deadline:
                exchange.join(min(_LOOK_SECONDS, max(0.0, deadline - time.monotonic())))
        except BaseException:  # after an interrupt, the pending response must not answer a later request
            self._child.kill()
            raise
        if self._is_closed:
            raise _ending()
        if exchange.is_alive():
            self._child.kill()
            raise ChatTemplateLimitError(f"rendering the template takes longer than the limit of {self.seconds:g} s")
        if exchange.kind == RENDERED:
            return exchange.text
        if exchange.kind == FAILED and not exchange.text.startswith(("MemoryError", "OverflowError")):
            raise ChatTemplateError(exchange.text)
        self._child.kill()
        if exchange.kind == FAILED:
            raise ChatTemplateLimitError(f"rendering the template needs more memory than the limit ({exchange.text})")
        raise ChatTemplateLimitError(
            f"the process that renders the template has ended (exit code {self._child.exit_code})"
        )


class _Exchange(threading.Thread):
    """One request to the child process and its response, on a thread of its own, because not every system can wait for
    a pipe with a deadline."""

    def __init__(self, child: subprocess.Popen[bytes], request: bytes) -> None:
        super().__init__(name="smoe-template", daemon=True)
        self.kind, self.text = b"", ""
        """`RENDERED` or `FAILED`; empty if the process ended before it responded."""
        self._child, self._request = child, request
        self.start()

    def run(self) -> None:
        assert self._child.stdin is not None and self._child.stdout is not None
        try:
            self._child.stdin.write(len(self._request).to_bytes(LENGTH_BYTES, "big") + self._request)
            self._child.stdin.flush()
            kind, length = self._child.stdout.read(1), self._child.stdout.read(LENGTH_BYTES)
            payload = self._child.stdout.read(int.from_bytes(length, "big"))
        except (OSError, ValueError):  # the pipe is broken, or was closed when the process was ended
            return
        if len(length) == LENGTH_BYTES and len(payload) == int.from_bytes(length, "big"):
            self.text, self.kind = payload.decode("utf8", "surrogatepass"), kind


class _Child:
    """The child process that renders templates. A fork of the process that started it does not use it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._parent = 0

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "the process has been started"
        return self._process

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._parent == os.getpid() and self._process.poll() is None

    @property
    def exit_code(self) -> int | None:
        return self.process.poll()

    def start(self, seconds: float) -> None:
        """Start the process, after the end of an earlier one. It is isolated (-I, -S): neither the current folder nor
        the environment affects its imports."""
        self.kill()
        folders = sorted({_folder_of(library) for library in _LIBRARIES})
        program = Path(template_program.__file__)
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(program), str(seconds), str(MEMORY_BYTES), *folders],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=program.parent,
            env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
            start_new_session=True,  # Ctrl-C on the terminal is for the parent
            creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),
        )
        self._parent = os.getpid()

    def kill(self) -> None:
        """End the process and wait for its end. Further calls have no effect."""
        process = self._process
        if process is None or self._parent != os.getpid():
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            with suppress(BrokenPipeError):  # a request was not written completely
                pipe.close()  # type: ignore[union-attr]


def _ending() -> EngineStateError:
    return EngineStateError("the chat template cannot be rendered, because the program is ending")


def _folder_of(library: str) -> str:
    found = importlib.util.find_spec(library)
    if found is None or found.origin is None:
        raise ChatTemplateError(f"chat templates need {library}, which is not installed (pip install {library})")
    return str(Path(found.origin).parent.parent)
