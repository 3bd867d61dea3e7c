"""Bodies that cost a parser much for their size: each is wrong, so that nothing of it reaches the model."""

from __future__ import annotations

from collections.abc import Callable

_CHAT, _TEXT = "/v1/chat/completions", "/v1/completions"


def _filled(unit: bytes, nbytes: int, begin: bytes = b"[", end: bytes = b"]") -> bytes:
    """The unit again and again between two marks, without what follows its last one."""
    return begin + (unit * max(1, nbytes // len(unit)))[:-1] + end


def _keys(nbytes: int) -> bytes:
    names = b"".join(b'"%07d":1,' % number for number in range(max(1, nbytes // 12)))
    return b"{" + names[:-1] + b"}"


_FIELDS: dict[str, tuple[str, str, Callable[[int], bytes]]] = {
    "one key again and again": (_TEXT, "logit_bias", lambda n: _filled(b'"a":1,', n, b"{", b"}")),
    "keys, the last one twice": (_TEXT, "logit_bias", lambda n: _keys(n)[:-1] + b',"0000000":1}'),
    "unknown keys": (_TEXT, "stream_options", _keys),
    "deep lists": (_TEXT, "prompt", lambda n: b"[" * (n // 2) + b"]" * (n // 2)),
    "deep objects": (_TEXT, "logit_bias", lambda n: b'{"a":' * (n // 5)),
    "wrong numbers": (_TEXT, "prompt", lambda n: _filled(b"-1,", n)),
    "wrong texts": (_TEXT, "stop", lambda n: _filled(b'"",', n)),
    "empty lists": (_TEXT, "prompt", lambda n: _filled(b"[],", n)),
    "lists of wrong items": (_TEXT, "prompt", lambda n: _filled(b"[1,-1],", n)),
    "empty messages": (_CHAT, "messages", lambda n: _filled(b"{},", n)),
    "small messages": (_CHAT, "messages", lambda n: _filled(b'{"role":"user","content":"a"},', n)),
    "small parts": (
        _CHAT,
        "messages",
        lambda n: _filled(b'{"type":"text","text":"a"},', n, b'[{"role":"user","content":[', b"]}]"),
    ),
    "a huge number": (_TEXT, "seed", lambda n: b"9" * n),
    "a huge fraction": (_TEXT, "temperature", lambda n: b"0." + b"9" * n),
    "many numbers": (_TEXT, "prompt", lambda n: _filled(b"1e9,", n)),
    "escapes": (_TEXT, "stop", lambda n: b'"' + b"\\u0041" * (n // 6) + b'"'),
    "escaped quotes": (_TEXT, "stop", lambda n: b'"' + b'\\"' * (n // 2) + b'"'),
    "half characters": (_TEXT, "prompt", lambda n: b'"' + b"\\ud800" * (n // 6) + b'"'),
    "spaces": (_TEXT, "prompt", lambda n: b" " * n),
}
HEAVY = tuple(_FIELDS)
"""The kinds."""


def heavy_body(kind: str, model: str, nbytes: int) -> tuple[str, bytes]:
    """The path that it is sent to, and a body of about so many bytes."""
    path, field, make = _FIELDS[kind]
    good = f'{{"model":"{model}","temperature":0,"messages":[{{"role":"user","content":"x"}}]'
    head = f'{{"model":"{model}"' if path == _TEXT or field == "messages" else good
    return path, f'{head},"{field}":'.encode() + make(nbytes - len(head) - 64) + b"}"
