"""Requests as nobody would send them on purpose: made of the API's description, of good ones with odd fields, of bytes.

    described   a body that fits the description, or on purpose does not (schemathesis)
    odd fields  a good request, some of whose fields are anything
    usual       good requests with fields that are right, so that much is answered
    heavy       bodies that cost a parser much for their size (`heavy_bodies.py`)
    raw         bodies that are no JSON, or hardly; media types, encodings, origins, methods and paths of all kinds

New tokens and texts are few in all of them, so that many end in little time: four tokens, and three texts a prompt.
"""

from __future__ import annotations

import gzip
import json
import urllib.parse
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from hypothesis import strategies as st

from bench.serve.heavy_bodies import HEAVY, heavy_body
from smoe.server.fields import ChatAsked, CompletionAsked, RequestFields
from smoe.server.response_fields import ResponseAsked

MOST_TOKENS, MOST_TEXTS = 4, 3
_HEAVY_BYTES = (2_000, 60_000, 200_000, (4 << 20) - 1024, 6 << 20)
"""Of bodies that cost much: the last ones are just within the server's bound, and beyond it."""
TEXT = st.text(max_size=8) | st.sampled_from(["text", "function", "json_object", "json_schema", "required", "\ud800"])
SCALARS = st.none() | st.booleans() | st.integers(-3, 300) | st.integers() | st.floats() | TEXT
NAMES = st.sampled_from(
    ["type", "role", "content", "text", "name", "function", "parameters", "arguments", "schema", "format", "call_id"]
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES | TEXT, inner, max_size=4), max_leaves=8
)
PATHS: dict[str, tuple[dict[str, Any], type[RequestFields]]] = {
    "/v1/chat/completions": ({"messages": [{"role": "user", "content": "Who?"}]}, ChatAsked),
    "/v1/completions": ({"prompt": "Once"}, CompletionAsked),
    "/v1/responses": ({"input": "Who?"}, ResponseAsked),
}
_WORDS = st.text(max_size=30) | st.sampled_from(
    ["Once upon a time", "Tom", " ", "<|im_end|>", "\u00e9\U0001f600", "a" * 200]
)
_GOOD: dict[Any, st.SearchStrategy[Any]] = {
    "temperature": st.floats(0, 2),
    "top_p": st.floats(0.01, 1),
    "top_k": st.integers(0, 9000),
    "repetition_penalty": st.floats(0.01, 100),
    "seed": st.integers(-(2**63), 2**63 - 1),
    "stream": st.booleans(),
}
_COMPLETING: dict[Any, st.SearchStrategy[Any]] = {
    "n": st.integers(1, MOST_TEXTS),
    "stop": st.text(min_size=1, max_size=3) | st.lists(st.text(min_size=1, max_size=3), max_size=4),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "logit_bias": st.dictionaries(st.integers(0, 4095).map(str), st.floats(-100, 100), max_size=3),
    "stream_options": st.fixed_dictionaries({"include_usage": st.booleans()}),
}
_SCHEMAS = st.sampled_from(
    [{"type": "object"}, {"enum": ["a", 1, None]}, {"type": "array", "items": {"type": "integer"}, "maxItems": 2}, {},
     {"type": "string", "pattern": "[a-c]{1,3}"}, {"anyOf": [{"type": "null"}, {"type": "boolean"}]}, {"type": "king"}]
)  # fmt: skip
_GOOD_OF: dict[str, dict[Any, st.SearchStrategy[Any]]] = {
    "/v1/chat/completions": _COMPLETING
    | {
        "messages": st.lists(
            st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "assistant"]), "content": _WORDS}),
            min_size=1,
            max_size=4,
        ),
        "top_logprobs": st.integers(0, 20),
        "response_format": st.just({"type": "json_object"})
        | _SCHEMAS.map(lambda schema: {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}),
        "chat_template_kwargs": st.dictionaries(st.text(max_size=5), SCALARS, max_size=2),
    },
    "/v1/completions": _COMPLETING
    | {
        "prompt": _WORDS
        | st.lists(_WORDS, min_size=1, max_size=3)
        | st.lists(st.integers(0, 4095), min_size=1, max_size=260),
        "logprobs": st.integers(0, 20),
    },
    "/v1/responses": {
        "input": _WORDS,
        "instructions": _WORDS,
        "store": st.booleans(),
        "metadata": st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=2),
        "text": _SCHEMAS.map(lambda schema: {"format": {"type": "json_schema", "name": "x", "schema": schema}}),
    },
}
_TOKENS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "n_predict", "num_predict")
_JSON = {"Content-Type": "application/json"}


class Raw(NamedTuple):
    """A request as it goes over the line."""

    kind: str
    method: str
    path: str
    body: bytes | None
    headers: dict[str, str]


def short(path: str, body: Any) -> Any:
    """The same body with few new tokens and texts: what was right stays right, what was wrong stays wrong."""
    if not isinstance(body, dict):
        return body
    body = dict(body)
    if path.startswith("/api/"):
        options = {} if body.get("options") is None else body["options"]
        if isinstance(options, dict):
            body["options"] = {
                "num_predict": MOST_TOKENS,
                **options,
                **_at_most(options, "num_predict", MOST_TOKENS, (-1, -2)),
            }
        return body
    own = "max_output_tokens" if path.endswith("responses") else "max_tokens"
    if body.get(own) is None and body.get("max_completion_tokens") is None:
        body[own] = MOST_TOKENS
    for name in _TOKENS:
        body |= _at_most(body, name, MOST_TOKENS, (-1,))
    return body | _at_most(body, "n", MOST_TEXTS)


