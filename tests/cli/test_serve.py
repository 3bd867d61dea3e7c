"""`smoe serve` as its users start it: a process, asked over HTTP, ended by a signal."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from smoe.cli import serve
from smoe.cli.serve import ServerOptions, _with_libraries
from smoe.cli.summary import print_totals
from smoe.config import EngineConfig
from smoe.errors import BudgetError, ConfigError
from smoe.models.files import fetch
from smoe.report.pace import Access, arithmetic_of, pace_of
from smoe.server.totals import Totals
from tests import forked
from tests.cli.conftest import Run
from tests.forked import Forked
from tests.toy import TEMPLATE, save_toy

DEMO = ("serve", "demo", "--memory", "48MiB", "--context", "384", "--kernels", "torch")  # the same bits on every CPU
QUESTION = [{"role": "user", "content": "Who went to the park?"}]


@contextmanager
def process(
    *options: str, model: Sequence[str] = DEMO, **environment: str
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server of the embedded model, or of another, on any free port, and its address."""
    command = [sys.executable, "-m", "smoe", *model, "--port", "0", "--threads", "1", *options]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL}
    started = Forked(command, text=True, env={**os.environ, **environment}, **pipes)
    assert started.stdout is not None and started.stderr is not None
    try:
        said = ""
        while not (found := re.search(r"serving \S+ at (http://\S+)", said)):
            line = started.stderr.readline()
            assert line, f"ended before it served: {said}"
            said += line
        yield started, found[1]
    finally:
        started.kill()
        started.wait()
        started.stdout.close()
        started.stderr.close()


def client_of(address: str, key: str = "none") -> openai.OpenAI:
    client = openai.OpenAI(base_url=address, api_key=key, max_retries=0, timeout=60)
    for _ in range(600):
        try:
            client.models.list()
            return client
        except openai.APIConnectionError:  # it has said so, and opens its door now
            time.sleep(0.05)
    raise AssertionError("nobody answers")


def over(server: subprocess.Popen[str], code: int) -> tuple[list[Any], str]:
    """The JSON lines and the words of a server that has been told to end; it has no terminal, so no colours."""
    out, err = server.communicate(timeout=60)
    assert server.returncode == code and "Traceback" not in err and "\x1b" not in err, err
    return [json.loads(line) for line in out.splitlines()], err


