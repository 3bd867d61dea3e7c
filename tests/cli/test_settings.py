"""Would catch: a setting that no command line reaches, a value that is silently of another type."""

from __future__ import annotations

from dataclasses import fields

import pytest

from smoe.cli.options import EngineOptions
from smoe.cli.settings import OPTION_OF, SETTABLE, settings_of
from smoe.config import EngineConfig
from smoe.errors import ConfigError

OPTIONS = {field.name for field in fields(EngineOptions)}
GIVEN = {
    "alpha_as_priced": ("false", False),
    "balance_order": ("tokens", "tokens"),
    "dilation": ("2.5", 2.5),
    "direct_io": ("off", "off"),
    "emulated_expert_bytes": ("9MiB", 9 * 2**20),
    "io_threads": ("3", 3),
    "prefetch_trial": ("on", True),
    "prefetch_what": ("chosen", "chosen"),
    "prefill_balance": ("off", False),
    "prefill_keep": ("eviction", "eviction"),
    "prefill_tokens": ("64", 64),
    "recent_costs": ("4", 4),
    "score_window": ("8", 8),
    "share_substitutes": ("false", False),
    "substitute_weights": ("inherited", "inherited"),
    "substitutes": ("drop", "drop"),
    "turn_timeout_seconds": ("1.5", 1.5),
}


def test_every_setting_has_a_way_in() -> None:
    settings = {field.name for field in fields(EngineConfig)}
    assert settings - OPTIONS - OPTION_OF.keys() == set(SETTABLE) == GIVEN.keys(), (
        "a new setting: say here how it is given"
    )


@pytest.mark.parametrize("name", GIVEN)
def test_values_have_their_type(name: str) -> None:
    text, value = GIVEN[name]
    assert settings_of([f"{name.replace('_', '-')}={text}"]) == {name: value}
    device = "emulated" if name in ("dilation", "emulated_expert_bytes") else None
    config = EngineOptions(settings=[f"{name}={text}"], device=device).config()
    assert getattr(config, name) == value


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["prefill_keep"], "NAME=VALUE, where NAME is one of: alpha_as_priced"),
        (["eviction=lru"], "--set eviction: use --eviction"),
        (["memory_bytes=3"], "use --memory"),
        (["prefill_kep=eviction"], "did you mean 'prefill_keep'?"),
        (["io_threads=two"], "--set io_threads=two: it must be a whole number"),
        (["prefill_balance=maybe"], "true or false"),
        (["io_threads=2", "io_threads=3"], "gives io_threads twice"),
        (["io_threads=0"], "from 1 to 64"),
        (["io_threads=99999"], "from 1 to 64"),
        (["emulated_expert_bytes=9"], "no unit"),
        (["dilation=5"], "belongs to `device` emulated"),
        (["prefill_keep=never"], "choose one of: last-uses, eviction"),
    ],
)
def test_what_cannot_be_understood_is_refused(given: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says.replace("?", r"\?")):
        EngineOptions(settings=given).config()
