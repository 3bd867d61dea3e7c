"""A server in a process of its own, from its first word until Ctrl-C, and streams that it is asked for."""

from __future__ import annotations

import http.client
import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

_LOADING_SECONDS = 300.0
_ENDING_SECONDS = 60.0
_MOST_LINES = 200


class Stream:
    """An answer as it came."""

    def __init__(self) -> None:
        self.asked = 0.0
        self.times: list[float] = []
        """When each token was there."""
        self.text = ""
        self.is_given_up = False


class Server:
    """A server that runs, and what it is asked."""

    def __init__(self, port: int, end: int | None) -> None:
        self._port = port
        self._never = {} if end is None else {"logit_bias": {str(end): -100}}

    def ask(self, prompt: str, tokens: int, into: Stream | None = None) -> Stream:
        """Stream an answer of so many tokens; until it is given up."""
        stream = into or Stream()
        body = {"model": "served", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True}
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=600)
        headers = {"Content-Type": "application/json"}
        stream.asked = time.perf_counter()
        connection.request("POST", "/v1/completions", json.dumps(body | self._never), headers)
        answer = connection.getresponse()
        if answer.status != 200:
            raise SystemExit(f"the server says {answer.status}: {answer.read().decode()}")
        for line in iter(answer.readline, b""):
            if stream.is_given_up:
                break
            if line.startswith(b"data: {"):
                stream.times.append(time.perf_counter())
                said = json.loads(line[6:])
                if "error" in said:
                    raise SystemExit(f"the server says: {said['error']}")
                stream.text += "".join(choice["text"] for choice in said["choices"])
        connection.close()
        return stream

    def is_healthy(self) -> bool:
        """Whether it answers, and can be asked."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=10)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except ConnectionError:
            return False
        finally:
            connection.close()

    def wait(self) -> None:
        """Until it is healthy."""
        while not self.is_healthy():
            time.sleep(0.05)

    @contextmanager
    def watched(self) -> Iterator[bool]:
        """Inside, somebody looks at the page; False where there is none."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        connection.request("GET", "/watch")
        answer = connection.getresponse()
        reader = threading.Thread(target=lambda: [None for _ in iter(answer.readline, b"")], daemon=True)
        if answer.status == 200:
            reader.start()
        try:
            yield answer.status == 200
        finally:
            if connection.sock is not None:
                connection.sock.close()


class Process:
    """`smoe serve` as it runs."""

    def __init__(self, model: str, sequences: int, words: Sequence[str]) -> None:
        command = [sys.executable, "-m", "smoe", "serve", model, "--name", "served", "--port", "0"]
        command += ["--max-sequences", str(sequences), *words]
        self._process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.pid = self._process.pid
        self.said: deque[str] = deque(maxlen=_MOST_LINES)
        """Its newest words."""
        self._reader: threading.Thread | None = None
        try:
            self.port = self._port()
        except SystemExit:
            self.end()
            raise

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def end(self) -> int:
        """By SIGTERM, which nobody starts it without hearing, as Ctrl-C in the background; returns its exit code."""
        if not self.has_ended:
            self._process.send_signal(signal.SIGTERM)
        code = self._process.wait(_ENDING_SECONDS)
        if self._reader is not None:
            self._reader.join()
        assert self._process.stderr is not None
        self._process.stderr.close()
        return code

    def _port(self) -> int:
        """What it says once it listens; what it says later is kept, so that it does not wait for a reader."""
        until = time.monotonic() + _LOADING_SECONDS
        assert self._process.stderr is not None
        while time.monotonic() < until and (line := self._process.stderr.readline()):
            self.said.append(line)
            found = re.search(r"http://127\.0\.0\.1:(\d+)/v1", line)
            if found:
                self._reader = threading.Thread(target=self.said.extend, args=(self._process.stderr,), daemon=True)
                self._reader.start()
                return int(found[1])
        raise SystemExit(f"smoe serve did not begin:\n{''.join(self.said)}")


@contextmanager
def running(model: str, sequences: int, words: Sequence[str]) -> Iterator[Process]:
    """Inside, a server runs."""
    process = Process(model, sequences, words)
    try:
        yield process
    finally:
        process.end()


@contextmanager
def served(model: str, sequences: int, words: Sequence[str], end: int | None) -> Iterator[Server]:
    """Inside, a server runs and is healthy; no answer has the token `end`."""
    with running(model, sequences, words) as process:
        server = Server(process.port, end)
        server.wait()
        yield server


def asked_together(server: Server, prompts: Sequence[str], tokens: int) -> list[Stream]:
    """A client for each prompt, all at once; returns when all of them have their answers of `tokens` tokens."""
    streams = [Stream() for _ in prompts]
    threads = [
        threading.Thread(target=server.ask, args=(prompt, tokens, stream))
        for prompt, stream in zip(prompts, streams, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return streams
