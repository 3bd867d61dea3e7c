"""A KV cache with a fixed capacity: values are written at given positions, and attention receives slices of the
storage.

Only addresses are reserved. On a CPU, the system allocates memory when positions are written. `back` counts positions
in blocks before they are written, so that the owner of this memory can free other uses first.

Positions follow from the `length` of the whole cache, which changes when a pass has succeeded, and not from counters in
the layers. So a position may be written twice: nothing must be undone after a failed pass, or after a look-ahead
through a later layer. The slices have the same shapes as those of transformers' DynamicCache, also with sliding
windows, so attention computes the same bits.

Layers with linear attention or convolutions use transformers' own state objects, because their state has no positions.
"""

from __future__ import annotations

import math
import mmap
import weakref
from contextlib import suppress
from typing import Any, Protocol

import torch
from transformers import DynamicCache, PretrainedConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from smoe.errors import ContextError, EngineStateError
from smoe.memory.arena import DONT_NEED, GIVES_BACK, anonymous, system_madvise
from smoe.memory.store import PAGE, page_ceil
from smoe.policy.budget import BLOCK_TOKENS, backed_positions


class CacheMemory(Protocol):
    """The owner of the memory that several KV caches share, who can free other uses of this memory."""

    def note_growth(self) -> None:
        """Free memory that has other uses, because a cache is about to write positions that have no memory yet."""