@pytest.mark.parametrize(
    ("sent", "code", "option"),
    [(signal.SIGTERM, 143, "--json"), (signal.SIGINT, 130, "-v"), (signal.SIGHUP, 129, "--quiet")],
)
def test_a_server_answers_and_ends_in_order(
    sent: signal.Signals, code: int, option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with process("--name", "little", option) as (server, address), client_of(address) as client:
        page = server.stderr.readline() if server.stderr is not None else ""
        assert page == f"chat page: {address.removesuffix('v1')}\n", "a line with nothing but the address"
        stream: Any = client.chat.completions.create(
            model="little", messages=QUESTION, max_tokens=80, temperature=0, stream=True, logit_bias={"0": -100}
        )
        next(iter(stream))
        server.send_signal(sent)
        reasons = [chunk.choices[0].finish_reason for chunk in stream]
        assert reasons[-1] == "length"  # what was under way has finished
        told, err = over(server, code)
    assert "interrupted\n" in err
    if option == "--json":
        listening, ended = told
        assert (listening["event"], listening["url"], listening["model"]) == ("listening", address, "little")
        assert (listening["context_tokens"], listening["max_sequences"]) == (384, 4)
        assert (ended["event"], ended["requests"], ended["new_tokens"]) == ("ended", 1, 80)
        assert ended["other_requests"] == 1, "the list of models"
        assert 0 < ended["peak_memory_bytes"] <= ended["memory_budget_bytes"] == listening["memory_budget_bytes"]
    else:
        assert not told
    assert ("POST /v1/chat/completions 200 " in err) == (option == "-v")
    assert ("1 request for text\n" in err and "80 new" in err) == (option == "-v")
    files, usual = fetch("demo", None), arithmetic_of(EngineConfig(kernels="torch"), "auto")
    layer = next(filter(None, (pace_of(files, usual, access).layer for access in Access)), None)
    assert layer is not None and 0 < layer < 1, "what the server measured is stored for the next forecast"


def test_tools_work_by_a_template_of_the_user(tmp_path: Path) -> None:
    """Of a model whose own template has no place for them."""
    path = tmp_path / "tools.jinja"
    path.write_text("{% if tools %}<tool_call> {{ tools | tojson }}{% endif %}" + TEMPLATE)
    place = {"properties": {"city": {"enum": ["Oslo"]}}, "required": ["city"], "additionalProperties": False}
    tools: Any = [{"type": "function", "function": {"name": "rain", "parameters": {"type": "object", **place}}}]
    with process("--chat-template", str(path)) as (_, address), client_of(address) as client:
        answer = client.chat.completions.create(
            model="demo", messages=QUESTION, tools=tools, tool_choice="required", max_tokens=120, temperature=0
        )
    (call,) = answer.choices[0].message.tool_calls or ()
    assert (call.function.name, json.loads(call.function.arguments)) == ("rain", {"city": "Oslo"})


def test_a_budget_that_is_too_small_is_planned_with_the_servers_sequences(run: Run) -> None:
    hint = "smoe plan demo --max-sequences {}, without --memory, shows"
    assert hint.format(4) in run("serve", "demo", "--memory", "20MiB").err
    assert hint.format(8) in run("serve", "demo", "--memory", "20MiB", "--max-sequences", 8).err


def test_a_small_budget_gets_a_smaller_context_unless_one_is_asked_for() -> None:
    """Would catch a server that refuses a budget which is sufficient for some context."""
    notes: list[str] = []

    def fitted(mib: int, context: int | None = None) -> int | None:
        settings = EngineConfig(memory_bytes=mib << 20, max_sequences=4, context_tokens=context)
        with suppress(BudgetError):
            return _with_libraries("demo", settings, notes.append).context_tokens
        return 0

    smallest = next(mib for mib in range(20, 100) if fitted(mib) != 0)
    assert fitted(smallest) == 256 and "256 tokens instead (see --context)" in notes[-1]
    assert fitted(smallest, 1024) == 0 and fitted(200) is None


def test_a_template_that_is_none_is_refused_before_the_model_is_loaded(run: Run, tmp_path: Path) -> None:
    ran = run("serve", "demo", "--chat-template", tmp_path / "none.jinja")
    assert ran.code == 2 and f"{tmp_path / 'none.jinja'} (--chat-template) cannot be read" in ran.err
    assert "budget" not in ran.err


@pytest.mark.parametrize("hangs", ["at start", "in a request"])
def test_a_chat_template_that_does_not_end_leaves_sigterm_its_effect(tmp_path: Path, hangs: str) -> None:
    """Where it hangs at start, the signal comes before the server listens."""
    loops = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    condition = "true" if hangs == "at start" else "messages[0].content == 'hang'"
    folder = save_toy(tmp_path / "model", template=f"{{% if {condition} %}}{loops}{{% endif %}}{TEMPLATE}")
    model = ("serve", str(folder), "--memory", "16MiB", "--context", "200", "--drain", "0", "--name", "toy")
    if hangs == "at start":
        command = [sys.executable, "-m", "smoe", *model, "--port", "0", "-v"]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL}
        starting = Forked(command, text=True, env={**os.environ}, **pipes)
        try:
            _, err = told_while_a_template_is_rendered(starting, 0.5)
        finally:
            starting.kill()
        assert starting.returncode == 143 and "Traceback" not in err, err
        return
    with process(model=model) as (server, address), client_of(address) as client:

        def ask() -> None:
            with pytest.raises(openai.APIError):
                client.chat.completions.create(model="toy", messages=[{"role": "user", "content": "hang"}])

        asking = threading.Thread(target=ask)
        before = computed_by_children(server)
        asking.start()
        _, err = told_while_a_template_is_rendered(server, before + 0.1)
        asking.join(60)
        assert server.returncode == 143 and "Traceback" not in err, err


