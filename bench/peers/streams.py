"""Forced token streams: the ids every engine is fed, so that all of them do the same work.

`zipf` draws with exponent 1 over a fixed random order of the vocabulary: like text it repeats tokens, so experts repeat
too. `uniform` draws every id alike, which is the hardest case for an expert cache. Ids 0 and 1 (begin and end of
sequence) are never drawn.
"""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np

StreamKind = Literal["zipf", "uniform"]
STREAM_KINDS: tuple[str, ...] = get_args(StreamKind)

SPECIAL_TOKENS = 2
RANK_SEED = 99  # which id is the most frequent one; apart from the stream's seed, so that seeds share their favourites


def forced_tokens(kind: str, count: int, seed: int, vocabulary: int) -> list[int]:
    """Return `count` token ids in [2, vocabulary), the same for equal arguments on every machine."""
    if kind not in STREAM_KINDS:
        raise ValueError(f"unknown stream {kind!r}; choose one of {', '.join(STREAM_KINDS)}")
    ids = np.random.default_rng(RANK_SEED).permutation(np.arange(SPECIAL_TOKENS, vocabulary))
    weights = np.ones(len(ids)) if kind == "uniform" else 1.0 / (np.arange(len(ids)) + 1.0)
    draws = np.random.default_rng(seed).choice(len(ids), size=count, p=weights / weights.sum())
    return [int(token) for token in ids[draws]]
