"""Makes Triton kernels from generated text. Triton compiles them at their first launch, or interprets them on a CPU for
tests.

Triton is installed with torch for CUDA; without Triton only `is_available` may be called. If the environment has
`TRITON_INTERPRET=1` before Triton is first imported, kernels run on the CPU, one program after the other.
"""

from __future__ import annotations

import functools
import hashlib
import linecache
from importlib.util import find_spec
from typing import Any, NamedTuple

from smoe.gpu_kernels.source import ExpertKind, Tile, source_of


class Kernels(NamedTuple):
    """The compiled Triton kernels for one kind of experts and one number of tokens (`source.py`)."""

    experts_of: Any
    weighted_sum: Any
    """The kernel that only computes the sum."""


@functools.cache
def is_available() -> bool:
    """Return whether Triton is installed."""
    return find_spec("triton") is not None


def kernels_of(kind: ExpertKind, tokens: int, tile: Tile | None = None) -> Kernels:
    """Return the kernels for experts of one kind. In a launch, each expert may have up to `tokens` tokens."""
    text = source_of(kind, tokens, tile)
    name = f"<smoe slot experts {hashlib.sha256(text.encode()).hexdigest()[:16]}>"
    # Triton reads the text of functions from their file, via linecache
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    found: dict[str, Any] = {"__name__": __name__}
    exec(compile(text, name, "exec"), found)
    return Kernels(found["experts_of"], found["weighted_sum"])
