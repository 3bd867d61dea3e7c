"""Turn text into Triton kernels, which are compiled on first launch, or interpreted on a CPU for tests.

Triton is installed with torch for CUDA; elsewhere only `is_available` may be called. With `TRITON_INTERPRET=1` in the
environment before Triton's first import, kernels run on the CPU, one program after the other.
"""

from __future__ import annotations

import functools
import hashlib
import linecache
from importlib.util import find_spec
from typing import Any, NamedTuple

from smoe.gpu_kernels.source import ExpertKind, Tile, source_of


class Kernels(NamedTuple):
    """The kernels for a kind of experts and a number of tokens (`source.py`)."""

    experts_of: Any
    weighted_sum: Any
    """The kernel of the sum alone."""


@functools.cache
def is_available() -> bool:
    """Return whether Triton is installed."""
    return find_spec("triton") is not None


def kernels_of(kind: ExpertKind, tokens: int, tile: Tile | None = None) -> Kernels:
    """Return the kernels for a kind of experts, with entries of `tokens` tokens."""
    text = source_of(kind, tokens, tile)
    name = f"<smoe slot experts {hashlib.sha256(text.encode()).hexdigest()[:16]}>"
    # Triton reads the text of functions from their file, via linecache
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    found: dict[str, Any] = {"__name__": __name__}
    exec(compile(text, name, "exec"), found)
    return Kernels(found["experts_of"], found["weighted_sum"])
