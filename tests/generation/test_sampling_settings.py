"""Would catch a choice of tokens that fails in the middle of a text, or ends the process."""

from __future__ import annotations

from typing import Any

import pytest

from smoe.errors import ConfigError
from smoe.generation.sampling_settings import Sampling


@pytest.mark.parametrize(
    ("setting", "value", "says"),
    [
        ("max_new_tokens", 0, "a whole number of at least 1"),
        ("temperature", -1.0, "0 .greedy. or more"),
        ("temperature", float("inf"), "0 .greedy. or more"),
        ("temperature", float("nan"), "0 .greedy. or more"),
        ("top_p", 0.0, "above 0 and at most 1"),
        ("top_p", float("nan"), "above 0 and at most 1"),
        ("min_p", -0.1, "between 0 .none. and 1"),
        ("min_p", 1.1, "between 0 .none. and 1"),
        ("min_p", float("nan"), "between 0 .none. and 1"),
        ("top_k", -1, "0 .all. or more"),
        ("repetition_window", 0, "at least 1"),
        ("repetition_penalty", 0.0, "between 0.01 and 100 .1: none."),
        ("repetition_penalty", 5e-324, "between 0.01 and 100 .1: none."),
        ("repetition_penalty", float("nan"), "between 0.01 and 100 .1: none."),
        ("seed", 2**63, "a whole number of 64 bits"),
        ("seed", -(2**63) - 1, "a whole number of 64 bits"),
    ],
)
def test_what_cannot_be_sampled_is_refused(setting: str, value: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=f"`{setting}` is {value}; it must be {says}") as error:
        Sampling(**{setting: value})
    assert error.value.facts["setting"] == setting and error.value.facts["allowed"]


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="`stop` was given an empty string; give the text at which generation ends"
    ) as error:
        Sampling(stop=("x", ""))
    assert error.value.facts["setting"] == "stop"


def test_the_ends_of_what_is_allowed() -> None:
    Sampling(max_new_tokens=1, temperature=0.0, top_p=1.0, top_k=0, min_p=1.0, seed=2**63 - 1)
    Sampling(temperature=None, top_p=None, top_k=None, repetition_penalty=None, min_p=None, seed=-(2**63))
