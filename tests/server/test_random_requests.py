"""Whatever is asked, the answer is the API's: would catch a field whose odd values end in an error of ours."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from smoe.server.fields import ChatAsked, CompletionAsked, ResponseAsked
from tests.server.conftest import Running, eventually

TEXT = st.text(max_size=8) | st.sampled_from(["text", "function", "json_object", "json_schema", "required", "\ud800"])
SCALARS = st.none() | st.booleans() | st.integers(-3, 300) | st.integers() | st.floats() | TEXT
NAMES = st.sampled_from(
    ["type", "role", "content", "text", "name", "function", "parameters", "arguments", "schema", "format", "call_id"]
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES | TEXT, inner, max_size=4), max_leaves=8
)
WORDS: list[dict[str, str]] = [{"role": "user", "content": "Who?"}]
PATHS: dict[str, tuple[dict[str, Any], type]] = {
    "/v1/chat/completions": ({"messages": WORDS, "max_tokens": 2}, ChatAsked),
    "/v1/completions": ({"prompt": "Once", "max_tokens": 2}, CompletionAsked),
    "/v1/responses": ({"input": "Who?", "max_output_tokens": 2}, ResponseAsked),
}


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """A good request with some of its fields replaced."""
    path = draw(st.sampled_from(list(PATHS)))
    body, asked = PATHS[path]
    odd = draw(st.dictionaries(st.sampled_from(list(asked.model_fields)), VALUES, max_size=3))  # type: ignore[attr-defined]
    short = {name: value for name, value in odd.items() if not (value is None and name in body)}  # not to the end
    return path, {"model": "demo", **body, **short}


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(asked=requests())
def test_odd_requests_are_answered_or_refused(running: Running, asked: tuple[str, dict[str, Any]]) -> None:
    path, body = asked
    answer = running.http("POST", path, body)
    assert answer.status in (200, 400, 404, 429), (answer, body)
    if answer.status != 200:
        assert answer.error["message"] and answer.error["type"]
    elif answer.headers["content-type"] == "application/json":
        assert json.loads(answer.text)["model"] == "demo"
    else:
        assert "server_error" not in answer.text


def test_nothing_is_left_of_them(running: Running) -> None:
    eventually(lambda: running.serving.running == running.serving.waiting == 0)
    assert running.chat().choices and running.serving.state == "ok"
