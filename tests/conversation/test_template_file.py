"""Chat templates from files of the user. Would catch a file that is refused only by the first request, an error that
does not say what to change, and an example of the documentation that does not work.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from smoe.conversation.chat_template import ChatTemplate
from smoe.conversation.conversation import Conversation
from smoe.conversation.template_file import read_template
from smoe.errors import ConfigError
from smoe.server.output.families import format_of
from smoe.server.output.tool_calls_json import JsonCalls
from tests.toy import TEMPLATE, ascii_tokenizer

PAGE = Path(__file__).parents[2] / "docs/serve.md"
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "rain", "parameters": {"type": "object"}}}
CALL = {"type": "function", "function": {"name": "rain", "arguments": {"city": "Ulm"}}}


def test_a_template_is_read_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "own.jinja"
    path.write_text(TEMPLATE)
    assert read_template(path) == TEMPLATE


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "cannot be read: No such file or directory"),
        (b"\xff\xfe", "cannot be read"),
        (b"one\n{% for m in messages %}", r"line 2 is not valid Jinja: Unexpected end of template"),
        (b"{{ raise_exception('system first') }}", "one user message: system first"),
        (b"{{ messages[0].content.text.upper() }}", "one user message: .*has no attribute"),
        (b"# A page about templates\n", "leaves out the user's message"),
    ],
    ids=["missing", "no text", "no Jinja", "refuses", "fails", "another file"],
)
def test_what_cannot_be_used_is_refused_with_the_reason(tmp_path: Path, content: bytes | None, why: str) -> None:
    path = tmp_path / "own.jinja"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=f"{re.escape(str(path))} \\(`chat_template`\\) .*{why}") as caught:
        read_template(path)
    assert (caught.value.setting, caught.value.given) == ("chat_template", str(path))


def test_the_page_s_template_offers_tools_and_writes_calls(tmp_path: Path) -> None:
    path = tmp_path / "tools.jinja"
    (template,) = re.findall(r"^```jinja\n(.*?)^```", PAGE.read_text(encoding="utf8"), re.S | re.M)
    path.write_text(template)
    assert isinstance(format_of(read_template(path)).calls, JsonCalls)
    written = ChatTemplate(ascii_tokenizer(template))
    try:
        plain = written.write(Conversation([{"role": "user", "content": "Hi"}]))
        messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
        called = written.write(Conversation(messages, [TOOL]))
    finally:
        written.close()
    assert plain == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert '\n{"type": "function", "function": {"name": "rain"' in called
    assert '\n<tool_call>{"name": "rain", "arguments": {"city": "Ulm"}}</tool_call><|im_end|>\n' in called
