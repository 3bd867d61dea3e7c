"""Marks rows of a batch whose text has ended, so that their experts are not loaded, during transformers' `generate`.

transformers computes a finished row, on padding tokens, until the last row ends, and discards the results. The experts
that these tokens choose would be loaded, so the engine leaves them out (`runtime/engine.py`). This is done only if the
caller cannot notice it: greedy search or sampling that returns nothing but tokens, with a cache of its own and an end
token. Without an end token, transformers continues rows that its criteria call done. A custom logits processor that
mixes the rows of a batch would notice it; those of transformers do not mix rows.
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
    """Marks finished rows in the KV cache of the `generate` call that is running."""

    def __init__(self) -> None:
        self._is_plain = False
        self._cache: RowCache | None = None

    @contextmanager
    def observed(self, is_plain: bool) -> Iterator[None]:
        """Observe one `generate` call of the model during the `with` block. `is_plain`: whether the call uses
        transformers' own decoding loop."""
        before = self._is_plain, self._cache
        self._is_plain, self._cache = is_plain, None
        try:
            yield
        finally:
            self._is_plain, self._cache = before

    def note_cache(self, cache: RowCache, generation_config: Any, mode: Any) -> None:
        """Store the cache that transformers has created for this `generate` call, if finished rows may be left out."""
        if self._is_plain and mode in _PLAIN and cache.rows > 1 and not generation_config.return_dict_in_generate:
            self._cache = cache

    def listening(self, stopping_criteria: Callable[..., StoppingCriteriaList]) -> Callable[..., StoppingCriteriaList]:
        """Wrap transformers' `_get_stopping_criteria` so that the cache receives the results of the criteria."""

        def criteria(*args: Any, **kwargs: Any) -> StoppingCriteriaList:
            found = stopping_criteria(*args, **kwargs)
            if self._cache is None or not any(hasattr(each, "eos_token_id") for each in found):
                return found
            return _ObservedCriteria(found, self._cache)

        return criteria


class _ObservedCriteria(StoppingCriteriaList):  # type: ignore[misc]
    """transformers' list of criteria, which also passes its results to the cache."""

    def __init__(self, criteria: StoppingCriteriaList, cache: RowCache) -> None:
        super().__init__(criteria)
        self._cache = cache

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        done: torch.Tensor = super().__call__(input_ids, scores, **kwargs)
        self._cache.end_rows(done)
        return done
