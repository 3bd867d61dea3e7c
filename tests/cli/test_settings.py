"""Would catch: a setting that no command line reaches, a value that is silently of another type."""

from __future__ import annotations

import ast
import inspect
from dataclasses import fields

import pytest

from smoe import bounds
from smoe import setting_declaration as settings
from smoe.bounds import AS_DTYPE
from smoe.cli import options
from smoe.cli import settings as cli_settings
from smoe.cli.options import EngineOptions
from smoe.cli.settings import OPTION_OF, SETTABLE, described, settings_of
from smoe.config import SETTINGS, EngineConfig
from smoe.errors import ConfigError

OPTIONS = {field.name for field in fields(EngineOptions)}
GIVEN = {
    "alpha_as_priced": ("false", False),
    "balance_order": ("tokens", "tokens"),
    "cache_records": ("model", "model"),
    "cache_weights": ("0.4, 0.3,0.2,0.1", (0.4, 0.3, 0.2, 0.1)),
    "cluster_timeout_seconds": ("2.5", 2.5),
    "cluster_verify": ("1/64", 1 / 64),
    "cluster_workers": ("3", 3),
    "dense_precision": ("dtype", "dtype"),
    "dilation": ("2.5", 2.5),
    "direct_io": ("off", "off"),
    "emulated_expert_bytes": ("9MiB", 9 * 2**20),
    "expert_cache": ("top-k", "top-k"),
    "image_tokens": ("256", 256),
    "io_threads": ("3", 3),
    "prefetch_asked": ("concurrent", "concurrent"),
    "prefetch_depth": ("2", 2),
    "prefetch_trial": ("on", True),
    "prefetch_what": ("chosen", "chosen"),
    "prefill_balance": ("off", False),
    "prefill_keep": ("eviction", "eviction"),
    "prefill_tokens": ("64", 64),
    "lend_reserve": ("off", False),
    "placement": ("round-robin", "round-robin"),
    "preload": ("off", False),
    "self_test": ("always", "always"),
    "recent_costs": ("4", 4),
    "score_window": ("8", 8),
    "draft_start": ("late", "late"),
    "draft_on": ("coordinator", "coordinator"),
    "draft_precision": ("int3", "int3"),
    "draft_extra": ("2", 2),
    "share_substitutes": ("false", False),
    "substitute_weights": ("inherited", "inherited"),
    "substitutes": ("drop", "drop"),
    "tpot_seconds": ("0.08", 0.08),
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
    prefetch = {"prefetch_depth": "stacked-gates", "prefetch_asked": "previous-token"}.get(name)
    prefetch = "draft-model" if name.startswith("draft") else prefetch
    eviction = "multidimensional" if name.startswith("cache_") else None
    others = {"device": device, "prefetch": prefetch, "eviction": eviction, "images": name == "image_tokens"}
    config = EngineOptions(settings=[f"{name}={text}"], **others).config()
    assert getattr(config, name) == value


def test_a_predictor_and_how_far_it_looks_are_given_together() -> None:
    config = EngineOptions(prefetch="stacked-gates", settings=["prefetch-depth=3"]).config()
    assert (config.prefetch, config.prefetch_depth) == ("stacked-gates", 3)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["prefill_keep"], "must be NAME=VALUE, such as io_threads=2; --set help lists all names"),
        (["eviction=lru"], "--set eviction: use its own option --eviction instead"),
        (["memory_bytes=3"], "use its own option --memory"),
        (
            ["prefill_kep=eviction"],
            "unknown --set 'prefill_kep'; did you mean prefill_keep? --set help lists all names",
        ),
        (["evicton=lru"], "did you mean --eviction? --set help lists all names"),
        (["xyzzy=1"], "unknown --set 'xyzzy'; --set help lists all names"),
        (["=1"], "--set is '=1'; it must be NAME=VALUE"),
        ([""], "--set is ''; it must be NAME=VALUE"),
        (["io_threads=two"], "`io_threads` is 'two'; it must be a whole number from 1 to 64"),
        (["prefill_balance=maybe"], "true or false"),
        (["cluster_verify=1/0"], "`cluster_verify` is '1/0'; it must be a number from 0"),
        (["cluster_verify=2"], "`cluster_verify` is 2.0; it must be a number from 0"),
        (["io_thread=2"], "unknown --set 'io_thread'; did you mean io_threads? --set help"),
        (["memori=2"], "did you mean --memory? --set help"),
        (["io_threads=2", "io_threads=3"], "gives io_threads twice"),
        (["io_threads=0"], "from 1 to 64"),
        (["prefetch_depth=0"], "`prefetch_depth` is 0; it must be a whole number from 1 to 16"),
        (["prefetch_depth=17"], "from 1 to 16"),
        (["io_threads=99999"], "from 1 to 64"),
        (["emulated_expert_bytes=9"], "`emulated_expert_bytes` is '9', which has no unit"),
        (["cache_weights=1,0,0"], "must be four numbers of at least 0 whose sum is 1"),
        (["cache_weights=1,a,0,0"], "`cache_weights` is '1,a,0,0'; it must be four numbers"),
        (["cache_weights=1,0,0,0"], "has an effect only with `eviction=multidimensional`"),
        (["cache_records=model"], "has an effect only with `eviction=multidimensional`"),
        (["dilation=5"], "has an effect only with `device=emulated`"),
        (["prefetch_depth=3"], "has an effect only with `prefetch=stacked-gates`"),
        (["prefill_keep=never"], "choose one of: last-uses, eviction"),
    ],
)
def test_what_cannot_be_understood_is_refused(given: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says.replace("?", r"\?")) as error:
        EngineOptions(settings=given).config()
    assert error.value.facts["setting"] in ("set", given[0].partition("=")[0]) and error.value.facts["allowed"]


