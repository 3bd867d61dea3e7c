"""Chat templates in their process. Would catch a template that is not ended, an answer that goes to a later request, a
process that reads code from the current folder, and Jinja set up in another way than transformers has it.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from smoe.conversation.template_process import TemplateProcess
from smoe.errors import ChatTemplateError, ChatTemplateLimitError, EngineStateError
from tests.toy import ascii_tokenizer

_LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
_SIXTY = "{% set s = namespace(x=BEGIN) %}{% for i in range(60) %}{% set s.x = STEP %}{% endfor %}"
_NESTED_LIST = _SIXTY.replace("BEGIN", "[1]").replace("STEP", "[s.x, s.x]")
ENDLESS = {
    "loops within loops": _LOOPS,
    "the text of a list that holds itself, in C": _NESTED_LIST + "{{ s.x }}",
    "a comparison, in C": _NESTED_LIST + "{% set one = s.x %}" + _NESTED_LIST + "{{ s.x == one }}",
    "a macro that calls itself twice": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
    "{{ f(90) }}",
    "a number": "{{ 9 ** (9 ** 9) }}",
}
LARGE = {
    "a string that doubles": _SIXTY.replace("BEGIN", "'xx'").replace("STEP", "s.x ~ s.x"),
    "a list that doubles": _SIXTY.replace("BEGIN", "[1]").replace("STEP", "s.x + s.x"),
    "a product": "{{ 'x' * 10 ** 10 }}",
    "a filter": "{{ 'x' | center(10 ** 10) }}",
    "a format": "{{ '%10000000000d' | format(1) }}",
    "much output": "{% for a in range(99999) %}{{ 'x' * 99999 }}{% endfor %}",
}


@pytest.fixture
def process() -> Iterator[TemplateProcess]:
    process = TemplateProcess()
    yield process
    process.close()


def rendered(process: TemplateProcess, template: str, **variables: Any) -> str:
    return process.render(template, variables, process.deadline())


@pytest.mark.parametrize("template", ENDLESS.values(), ids=ENDLESS.keys())
def test_a_template_that_does_not_end_is_ended(process: TemplateProcess, template: str) -> None:
    rendered(process, "")
    process.seconds = 0.5
    with pytest.raises(ChatTemplateLimitError, match=r"0\.5 s"):
        rendered(process, template)
    process.seconds = 60.0
    assert rendered(process, "{{ text }}", text="next") == "next"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux bounds the memory of a process")
@pytest.mark.parametrize("template", LARGE.values(), ids=LARGE.keys())
def test_a_template_that_fills_the_memory_is_ended(process: TemplateProcess, template: str) -> None:
    process.seconds = 60.0
    with pytest.raises(ChatTemplateLimitError, match="memory"):
        rendered(process, template)
    assert rendered(process, "{{ text }}", text="next") == "next"


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
def test_an_interrupt_ends_the_wait_and_no_answer_goes_to_the_next_request(process: TemplateProcess) -> None:
    """The interrupted template would answer soon."""
    process.seconds = 60.0
    rendered(process, "")
    interrupt = threading.Timer(0.2, signal.pthread_kill, (threading.get_ident(), signal.SIGINT))
    interrupt.start()
    with pytest.raises(KeyboardInterrupt):
        rendered(process, _LOOPS)
    assert rendered(process, "{{ text }}", text="next") == "next"


def test_a_close_from_another_thread_ends_it(process: TemplateProcess) -> None:
    process.seconds = 60.0
    rendered(process, "")
    threading.Timer(0.2, process.close).start()
    began = time.monotonic()
    with pytest.raises(EngineStateError):
        rendered(process, _LOOPS)
    assert time.monotonic() - began < 30
    with pytest.raises(EngineStateError):
        rendered(process, "")


def test_a_process_that_was_killed_is_started_again(process: TemplateProcess) -> None:
    rendered(process, "")
    process._child.process.kill()
    process._child.process.wait()
    assert rendered(process, "{{ text }}", text="next") == "next"


def test_nothing_of_the_current_folder_or_the_environment_is_executed(
    process: TemplateProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("json", "jinja2", "markupsafe", "sitecustomize", "datetime"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PYTHONSTARTUP", str(tmp_path / "json.py"))
    assert rendered(process, "{{ strftime_now('x') }}") == "x"
    assert not (tmp_path / "executed").exists()


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="Linux shows the environment of a process")
def test_the_process_has_no_keys(process: TemplateProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMOE_API_KEY", "a-secret")
    rendered(process, "")
    assert b"a-secret" not in Path(f"/proc/{process._child.process.pid}/environ").read_bytes()


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX forks")
def test_a_forked_process_starts_its_own(process: TemplateProcess) -> None:
    rendered(process, "")
    reading, writing = os.pipe()
    if not (child := os.fork()):
        try:
            os.write(writing, rendered(process, "{{ text }}", text="child").encode())
            process.close()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reading, 100) == b"child"
    os.close(reading)
    os.close(writing)
    assert rendered(process, "{{ text }}", text="parent") == "parent"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "^roles must alternate$"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{% for %}", "[Ee]xpected"),
        ("{{ messages[0].missing.more }}", "no attribute 'missing'"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
    ],
)
def test_what_fails_is_named_and_the_process_goes_on(process: TemplateProcess, template: str, words: str) -> None:
    rendered(process, "")
    number = process._child.process.pid
    with pytest.raises(ChatTemplateError, match=words) as error:
        rendered(process, template, messages=[{}])
    assert not isinstance(error.value, ChatTemplateLimitError)
    assert rendered(process, "next") == "next" and process._child.process.pid == number


def test_texts_of_all_kinds_come_back(process: TemplateProcess) -> None:
    for text in ("", "\x00\r\n", "\ue000\U0010ffff", "half \ud800", "x" * 3_000_000):
        assert rendered(process, "{{ text }}", text=text) == text


def test_lists_within_lists_beyond_the_limit_of_python_are_refused(process: TemplateProcess) -> None:
    value: Any = []
    for _ in range(100_000):
        value = [value]
    with pytest.raises(ChatTemplateError, match="Recursion"):
        rendered(process, "{{ value }}", value=value)
    while value:  # taken apart by hand: its own end would be as deep
        value = value[0]


@pytest.mark.parametrize(
    "template",
    [
        " {% for m in messages %}\n{{ m.role }}{% if loop.first %}{% continue %}{% endif %}{% break %}\n{% endfor %}\n",
        "{{ messages | tojson }}{{ messages | tojson(indent=2) }}{{ messages | tojson(separators=(',', ':')) }}",
        "{{ messages | tojson(ensure_ascii=True) }}{{ messages | tojson(sort_keys=True) }}",
        "a{% generation %}{% set x = 1 %}{{ messages[0].content }}{% endgeneration %}b{{ x }}",
        "{% set n = namespace(found=false) %}{% set n.found = true %}{{ n.found }}{{ dict(a=1) }}{{ undefined_name }}",
        "{{ messages[1].reasoning_content }}{{ messages[1].thinking }}{{ messages[1].content is defined }}",
        "{{ tools is none }}{{ documents is none }}{{ add_generation_prompt }}{{ bos_token }}{{ eos_token }}",
    ],
)
def test_jinja_is_as_transformers_has_it(template: str) -> None:
    """The library's own rendering is the oracle."""
    from smoe.conversation.chat_template import ChatTemplate
    from smoe.conversation.conversation import Conversation

    tokenizer = ascii_tokenizer(template)
    messages = [
        {"role": "user", "content": "<b> é \u2028 'x'"},
        {"role": "assistant", "content": None, "reasoning_content": "thought"},
    ]
    expected = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ours = ChatTemplate(tokenizer)
    assert ours.write(Conversation(messages)) == expected
    ours.close()
