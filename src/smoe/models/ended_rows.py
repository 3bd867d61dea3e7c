"""Rows of a batch whose text has ended, observed through the library's stopping criteria while it generates.

The library computes such a row until the last one ends, feeding it padding, and throws the outcome away. Its routes
would load experts, so the engine leaves them out (`runtime/engine.py`). Only where it makes no difference for the
caller: in plain greedy or sampled generation that returns nothing but tokens, into a cache of its own, and where there
is an end token, without which the library goes on writing rows that its criteria call done. A logits processor that
mixes the rows of a batch would see one too; the library's own do not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import StoppingCriteriaList
from transformers.generation import GenerationMode

from smoe.models.kv_cache import RowCache

_PLAIN = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)


class EndedRows:
    """Tells the cache of the running `generate` which of its rows have ended."""

    def __init__(self) -> None:
        self._is_plain = False
        self._cache: RowCache | None = None

    @contextmanager
    def heard(self, is_plain: bool) -> Iterator[None]:
        """Around one `generate`; `is_plain`: by the library's own decoding."""
        before = self._is_plain, self._cache
        self._is_plain, self._cache = is_plain, None
        try:
            yield
        finally:
            self._is_plain, self._cache = before

    def note_cache(self, cache: RowCache, generation_config: Any, mode: Any) -> None:
        """The library's `generate` got this cache, and nothing else uses it."""
        if self._is_plain and mode in _PLAIN and cache.rows > 1 and not generation_config.return_dict_in_generate:
            self._cache = cache

    def listening(self, stopping_criteria: Callable[..., StoppingCriteriaList]) -> Callable[..., StoppingCriteriaList]:
        """The library's `_get_stopping_criteria`, whose criteria we hear."""

        def criteria(*args: Any, **kwargs: Any) -> StoppingCriteriaList:
            found = stopping_criteria(*args, **kwargs)
            if self._cache is None or not any(hasattr(each, "eos_token_id") for each in found):
                return found
            return _ObservedCriteria(found, self._cache)

        return criteria


class _ObservedCriteria(StoppingCriteriaList):  # type: ignore[misc]
    """The library's list of criteria; the cache gets their results."""

    def __init__(self, criteria: StoppingCriteriaList, cache: RowCache) -> None:
        super().__init__(criteria)
        self._cache = cache

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        done: torch.Tensor = super().__call__(input_ids, scores, **kwargs)
        self._cache.end_rows(done)
        return done