class RowCache(DynamicCache):
    """A KV cache of `rows` sequences with up to `capacity_tokens` tokens each."""

    layers: list[Any]

    def __init__(
        self, config: PretrainedConfig, rows: int, capacity_tokens: int, room: weakref.ref[CacheMemory] | None = None
    ) -> None:
        """Create an empty cache. `room`: is called before further positions get memory."""
        super().__init__(config=config)
        self._room = room
        self._backed = [0] * rows
        """The number of positions of every row that may have memory."""
        self.rows = rows
        self.capacity_tokens = capacity_tokens
        self.length = 0
        """The number of committed tokens of the longest row."""
        self.start = 0
        """The storage index of the first token; above 0 only in windows (`kv_window.py`)."""
        self.row_lengths: list[int] | None = None
        """The number of committed tokens of each row if the texts differ in length; all rows end at the same index.
        None: all have `length` tokens."""
        self.ended: torch.Tensor | None = None
        """A mask [rows] of the finished rows, whose results are not used; None if there are none."""
        self.given: list[int] | None = None
        """The number of real tokens, at the end of each row, in the next pass; None if all tokens are real."""
        self._pending = 0
        self._is_retired = False
        self.layers = [_positioned(layer, self) for layer in self.layers]

    def begin(self, tokens: int, rows: int) -> None:
        """Start a forward pass over `tokens` new positions of `rows` rows.

        Raises `ContextError` if they exceed the capacity, and `EngineStateError` for another number of rows.
        """
        self.check_alive()
        if self._pending and not self.can_rewind:
            raise EngineStateError(
                "a failed forward pass has left the states of recurrent layers incomplete; start a new cache"
            )
        if rows != self.rows:
            raise EngineStateError(
                f"this cache was made for {self.rows} sequences, and the input has {rows}; make a cache for the "
                "input's number of sequences"
            )
        if self.length + tokens > self.capacity_tokens:
            end = self.length + tokens
            raise self._too_small(end, f"{end} tokens", "shorten the prompt")
        self._pending = tokens
        self.back(0, rows, self.start + self.length + tokens)

    def back(self, first: int, rows: int, end: int) -> None:
        """Record that `rows` rows from row `first` on take memory up to the storage index `end`. Call this before
        positions are written."""
        backed, grown = backed_positions(end, self.capacity_tokens), False
        for row in range(first, first + rows):
            if backed > self._backed[row]:
                self._backed[row], grown = backed, True
        room = self._room() if grown and self._room is not None else None
        if room is not None:
            room.note_growth()

    @property
    def backed_tokens(self) -> int:
        """The number of positions, in all rows, for which the operating system may have allocated memory."""
        return 0 if self._is_retired else sum(self._backed)

    def give_back(self, row: int, end: int) -> None:
        """Return the memory of a row's positions from the storage index `end` on to the operating system."""
        blocks = min(-(-end // BLOCK_TOKENS) * BLOCK_TOKENS, self.capacity_tokens)
        if not GIVES_BACK or self._backed[row] <= blocks:
            return
        for tensor in (each for store in self._stores for each in store if each.device.type == "cpu"):
            for strip in tensor[row, :, blocks:].unbind(0):
                _let_go(strip)
        self._backed[row] = blocks

    def check_room(self, prompt_tokens: int, new_tokens: int) -> None:
        """Raise `ContextError` if a prompt and new tokens in each row would exceed the cache's capacity. The last new
        token takes no position. A call that generates tokens checks this before anything is computed."""
        positions = prompt_tokens + new_tokens - 1
        if positions <= self.capacity_tokens:
            return
        excess = positions - self.capacity_tokens
        fewer = f"shorten the prompt by {excess}"
        if excess < new_tokens:
            fewer = f"lower `max_new_tokens` by {excess}, {fewer}"
        what = (
            f"a prompt of {prompt_tokens} tokens and {new_tokens} new tokens need {positions} positions (the last new "
            "token needs none), which"
        )
        raise self._too_small(positions, what, fewer)

    def _too_small(self, tokens: int, what: str, fewer: str) -> ContextError:
        """Return the error that `tokens` tokens in a row exceed the capacity. `what`: the phrase that names these
        tokens in the message; `fewer`: advice for the message how to need fewer tokens."""
        if self.rows == 1:
            room, more, needed = "", "`context_tokens`", f"at least {tokens} for these tokens"
        else:
            room = f" for each of {self.rows} sequences"
            more = "`context_tokens` or `max_sequences`, whose product all sequences share"
            needed = f"as many as make {tokens * self.rows} positions with `max_sequences`"
        return ContextError(
            f"{what} do not fit the context of {self.capacity_tokens} tokens for which memory is reserved{room}; "
            f"{fewer} or raise {more}",
            setting="context_tokens",
            given=self.capacity_tokens,
            allowed=needed,
        )

    def commit(self) -> None:
        """Add the positions that a successful forward pass has written to the cache's length."""
        self.check_alive()
        self.length += self._pending
        if self.row_lengths is not None:
            self.row_lengths = self.row_keys(self._pending)
        self._pending, self.given = 0, None

    def row_keys(self, tokens: int) -> list[int]:
        """Return the number of tokens of each row, including the tokens of a pass over `tokens` columns. Only for texts
        that differ in length."""
        assert self.row_lengths is not None
        given = self.given or [tokens] * self.rows
        return [length + new for length, new in zip(self.row_lengths, given, strict=True)]

    def padding(self, tokens: int) -> torch.Tensor | None:
        """Return a mask [rows, tokens], True for the padding of a pass; None if there is no padding."""
        if self.given is None:
            return None
        first = torch.tensor([tokens - new for new in self.given]).unsqueeze(1)
        return torch.arange(tokens).unsqueeze(0) < first

    def get_seq_length(self, layer_idx: int = 0, *args: Any, **kwargs: Any) -> int:
        return self.length

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens; the argument is negative, as in transformers."""
        self.rewind(self.length + tokens_to_remove)

    def begin_after(self, length: int) -> None:
        """Count the first `length` positions as written, so that the next token comes after them."""
        self.length = length

    def rewind(self, length: int) -> None:
        """Keep only the first `length` tokens. Raises `EngineStateError` if a layer has a recurrent state."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot rewind a cache of {self.length} tokens to {length}")
        if length < self.length and not self.can_rewind:
            raise EngineStateError(
                "tokens cannot be removed from this cache, because the model has layers with a recurrent state; start "
                "a new cache"
            )
        self.length = length

    def take_over(self, other: RowCache, begin: int, end: int) -> None:
        """Copy the keys and values of the positions `begin` to `end` - 1 of every row from `other`, the KV cache of a
        copy of this model.

        This cache then has at least `end` positions. Raise `EngineStateError` if layers have a recurrent state. Raise
        `ValueError` for positions that `other` lacks, that exceed the capacity, or that would leave a gap.
        """
        self.check_alive()
        other.check_alive()
        if not (self.can_rewind and other.can_rewind):
            raise EngineStateError(
                "this model has layers with a recurrent state, so another cache cannot take over single positions"
            )
        has_place = begin <= self.length and end <= self.capacity_tokens
        if self.rows != other.rows or not (0 <= begin <= end <= other.length and has_place):
            raise ValueError(
                f"a cache of {self.rows} rows and {self.length} tokens cannot take over the positions {begin} to "
                f"{end} of a cache of {other.rows} rows and {other.length} tokens"
            )
        self.back(0, self.rows, self.start + end)
        for mine, theirs in zip(self.layers, other.layers, strict=True):
            if theirs._store is not None:
                for to, source in zip(mine._reserved(theirs._store), theirs._store, strict=True):
                    at, of = self.start, other.start
                    to[:, :, at + begin : at + end] = source[:, :, of + begin : of + end]
        self.length = max(self.length, end)

    def taken_out(self, begin: int, end: int) -> torch.Tensor:
        """Return the keys and values of the positions `begin` to `end` - 1 as bytes in main memory, for `put_in`.

        The caller must prevent writes to these positions during the call. Raise `EngineStateError` if the cache is
        retired.
        """
        self.check_alive()
        place = slice(self.start + begin, self.start + end)
        parts = [each[:, :, place] for store in self._stores for each in store]
        return torch.cat([each.reshape(-1).view(torch.uint8) for each in parts]).cpu()

    def put_in(self, rows: torch.Tensor, begin: int, end: int, like: RowCache) -> None:
        """Append the keys and values of the positions `begin` to `end` - 1, given as the bytes that `taken_out` has
        returned. `like`: a used cache of the same model.

        Raise `ValueError` if the number of bytes differs, or if the positions do not follow those in this cache.
        """
        nbytes = (end - begin) * like.position_bytes
        if not (begin == self.length and begin < end <= self.capacity_tokens) or rows.numel() != nbytes:
            raise ValueError(
                f"positions {begin} to {end} cannot be appended from {rows.numel()} bytes: the cache has "
                f"{self.length} tokens and room for {self.capacity_tokens}, and each position takes "
                f"{like.position_bytes} bytes"
            )
        at = 0
        self.back(0, self.rows, self.start + end)
        for layer, theirs in zip(self.layers, like.layers, strict=True):
            for to in () if theirs._store is None else layer._reserved(theirs._store):
                part = to[:, :, self.start + begin : self.start + end]
                size = part.numel() * part.element_size()
                part.copy_(rows[at : at + size].view(to.dtype).view(part.shape))
                at += size
        self.length = end

    @property
    def position_bytes(self) -> int:
        """The size in bytes of the keys and values of one position in all layers and rows; 0 before the first write."""
        ones = [each[:, :, :1] for store in self._stores for each in store]
        return sum(each.numel() * each.element_size() for each in ones)

    @property
    def _stores(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The storages of keys and values of all layers that have been written."""
        stores = (getattr(layer, "_store", None) for layer in self.layers)
        return [store for store in stores if store is not None]

    @property
    def can_rewind(self) -> bool:
        """Whether all layers store keys and values by position, so that the cache can be shortened. Layers with sliding
        windows do, because they store every position."""
        return all(isinstance(layer, (Positioned, _PositionedSliding)) for layer in self.layers)

    def reset(self) -> None:
        self.length = self._pending = 0
        for row in range(self.rows):
            self.give_back(row, 0)
        for layer in self.layers:
            if not isinstance(layer, (Positioned, _PositionedSliding)):
                layer.reset()

    def is_in(self, memory: CacheMemory) -> bool:
        """Return whether `memory` is the owner of this cache's memory."""
        return self._room is not None and self._room() is memory

    @property
    def is_retired(self) -> bool:
        """Whether the cache has released its memory."""
        return self._is_retired

    def retire(self) -> None:
        """Release the cache's memory; any later use raises `EngineStateError`."""
        self._is_retired = True
        for layer in self.layers:
            if isinstance(layer, _Storage):
                layer._store = None

    def check_alive(self) -> None:
        """Raise `EngineStateError` if the cache has released its memory."""
        if self._is_retired:
            raise EngineStateError(
                "a newer cache uses the part of the memory budget that this cache had; use one cache at a time, or "
                "raise `context_tokens`"
            )

    def end_rows(self, done: torch.Tensor) -> None:
        """Mark as finished the rows for which `done` [rows] is True. Their tokens need no experts any more."""
        self.ended = done if self.ended is None else self.ended | done

    @property
    def reserved_tokens(self) -> int:
        """The number of positions for which this cache takes memory from the budget, in all rows."""
        return 0 if self._is_retired else self.rows * self.capacity_tokens

    @property
    def nbytes(self) -> int:
        """The size in bytes of the allocated storages of all layers."""
        return sum(t.numel() * t.element_size() for store in self._stores for t in store)


class _Storage:
    """Keys and values of one layer: two tensors [rows, heads, capacity, head size], allocated at the first write."""

    _owner: RowCache
    _store: tuple[torch.Tensor, torch.Tensor] | None

    def _write(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Write the keys and values [rows, heads, new positions, head size] of one layer at the positions that follow
        the cache's length. Return both storages and the index after the last written position."""
        owner = self._owner
        owner.check_alive()  # a cache retired during the pass would otherwise continue with zeros
        stored_keys, stored_values = self._reserved((keys, values))
        start = owner.start + owner.length
        end = start + keys.shape[-2]
        stored_keys[:, :, start:end] = keys
        stored_values[:, :, start:end] = values
        return stored_keys, stored_values, end

    def _reserved(self, like: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the storages of one layer's keys and values. If they do not exist yet, allocate them with the shapes
        of `like`, except for the number of positions."""
        if self._store is None:
            room = self._owner.capacity_tokens
            keys, values = (_zeros(t, (t.shape[0], t.shape[1], room, t.shape[3])) for t in like)
            self._store = keys, values
        return self._store

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Copy row `beam_idx[b]` of the keys and values to row b, for every b (beam search)."""
        if self._store is not None:
            for tensor in self._store:
                used = tensor[:, :, : self._owner.length]  # without an offset: beam search uses no windows
                used.copy_(used[beam_idx.to(tensor.device)])


class Positioned(_Storage, DynamicLayer):
    """The KV cache of a layer with full attention, in which every position attends to all earlier positions."""

    def __init__(self, owner: RowCache) -> None:
        super().__init__()
        self._owner, self._store = owner, None

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        keys, values, end = self._write(key_states, value_states)
        self.is_initialized = True
        start = self._owner.start
        return keys[:, :, start:end], values[:, :, start:end]

    def place(self) -> tuple[torch.Tensor, torch.Tensor, int, int] | None:
        """Return the memory in which machine code writes the next position: (keys, values, the index of the row's first
        token, the index to write). Return None before the first write. Only for caches with one row."""
        owner, store = self._owner, self._store
        if store is None:
            return None
        owner.check_alive()
        return *store, owner.start, owner.start + owner.length

    def reserved_place(self, like: torch.Tensor, heads: int, size: int) -> tuple[torch.Tensor, torch.Tensor, int, int]:
        """Return the same as `place`. Before the first write, allocate storage for `heads` heads of `size` numbers of
        the type of `like`."""
        if self._store is None:
            head = like.new_empty(1, heads, 0, size)
            self._reserved((head, head))
            self.is_initialized = True
        found = self.place()
        assert found is not None, "the storage was reserved"
        return found

    def get_seq_length(self) -> int:
        return self._owner.length

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        return self._owner.length + _count(query_length), 0


class _PositionedSliding(_Storage, DynamicSlidingWindowLayer):
    """The KV cache of a layer with sliding attention. The last `window - 1` committed positions and the new ones are
    visible."""

    def __init__(self, owner: RowCache, sliding_window: int) -> None:
        super().__init__(sliding_window)
        self._owner, self._store = owner, None

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        keys, values, end = self._write(key_states, value_states)
        self.is_initialized = True
        begin = self._owner.start + self._begin()
        return keys[:, :, begin:end], values[:, :, begin:end]

    def get_seq_length(self) -> int:
        return self._owner.length

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        begin = self._begin()
        return self._owner.length - begin + _count(query_length), begin

    def _begin(self) -> int:
        return max(self._owner.length - int(self.sliding_window) + 1, 0)


def _zeros(like: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Return zeros of the type of `like`; on a CPU pages get memory only when they are written."""
    nbytes = math.prod(shape) * like.element_size()
    if like.device.type != "cpu" or not nbytes:
        return like.new_zeros(shape)
    memory = anonymous(nbytes)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with suppress(OSError):  # huge pages would allocate far more than is written; some kernels lack them
            memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=like.dtype).view(shape)


def _let_go(strip: torch.Tensor) -> None:
    """Return whole pages of contiguous memory to the system. They are read as zeros afterwards."""
    begin = page_ceil(strip.data_ptr())
    end = (strip.data_ptr() + strip.numel() * strip.element_size()) // PAGE * PAGE
    if begin < end:
        system_madvise()(begin, end - begin, DONT_NEED)


def _positioned(layer: Any, owner: RowCache) -> Any:
    """Return smoe's cache layer that replaces a cache layer of transformers. If that layer stores no positions, return
    it unchanged."""
    if type(layer) is DynamicLayer:
        return Positioned(owner)
    if type(layer) is DynamicSlidingWindowLayer:
        return _PositionedSliding(owner, layer.sliding_window)
    return layer


def _count(query_length: Any) -> int:
    """Return the number of queries of a pass. Some versions of transformers pass the queries' positions instead of
    their number."""
    return int(query_length.shape[0]) if isinstance(query_length, torch.Tensor) else int(query_length)
