"""A shadow on a machine of its own: the model's text as far as it has come here, and the thread that runs ahead in it.

from main   keys and values of 0 .. n | token n+1 | keys and values of n+1 | token n+2 | ...
here        a copy of main's cache -----`-> begin    (the shadow's own cache is aligned from it, as on main)
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PretrainedConfig

from smoe.models.kv_cache import RowCache
from smoe.runtime.running_ahead import RunningAhead

_PATIENCE_SECONDS = 10.0
"""For a step that was cancelled to end."""


class ReadAlong:
    """Owned by the thread that hears main (`cluster/shadow_process.py`)."""

    def __init__(
        self, ahead: RunningAhead, config: PretrainedConfig, pattern: RowCache, capacity: int, nbytes: int
    ) -> None:
        """`pattern`: a cache of the shadow's that something was written to; `nbytes`: of all memory that it takes."""
        self.capacity, self.nbytes = capacity, nbytes
        self._ahead = ahead
        self._config, self._pattern = config, pattern
        self._text: int | None = None
        self._cache = RowCache(config, 1, capacity)

    @property
    def position_bytes(self) -> int:
        """Of keys and values, all layers'."""
        return self._pattern.position_bytes

    def learn(self, text: int, begin: int, end: int, rows: Any) -> None:
        """Keys and values of these positions of a text, as bytes. Raises `ValueError` where some before them are
        missing."""
        self._turn_to(text, begin)
        self._cache.put_in(torch.frombuffer(bytearray(rows), dtype=torch.uint8), begin, end, self._pattern)

    def begin(self, text: int, position: int, token: int) -> None:
        """Main decodes this token. Raises `ValueError` where keys and values before it are missing."""
        self._turn_to(text, position)
        if self._cache.length != position or position >= self.capacity:
            raise ValueError(
                f"{self._cache.length} of {position} positions are here, there is room for {self.capacity}"
            )
        self._ahead.begin(token, self._cache)

    def pause(self) -> None:
        """Main decodes nothing that can be followed."""
        self._ahead.pause()

    def close(self) -> None:
        """End the thread and the shadow's engine; any number of times."""
        self._ahead.close()

    def _turn_to(self, text: int, position: int) -> None:
        """What is here of another text, or behind this position, is out of date."""
        if text == self._text and position >= self._cache.length:
            return
        self._ahead.pause(self._cache)
        self._ahead.wait(_PATIENCE_SECONDS)  # it may be reading what is about to change
        if text != self._text:
            self._text, self._cache = text, RowCache(self._config, 1, self.capacity)
        self._cache.rewind(min(position, self._cache.length))
        self._ahead.pause(self._cache)
