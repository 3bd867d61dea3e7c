"""Clients of all kinds: who stay, who leave in the middle, who never finish what they began to say.

Each visit is one method; it returns what came of it in a word. What should not be (an error of the server's own, an
answer that does not come) raises `VisitError`.
"""

from __future__ import annotations

import http.client
import json
import random
import socket
import struct
import time
from typing import Any

from bench.serve.heavy_bodies import HEAVY, heavy_body

BOUND_SECONDS = 120.0
"""An answer, or the next part of one, that has not come by then is stuck."""
_TOKENS = 24
_HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
_SCHEMA = {"type": "object", "properties": {"name": {"enum": ["Tom", "Lily"]}}, "required": ["name"]}
_TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
_REFUSED = (400, 429)
"""Statuses that are answers as well: no room, or a model that has no place for tools, or for chats."""


class VisitError(Exception):
    """What should not be."""


class StuckError(VisitError):
    """An answer that does not come."""


class ServerError(VisitError):
    """An answer of status 5xx."""


class Visitor:
    """One who comes again and again."""

    VISITS = (
        "stays", "leaves", "leaves_at_once", "leaves_the_prompt", "half_a_body", "half_a_head", "whole", "goes_on",
        "leaves_a_whole", "asks_for_two", "asks_for_json", "asks_with_tools", "responds", "looks", "asks_nonsense",
        "connects_alone", "stalls_in_a_head", "stalls_in_a_body", "stalls_while_it_is_answered", "sends_a_heavy_body",
        "sends_too_much", "asks_for_health",
    )  # fmt: skip

    def __init__(self, port: int, model: str, words: str, context: int, dice: random.Random) -> None:
        """`words`: a text to take prompts from, `context`: how many tokens there are room for."""
        self._port, self._model, self._words, self._context, self._dice = port, model, words, context, dice
        self.health_seconds = 0.0
        """The longest that an answer to /health has taken."""

    def visit(self, name: str) -> str:
        """Raises `VisitError`."""
        try:
            return str(getattr(self, f"_{name}")())
        except TimeoutError as error:
            raise StuckError(f"no answer within {BOUND_SECONDS:g} s") from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise VisitError(f"{type(error).__name__}: {error}") from error

    def greedy(self) -> str | None:
        """The likeliest text after a prompt that is always the same; None where there is no room for it now."""
        status, answer = self._ask("/v1/completions", self._text("Once upon a time there was a", 32))
        return None if status == 429 else str(answer["choices"][0]["text"])

    # -- visits -------------------------------------------------------------------------------------------------------

    def _stays(self) -> str:
        return "stayed" if self._read(self._stream(), None) else "no room"

    def _leaves(self) -> str:
        self._read(self._stream(), self._dice.randint(1, 8))
        return "left"

    def _leaves_at_once(self) -> str:
        line = self._send("/v1/completions", self._text(self._prompt(20)) | {"stream": True})
        time.sleep(self._dice.choice([0.0, 0.005, 0.05]))
        self._vanish(line)
        return "left"

    def _leaves_the_prompt(self) -> str:
        body = self._text(self._prompt(self._context)) | {"stream": self._dice.random() < 0.5}
        line = self._send("/v1/completions", body)
        time.sleep(self._dice.uniform(0.0, 0.3))
        self._vanish(line)
        return "left"

    def _half_a_body(self) -> str:
        data = json.dumps(self._text(self._prompt(30))).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n"
        self._part(head.encode() + b"Content-Type: application/json\r\n\r\n" + data[: self._dice.randrange(len(data))])
        return "left"

    def _half_a_head(self) -> str:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        self._part(head[: self._dice.randrange(len(head))])
        return "left"

    def _whole(self) -> str:
        return self._said("/v1/completions", self._text(self._prompt(20)))

    def _leaves_a_whole(self) -> str:
        line = self._send("/v1/completions", self._text(self._prompt(20), 4 * _TOKENS))
        time.sleep(self._dice.uniform(0.0, 0.2))
        self._vanish(line)
        return "left"

    def _goes_on(self) -> str:
        text = self._prompt(40)
        for _ in range(self._dice.randint(2, 3)):
            status, answer = self._ask("/v1/completions", self._text(text, 12))
            if status != 200:
                return f"status {status}"
            text += answer["choices"][0]["text"] + " " + self._prompt(6)
        return "went on"

    def _asks_for_two(self) -> str:
        body = self._text(self._prompt(20)) | {"n": 2, "temperature": 1.0, "seed": self._dice.randrange(1000)}
        if self._dice.random() < 0.5:
            return self._said("/v1/completions", body)
        self._read(self._send("/v1/completions", body | {"stream": True}), None)
        return "streamed"

    def _asks_for_json(self) -> str:
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": _SCHEMA}}
        return self._said("/v1/chat/completions", self._chat() | {"response_format": form})

    def _asks_with_tools(self) -> str:
        choice = self._dice.choice(["auto", "required", "none"])
        return self._said("/v1/chat/completions", self._chat() | {"tools": [_TOOL], "tool_choice": choice})

    def _responds(self) -> str:
        body = {"model": self._model, "input": self._prompt(10), "max_output_tokens": 8}
        status, first = self._ask("/v1/responses", body)
        if status != 200:
            return f"status {status}"
        status, _ = self._ask("/v1/responses", body | {"previous_response_id": first["id"]})
        if self._dice.random() < 0.5:
            self._answer(self._send(f"/v1/responses/{first['id']}", None, "DELETE"))
        return f"status {status}"

    def _looks(self) -> str:
        line = self._send("/watch", None, "GET")
        answer = line.getresponse()
        for _ in range(self._dice.randint(1, 12)):
            answer.readline()
        self._vanish(line)
        return "left"

    def _asks_nonsense(self) -> str:
        odd: dict[str, Any] = self._dice.choice(
            [{"temperature": 9}, {"n": 0}, {"prompt": []}, {"max_tokens": "x"}, {"zz": 1}]
        )
        status, _ = self._ask("/v1/completions", self._text("x") | odd)
        if status != 400:
            raise VisitError(f"{odd} is answered with {status}")
        return "status 400"

    def _connects_alone(self) -> str:
        return self._stall(b"")

    def _stalls_in_a_head(self) -> str:
        return self._stall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Ty")

    def _stalls_in_a_body(self) -> str:
        return self._stall(_HEAD + b"Content-Length: 4000000\r\n\r\n" + b'{"a": "' * self._dice.randint(1, 9000))

    def _stalls_while_it_is_answered(self) -> str:
        body = json.dumps(self._text(self._prompt(20)) | {"stream": True, "logprobs": 20}).encode()
        return self._stall(_HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)

    def _sends_a_heavy_body(self) -> str:
        path, body = heavy_body(self._dice.choice(HEAVY), self._model, self._dice.choice([3_000, 100_000, 3_000_000]))
        line = self._line()
        line.request("POST", path, body, {"Content-Type": "application/json"})
        return f"status {self._answer(line)[0]}"

    def _sends_too_much(self) -> str:
        line = self._line()
        line.request("POST", "/v1/completions", b"x" * (5 << 20), {"Content-Type": "application/json"})
        answer = line.getresponse()
        answer.read()
        line.close()
        if answer.status not in (413, 429):
            raise VisitError(f"5 MiB are answered with {answer.status}")
        return f"status {answer.status}"

    def _asks_for_health(self) -> str:
        began = time.perf_counter()
        self._answer(self._send("/health", None, "GET"))
        self.health_seconds = max(self.health_seconds, time.perf_counter() - began)
        return "well"

    # -- what they have in common -------------------------------------------------------------------------------------

    def _prompt(self, words: int) -> str:
        begin = self._dice.randrange(len(self._words) // 2)
        return " ".join((self._words[begin:] + self._words).split()[:words])

    def _text(self, prompt: str, tokens: int = _TOKENS) -> dict[str, Any]:
        return {"model": self._model, "prompt": prompt, "max_tokens": tokens, "temperature": 0}

    def _chat(self) -> dict[str, Any]:
        said = [{"role": "user", "content": self._prompt(12)}]
        return {"model": self._model, "messages": said, "max_tokens": _TOKENS}

    def _stream(self) -> http.client.HTTPConnection:
        path, body = self._dice.choice(
            [("/v1/completions", self._text(self._prompt(20))), ("/v1/chat/completions", self._chat())]
        )
        return self._send(path, body | {"stream": True})

    def _send(self, path: str, body: Any, method: str = "POST") -> http.client.HTTPConnection:
        line = self._line()
        data = None if body is None else json.dumps(body).encode()
        line.request(method, path, data, {"Content-Type": "application/json"})
        return line

    def _part(self, data: bytes) -> None:
        """Some bytes over a line of its own, and away after a while."""
        with socket.create_connection(("127.0.0.1", self._port), timeout=BOUND_SECONDS) as line:
            line.sendall(data)
            time.sleep(self._dice.choice([0.0, 0.02, 0.5]))

    def _stall(self, data: bytes) -> str:
        """Send something, say no more, and vanish, or wait until the server has enough of it."""
        with socket.create_connection(("127.0.0.1", self._port), timeout=BOUND_SECONDS) as line:
            line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            line.sendall(data)
            time.sleep(self._dice.choice([0.0, 0.1, 1.0, 4.0]))
            if self._dice.random() < 0.5:
                line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        return "vanished"

    def _line(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self._port, timeout=BOUND_SECONDS)

    def _vanish(self, line: http.client.HTTPConnection) -> None:
        """Half of them say goodbye, half are gone (a reset)."""
        if line.sock is not None:
            if self._dice.random() < 0.5:
                line.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            line.sock.close()
        line.close()

    def _said(self, path: str, body: Any) -> str:
        return f"status {self._ask(path, body)[0]}"

    def _ask(self, path: str, body: Any) -> tuple[int, Any]:
        return self._answer(self._send(path, body))

    def _answer(self, line: http.client.HTTPConnection) -> tuple[int, Any]:
        answer = line.getresponse()
        text = answer.read().decode()
        line.close()
        if answer.status != 200 and answer.status not in _REFUSED:
            raise _wrong(answer.status, text)
        return answer.status, json.loads(text)

    def _read(self, line: http.client.HTTPConnection, most: int | None) -> int:
        """A stream's events, all of them or the first; returns how many there were."""
        answer = line.getresponse()
        if answer.status in _REFUSED:
            answer.read()
            line.close()
            return 0
        if answer.status != 200:
            raise _wrong(answer.status, answer.read().decode())
        events, last = 0, b""
        for said in iter(answer.readline, b""):
            if said.startswith(b"data: "):
                events, last = events + 1, said
                if b'"error":' in said:
                    raise VisitError(f"in a stream: {said.decode()[:300]}")
            if events == most:
                self._vanish(line)
                return events
        if b"[DONE]" not in last:
            raise VisitError(f"a stream ends with {last.decode()[:300]!r}")
        line.close()
        return events


def _wrong(status: int, text: str) -> VisitError:
    return (ServerError if status >= 500 else VisitError)(f"status {status}: {text[:300]}")