@pytest.mark.parametrize("asked", ["help", "?"])
def test_all_names_are_listed_with_what_they_mean(run, monkeypatch, asked):
    monkeypatch.setenv("COLUMNS", "80")
    ran = run("record", "--set", asked)  # without the --out that it otherwise needs
    assert ran.code == 0 and ran.err == "" and max(map(len, ran.out.splitlines())) <= 80
    said = {entry["name"]: entry for entry in run("record", "--set", asked, "--json").json["settings"]}
    assert set(said) == set(SETTABLE)
    words = " ".join(ran.out.split())
    for name, entry in said.items():
        assert f"{name} {entry['meaning']} {entry['allowed']} (default: {entry['default']})" in words
        assert len(entry["meaning"]) <= 2 * 76, "two lines"
    assert said["prefill_keep"]["allowed"] == "last-uses, eviction" and said["prefill_keep"]["default"] == "last-uses"
    assert said["io_threads"] == said["io_threads"] | {"allowed": "a whole number from 1 to 64", "default": "2"}
    assert said["prefill_balance"]["default"] == "true"


@pytest.mark.parametrize("name", SETTABLE)
def test_a_default_can_be_given(name):
    """Would catch a list that names what is refused; a default of None is in words of its own."""
    (entry,) = [entry for entry in described() if entry["name"] == name]
    default = getattr(EngineConfig(), name)
    if default is None:
        assert entry["default"] != "None"
    else:
        assert settings_of([f"{name}={entry['default']}"]) == {name: default}


def test_a_setting_is_declared_in_one_place():
    """`EngineConfig`; would catch a list of settings elsewhere that has to be changed with it."""
    for module in (bounds, settings, cli_settings, options):
        nodes = ast.parse(inspect.getsource(module)).body
        assigned = [node for node in nodes if isinstance(node, (ast.Assign, ast.AnnAssign))]
        named = {each.value for node in assigned for each in ast.walk(node) if isinstance(each, ast.Constant)}
        assert not named & (set(SETTINGS) - {AS_DTYPE}), module.__name__  # also a value of `activations`