def told_while_a_template_is_rendered(server: subprocess.Popen[str], seconds: float) -> tuple[str, str]:
    """SIGTERM when the process that renders has computed for so long in all; what the server has written when it
    ended."""
    deadline = time.monotonic() + 60
    while computed_by_children(server) < seconds:
        assert time.monotonic() < deadline, "no template is being rendered"
        time.sleep(0.05)
    server.send_signal(signal.SIGTERM)
    return server.communicate(timeout=60)


def computed_by_children(server: subprocess.Popen[str]) -> float:
    """Seconds of the CPU."""
    return sum(child.cpu_times().user for child in psutil.Process(server.pid).children())


def test_with_a_key_from_the_environment_and_told_twice_it_ends_at_once(run: Run) -> None:
    key = {"SMOE_API_KEY": "a-key"}
    with process("--drain", "600", **key) as (server, address), client_of(address, "a-key") as client:
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="other").models.list()
        answer: Any = client.chat.completions.create(model="demo", messages=QUESTION, max_tokens=24, temperature=0)  # type: ignore[arg-type]
        prompt = "Question: Who went to the park?\nAnswer:"
        alone = run("generate", *DEMO[1:], "-p", prompt, "--max-new-tokens", 24, "--quiet")
        assert alone.out.strip("\n") == answer.choices[0].message.content.strip("\n")
        stream: Any = client.completions.create(
            model="demo", prompt="Tom", max_tokens=370, stream=True, logit_bias={"0": -100}
        )
        next(iter(stream))
        server.send_signal(signal.SIGINT)
        assert server.stderr is not None
        while "Ctrl-C again" not in server.stderr.readline():  # two at once may be one to the system
            pass
        server.send_signal(signal.SIGINT)
        with pytest.raises(openai.APIError, match="shutting down"):
            list(stream)
        over(server, 130)


HITS_ITSELF = """
import os, signal, sys, threading, time
from smoe.cli import main

def hit(moment):
    while moment not in sys.modules:
        time.sleep(0.001)
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)
threading.Thread(target=hit, args=(sys.argv.pop(),), daemon=True).start()
main()
"""
"""A server that two signals reach as soon as a module is being imported."""


@pytest.mark.parametrize("moment", ["torch", "smoe.load.build", "smoe.load.selftest", "smoe.server.app"])
def test_whenever_ctrl_c_comes_while_it_loads_it_ends_in_order(moment: str) -> None:
    line = [sys.executable, "-c", HITS_ITSELF, *DEMO, "--port", "0", moment]
    if moment == "torch":
        ended = subprocess.run(line, capture_output=True, text=True, timeout=120)
    else:
        ended = forked.run(line, text=True, timeout=120, of=forked.BEFORE_SMOE)
    assert ended.returncode == 130 and "Traceback" not in ended.stderr, ended.stderr
    assert "interrupted\n" in ended.stderr


