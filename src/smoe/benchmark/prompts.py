"""Makes prompts of an exact length from a seed, in plain English."""

from __future__ import annotations

import random
from typing import Any

_SUBJECTS = ("the little girl", "her brother", "an old farmer", "the grey cat", "a small bird", "my friend Tom")
_VERBS = ("found", "carried", "looked for", "wanted", "hid", "painted", "dropped", "shared")
_OBJECTS = ("a red ball", "the warm bread", "some flowers", "a wooden box", "the last apple", "a long letter")
_PLACES = ("in the garden", "near the river", "behind the house", "at school", "under a tree", "by the window")


def prompt_ids(tokenizer: Any, tokens: int, seed: int) -> list[int]:
    """Return exactly `tokens` token ids of simple English sentences, drawn from a seed."""
    generator = random.Random(seed)
    ids = list(tokenizer(_sentence(generator))["input_ids"])
    while len(ids) < tokens:
        ids += tokenizer(" " + _sentence(generator), add_special_tokens=False)["input_ids"]
    return ids[:tokens]


def _sentence(generator: random.Random) -> str:
    words = [generator.choice(choices) for choices in (_SUBJECTS, _VERBS, _OBJECTS, _PLACES)]
    return " ".join(words).capitalize() + "."
