"""Ends a single call of `generate` from another thread or from a signal handler."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import StoppingCriteria


class Cancellation(StoppingCriteria):  # type: ignore[misc]
    """A stopping criterion that any thread, or a signal handler, can trigger to end a call of `generate`.

        stop = Cancellation()
        threading.Timer(10, stop.cancel).start()
        model.generate(**prompt, stopping_criteria=[stop])

    If the call has generated tokens, it returns them at its next token. A call without tokens waits for its turn or
    reads its prompt; it raises `GenerationCancelledError` at its next layer. The object stays cancelled: a later call
    that uses it raises the error at once. Several calls may share one object.
    """

    def __init__(self) -> None:
        self._is_cancelled = False
        self._have_tokens: set[int] = set()
        """Threads whose call has new tokens."""
        self._wakes: list[Callable[[], None]] = []

    def cancel(self) -> None:
        """End all running and later calls of `generate` that use this object. Repeated calls have no effect."""
        self._is_cancelled = True
        for wake in tuple(self._wakes):
            wake()

    @property
    def is_cancelled(self) -> bool:
        """Whether `cancel` was called."""
        return self._is_cancelled

    @property
    def ends_without_tokens(self) -> bool:
        """Whether the calling thread's `generate` must end although it has generated no token to return."""
        return self._is_cancelled and threading.get_ident() not in self._have_tokens

    @contextmanager
    def waking(self, wake: Callable[[], None]) -> Iterator[None]:
        """Let `cancel` call the function `wake` during the `with` block. Used by the thread of one call of `generate`,
        to wake it while it waits for its turn."""
        self._wakes.append(wake)
        try:
            yield
        finally:
            self._wakes.remove(wake)
            self._have_tokens.discard(threading.get_ident())

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Return a flag for each row of the batch, [rows], where True means to stop. The library calls this after every
        new token."""
        self._have_tokens.add(threading.get_ident())
        return torch.full((input_ids.shape[0],), self._is_cancelled, dtype=torch.bool, device=input_ids.device)
