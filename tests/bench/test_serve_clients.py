"""What several clients get of a server: figures of streams, and llama.cpp's server beside ours."""

from __future__ import annotations

import http.server
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.serve.clients import NEW_TOKENS, summary
from bench.serve.llama_server import served_by_llama, server_words
from bench.serve.server import Server, Stream


def stream(asked: float, *times: float) -> Stream:
    found = Stream()
    found.asked, found.times = asked, list(times)
    return found


def test_figures_include_the_time_of_prompts() -> None:
    found = summary([stream(0.0, 1.0, 1.1, 1.2), stream(0.5, 3.5, 3.6, 4.0)])
    assert found["tokens_per_second"] == pytest.approx(2 * NEW_TOKENS / 4.0)
    assert found["worst_first_token_seconds"] == 3.0
    assert found["median_gap_ms"] == pytest.approx(100)


def test_every_sequence_has_as_much_room() -> None:
    words = server_words("llama-server", "m.gguf", sequences=8, context=1024, port=99)
    assert " ".join(words).endswith("-np 8 -c 8192 --host 127.0.0.1 --port 99")


def test_server_that_ends_is_reported(tmp_path: Path) -> None:
    program = tmp_path / "server"
    program.write_text("#!/bin/sh\nexit 3\n")
    program.chmod(0o755)
    with pytest.raises(SystemExit, match="ended with status 3"), served_by_llama(str(program), "m", 1, 64, None):
        pass


HEALTHY = """\
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self): self.send_response(200); self.end_headers()
    def log_message(self, *_): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[-1])), Handler).serve_forever()
"""


def test_server_is_there_when_it_is_healthy_and_ends(tmp_path: Path) -> None:
    program = tmp_path / "server"
    program.write_text(f"#!{sys.executable} -S\n{HEALTHY}")
    program.chmod(0o755)
    with served_by_llama(str(program), "m", 1, 64, None) as server:
        assert server.is_healthy()
    assert not server.is_healthy()


@pytest.fixture
def loading_port() -> Iterator[int]:
    """A server that answers that it is loading."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(503)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as loading:
        thread = threading.Thread(target=loading.handle_request)
        thread.start()
        yield loading.server_address[1]
        thread.join()


def test_server_that_loads_is_not_healthy(loading_port: int) -> None:
    assert not Server(loading_port, None).is_healthy()