def _at_most(body: dict[str, Any], name: str, most: int, endless: Sequence[int] = ()) -> dict[str, Any]:
    """`endless`: values that mean as many as there is room for."""
    value: Any = body.get(name)
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return {}
    is_more = most < value < 2**31 and (name != "n" or value <= 128) and value == int(value)
    return {name: most} if is_more or value in endless else {}


@st.composite
def odd_fields(draw: st.DrawFn, model: str) -> Raw:
    """A good request with some of its fields replaced."""
    path = draw(st.sampled_from(list(PATHS)))
    body, asked = PATHS[path]
    odd = draw(st.dictionaries(st.sampled_from(list(asked.model_fields)), VALUES, max_size=3))
    sent = short(path, {"model": model, **body, **odd})
    return Raw("odd fields", "POST", path, json.dumps(sent).encode(), _JSON)


@st.composite
def usual(draw: st.DrawFn, model: str) -> Raw:
    """A good request with fields of all kinds."""
    path = draw(st.sampled_from(list(PATHS)))
    fields = draw(st.fixed_dictionaries({}, optional=_GOOD | _GOOD_OF[path]))
    if path.endswith("chat/completions") and "top_logprobs" in fields:
        fields["logprobs"] = True
    sent = short(path, {"model": model, **PATHS[path][0], **fields})
    return Raw("usual", "POST", path, json.dumps(sent).encode(), _JSON)


@st.composite
def raw(draw: st.DrawFn, model: str) -> Raw:
    """A request one of whose parts is wrong below its fields."""
    path = draw(st.sampled_from(list(PATHS)))
    body = json.dumps(short(path, {"model": model, **PATHS[path][0]})).encode()
    method, headers, target = "POST", dict(_JSON), path
    kind = draw(st.sampled_from(["body", "headers", "method", "path"]))
    if kind == "body":
        body = draw(_bodies(body))
    elif kind == "headers":
        headers |= draw(_headers(body))
        if "gzip" in headers.get("Content-Encoding", ""):
            body = gzip.compress(body)
    elif kind == "method":
        method = draw(st.sampled_from(["GET", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "QUERY"]))
    else:
        target = "/" + urllib.parse.quote(draw(st.text(max_size=30)), safe="/?&=;:@", errors="replace")
        method = draw(st.sampled_from(["GET", "POST", "HEAD"]))
    return Raw(f"raw {kind}", method, target, body if method not in ("GET", "HEAD") else None, headers)


@st.composite
def heavy(draw: st.DrawFn, model: str) -> Raw:
    """A body that costs a parser much."""
    path, body = heavy_body(draw(st.sampled_from(HEAVY)), model, draw(st.sampled_from(_HEAVY_BYTES)))
    return Raw("heavy", "POST", path, body, _JSON)


def _bodies(good: bytes) -> st.SearchStrategy[bytes]:
    """Bytes in the place of a body."""
    text = good.decode()
    places = st.integers(1, len(good) - 1)
    depths = st.sampled_from([50, 99, 100, 101, 500, 990, 5000, 200_000])
    more: Callable[[str], bytes] = lambda field: (text[:-1] + ", " + field + "}").encode()  # noqa: E731
    return (
        st.binary(max_size=40)
        | st.text(max_size=20).map(lambda each: each.encode("utf8", "surrogatepass"))
        | places.map(lambda cut: good[:cut])
        | st.tuples(places, st.integers(0, 255), st.integers(0, 1)).map(  # a byte more, or another one
            lambda each: good[: each[0]] + bytes([each[1]]) + good[each[0] + each[2] :]
        )
        | depths.map(lambda depth: more('"user": ' + "[" * depth + "]" * depth))
        | depths.map(lambda depth: b'{"a":' * depth)
        | st.integers(1, 6000).map(lambda digits: more('"seed": ' + "9" * digits))
        | st.sampled_from(["NaN", "Infinity", "-Infinity", "1e999", "-1e400", "1e-999", "0.0", "-0", "1E2"]).map(
            lambda number: more(f'"temperature": {number}')
        )
        | st.sampled_from([r"\ud800", r"\udc00\ud800", r"\ud83d\ude00", r"\u0000", r"\uFFFF"]).map(
            lambda letters: more(f'"user": "{letters}"')
        )
        | st.just(more('"model": "twice"'))
        | st.sampled_from(["utf-16", "utf-32", "utf-8-sig", "latin-1"]).map(lambda form: text.encode(form))
    )


def _headers(good: bytes) -> st.SearchStrategy[dict[str, str]]:
    """Headers in the place of usual ones, or beside them."""
    kinds = st.sampled_from(
        ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "json", "", ";",
         "application/json; charset=x", "application/json;charset=UTF-8", "application/problem+json", "application/"]
    )  # fmt: skip
    letters = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), max_size=20).map(str.strip)
    return (
        (kinds | letters).map(lambda value: {"Content-Type": value})
        | st.sampled_from(["gzip", "br", "deflate", "identity", "gzip, gzip", "", "x"]).map(
            lambda value: {"Content-Encoding": value}
        )
        | (letters | st.sampled_from(["null", "https://page.example", "http://", "://", "http://[", "[::1"])).map(
            lambda each: {"Origin": each}
        )
        | (letters | st.sampled_from(["evil.example", "[::1", "localhost:x"])).map(lambda value: {"Host": value})
        | letters.map(lambda value: {"Authorization": value})
        | letters.map(lambda value: {"Accept": value, "X-Anything": value * 50})
    )
