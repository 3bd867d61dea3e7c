"""Lets a draft model on another machine follow the coordinator's text: stores the text's keys and values as they
arrive, and decodes ahead on a thread.

The lines show what the coordinator sends and what happens on this machine, time to the right. `n` is the number of a
position:

    coordinator sends   keys and values of 0 .. n | token n+1 | keys and values of n+1 | token n+2 | ...
    this machine        stored in a cache --------`-> decodes token n+1, after aligning the draft model with that cache
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PretrainedConfig

from smoe.models.kv_cache import RowCache
from smoe.runtime.running_ahead import RunningAhead

_PATIENCE_SECONDS = 10.0
"""The longest wait for a cancelled step to end."""


class ReadAlong:
    """A draft model that follows the coordinator's text. Only the thread that receives messages may use it
    (`cluster/draft_process.py`)."""

    def __init__(
        self, ahead: RunningAhead, config: PretrainedConfig, pattern: RowCache, capacity: int, nbytes: int
    ) -> None:
        """`pattern`: a cache of the draft model that has been written to, which shows the layout of keys and values.
        `capacity`: the number of positions. `nbytes`: the bytes of memory that the draft model and its caches take."""
        self.capacity, self.nbytes = capacity, nbytes
        self._ahead = ahead
        self._config, self._pattern = config, pattern
        self._text: int | None = None
        self._cache = RowCache(config, 1, capacity)

    @property
    def position_bytes(self) -> int:
        """The size in bytes of the keys and values of one position, in all layers."""
        return self._pattern.position_bytes

    def learn(self, text: int, begin: int, end: int, rows: Any) -> None:
        """Store the keys and values of the positions `begin` to `end` - 1 of a text, given as bytes in `rows`. Raise
        `ValueError` if earlier positions are missing."""
        self._turn_to(text, begin)
        self._cache.put_in(torch.frombuffer(bytearray(rows), dtype=torch.uint8), begin, end, self._pattern)

    def begin(self, text: int, position: int, token: int) -> None:
        """Decode the token at `position` of a text with the draft model, while the coordinator decodes the same token.
        Raise `ValueError` if keys and values of earlier positions are missing."""
        self._turn_to(text, position)
        if self._cache.length != position or position >= self.capacity:
            raise ValueError(
                f"the draft model has the keys and values of {self._cache.length} of the {position} earlier "
                f"positions, and room for {self.capacity} positions"
            )
        self._ahead.begin(token, self._cache)

    def pause(self) -> None:
        """Stop decoding: the coordinator reads a prompt or decodes a batch, which a draft model cannot follow."""
        self._ahead.pause()

    def close(self) -> None:
        """End the thread and the draft model's engine. Repeated calls have no effect."""
        self._ahead.close()

    def _turn_to(self, text: int, position: int) -> None:
        """Drop stored positions: all of them if they belong to another text, else those from `position` on."""
        if text == self._text and position >= self._cache.length:
            return
        self._ahead.pause(self._cache)
        self._ahead.wait(_PATIENCE_SECONDS)  # the thread may be reading the cache that is about to change
        if text != self._text:
            self._text, self._cache = text, RowCache(self._config, 1, self.capacity)
        self._cache.rewind(min(position, self._cache.length))
        self._ahead.pause(self._cache)