def test_the_key_may_be_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("secret\n")
    assert ServerOptions(api_key_file=file).config().api_key == "secret"
    for content, why in ((b"", "is empty"), (b"\n", "is empty"), (b"one\ntwo\n", "has 2 lines"), (b"\xff", "UTF-8"),
                         ("schl\u00fcssel".encode(), "outside ASCII")):  # fmt: skip
        file.write_bytes(content)
        with pytest.raises(ConfigError, match=why) as refused:
            ServerOptions(api_key_file=file).config()
        assert f"`api_key_file={file}` " in str(refused.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--host", "0.0.0.0"], "--api-key"),
        (["--host", "0.0.0.0", "--api-key", "x", "--no-auth"], "--no-auth"),
        (["--api-key", "with space"], "--api-key"),
        (["--api-key-file", "/no/such/file"], "--api-key-file /no/such/file cannot be read: No such file"),
        (["--api-key-file", "/no/such/file"], "give the path of a file with a key"),
        (["--chat-template", "/no/such/file"], "give the path of a text file that contains a Jinja template"),
        (["--api-key-file", __file__], "--api-key"),
        (["--api-key-file", __file__, "--api-key", "x"], "exclude each other"),
        (["--port", "99999"], "--port"),
        (["--max-waiting", "0"], "--max-waiting"),
        (["--max-body", "1"], "--max-body is"),
        (["--max-body", "much"], "--max-body"),
        (["--drain", "-1"], "--drain is"),
        (["--allow-origin", "chat.example"], "--allow-origin"),
        (["--host", "not.a.host.invalid", "--no-auth"], "--host"),
        (
            ["--host", "192.0.2.1", "--no-auth"],
            "give another --host (127.0.0.1: this machine only",
        ),  # for documents: no machine has it
        (["--name", ""], "--name is ''; it must be a text of printable characters"),
    ],
)
def test_what_cannot_be_is_refused_before_the_model_is_loaded(run: Run, options: list[str], words: str) -> None:
    ran = run(*DEMO, *options)
    assert ran.code == 2 and words in ran.err and "budget" not in ran.err


def test_a_port_that_is_taken_is_refused_before_the_model_is_loaded(run: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ran = run(*DEMO, "--port", port)
    assert ran.code == 2 and str(port) in ran.err and "--port" in ran.err and "budget" not in ran.err


def test_a_port_that_is_taken_is_refused_before_anything_heavy_is_imported() -> None:
    code = "import sys\nfrom smoe.cli import main\ntry: main()\nexcept SystemExit: print('torch' in sys.modules)"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        line = [sys.executable, "-c", code, *DEMO, "--port", str(taken.getsockname()[1])]
        ran = subprocess.run(line, capture_output=True, text=True, timeout=120)
    assert "in use" in ran.stderr and ran.stdout == "False\n"
    assert sys.platform != "linux" or f"(process {os.getpid()})" in ran.stderr


def test_what_is_missing_is_named(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from smoe.server import installed

    monkeypatch.setattr(installed, "find_spec", lambda name: None if name == "uvicorn" else object())
    ran = run(*DEMO)
    assert ran.code == 2 and "uvicorn" in ran.err and "pip install '.[serve]'" in ran.err and "fastapi" not in ran.err


@pytest.mark.parametrize(
    ("given", "named"), [("link.gguf", "link"), (".", "folder"), ("own/..", "folder"), ("org/id", "org/id")]
)
def test_a_model_is_named_after_its_path_as_it_was_given(
    given: str, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a link, as hub caches have them, not after the file that it leads to."""
    folder = tmp_path / "folder"
    (folder / "own").mkdir(parents=True)
    (tmp_path / "0123abcd").write_text("")
    (folder / "link.gguf").symlink_to(tmp_path / "0123abcd")
    monkeypatch.chdir(folder)
    assert serve._name(None, given) == named


def test_the_last_lines_count_a_request_once(capsys: pytest.CaptureFixture[str]) -> None:
    counts: dict[str, Any] = {
        **dict.fromkeys((field.name for field in fields(Totals)), 0),
        "hit_ratio": None,
        "process": None,
    }
    for given, expected in (
        ({"requests": 1}, "answered        1 request for text\n"),
        ({"requests": 12, "refused_requests": 8}, "answered        4 of 12 requests for text, 8 refused\n"),
        (
            {"requests": 9, "refused_requests": 1, "failed_requests": 2, "abandoned_requests": 3},
            "answered        3 of 9 requests for text, 1 refused, 2 failed, 3 left by their clients\n",
        ),
        (
            {"requests": 1, "other_requests": 1200},
            "answered        1 request for text\nother requests  1,200 (page, models, health, metrics, ...)\n",
        ),
    ):
        print_totals(Totals(**counts | given))
        assert expected in capsys.readouterr().err
