"""Sets the number of threads with which torch computes, for a limited time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Let torch compute with `count` threads during the `with` block, in the calling thread. The previous number of
    threads is restored at the end, also after an error."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(count)
        yield
    finally:
        torch.set_num_threads(before)
