"""Who may reach a server. Would catch one that listens to a network without having been told who may ask."""

from __future__ import annotations

import re
from typing import Any

import pytest

from smoe.errors import ConfigError
from smoe.server.settings import ServerConfig, is_loopback


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.2", "my-machine", "127.0.0.1.evil.example", ""])
def test_other_addresses_need_a_key_or_a_word(host: str) -> None:
    with pytest.raises(ConfigError, match="no_auth") as refused:
        ServerConfig(host=host)
    assert refused.value.setting == "host"
    assert ServerConfig(host=host, api_key="k").api_key == "k"
    assert ServerConfig(host=host, no_auth=True).no_auth


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "localhost", "LOCALHOST.", "::1", "[::1]"])
def test_this_machine_needs_none(host: str) -> None:
    assert ServerConfig(host=host).is_local and is_loopback(host)


@pytest.mark.parametrize(
    "wrong",
    [
        {"port": -1},
        {"port": 65536},
        {"max_waiting": 0},
        {"max_body_bytes": 10},
        {"drain_seconds": -1.0},
        {"drain_seconds": float("inf")},
        {"drain_seconds": float("nan")},
        {"api_key": ""},
        {"api_key": "two words"},
        {"api_key": "schl\u00fcssel"},
        {"allow_origin": ("chat.example",)},
        {"allow_origin": ("https://chat.example/page",)},
    ],
)
def test_what_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as refused:
        ServerConfig(**wrong)
    assert refused.value.setting == next(iter(wrong))


@pytest.mark.parametrize(
    ("key", "why"),
    [
        ("", "`api_key` is empty"),
        ("one\ntwo", "`api_key` has 2 lines"),
        ("two words", "`api_key` has a space (character 4)"),
        ("a\tb", "`api_key` has an unprintable character (character 2)"),
        ("schl\u00fcssel", "`api_key` has a letter outside ASCII (character 5)"),
    ],
)
def test_the_reason_why_a_key_cannot_be_is_named_without_the_key(key: str, why: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(why)) as refused:
        ServerConfig(api_key=key)
    assert not key or key not in str(refused.value)


def test_a_key_is_not_shown() -> None:
    assert "secret" not in repr(ServerConfig(api_key="secret"))
