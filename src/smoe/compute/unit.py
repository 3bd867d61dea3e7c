"""What computes experts beside the device: the CPU, or one day another machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Protocol

import torch

from smoe.expert import ExpertKey
from smoe.memory.streams import Fetched


class ComputeUnit(Protocol):
    """Computes the experts that a plan gives it (`Serve.unit`). Belongs to the computing thread."""

    busy_seconds: float
    """Time spent computing."""

    def submit(self, key: ExpertKey, hidden: Fetched, tokens: Sequence[int]) -> Future[torch.Tensor]:
        """Compute an expert for some rows of hidden [T, H]; the result [n, H] is on the CPU.

        Never blocks; what fails raises at `Future.result()`.
        """

    def measured(self) -> Iterator[tuple[float, int]]:
        """(seconds, rows) of every expert computed since the last call."""

    def drain(self) -> None:
        """Forget what has not begun and wait for what has."""

    def start_anew(self) -> None:
        """Nothing under way, nothing counted."""

    def close(self) -> None:
        """Stop its threads; any number of times."""
