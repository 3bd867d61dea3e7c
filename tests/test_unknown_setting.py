"""What a user reads who gives a setting that there is none of: one line with what to give instead."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from transformers import PreTrainedModel

from smoe import from_pretrained
from smoe.config import SETTINGS
from smoe.errors import ConfigError
from smoe.unknown_setting import _NAMES, unknown_setting


@pytest.mark.parametrize(
    ("given", "advice"),
    [
        ({"memmory": "8GiB"}, "did you mean `memory`?"),
        ({"memory_byte": 1}, "did you mean `memory`?"),
        ({"residnet": "40%"}, "did you mean `resident`?"),
        ({"presset": "smoe"}, "did you mean `preset`?"),
        ({"context_token": 512}, "did you mean `context_tokens`?"),
        ({"context": 512}, "did you mean `context_tokens`?"),
        ({"process_memory": "8GiB"}, 'give `memory` and `count="process"`.'),
        ({"torch_dtype": "bfloat16"}, "did you mean `dtype`?"),
        ({"device_map": "auto"}, "leave it out; `memory` says how much stays in memory, `device` where it computes."),
        ({"load_in_4bit": True}, "give `precision=int4`"),
        ({"max_new_tokens": 20}, "it is an argument of model.generate."),
        ({"zzz": 1}, "no setting has a similar name."),
    ],
)
def test_one_line_names_what_was_meant(given: dict[str, Any], advice: str) -> None:
    with pytest.raises(ConfigError) as error:
        from_pretrained("demo", **given)
    message = str(error.value)
    assert message.startswith(f"unknown setting {next(iter(given))!r}: {advice}")
    assert message.endswith("help(smoe.config.EngineConfig) and docs/python.md list all settings")
    assert len(message) < 200
    assert error.value.facts["setting"] == next(iter(given))


def test_only_names_that_are_taken_are_suggested() -> None:
    """Would catch a suggestion that is refused in its turn."""
    own = inspect.signature(from_pretrained).parameters.keys() - {"model", "switches"}
    assert set(_NAMES) <= own | set(SETTINGS) and own <= set(_NAMES)


def test_no_argument_of_the_library_is_taken_for_a_misspelling() -> None:
    """Those that say where and how it loads; would catch `cache_dir` answered with `cache_weights`."""
    named = inspect.signature(PreTrainedModel.from_pretrained).parameters.keys() & {"cache_dir", "local_files_only"}
    for name in named | {"token", "device_map", "quantization_config", "attn_implementation", "trust_remote_code"}:
        assert "did you mean" not in str(unknown_setting(name, None))
