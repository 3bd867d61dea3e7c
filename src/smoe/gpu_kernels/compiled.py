"""From text to kernels: Triton compiles them for the GPU when they are first launched, or interprets them on a CPU.

Triton is there where torch for CUDA is; elsewhere nothing here may be called but `is_available`. With
`TRITON_INTERPRET=1` in the environment before Triton is first imported, kernels run on the CPU, one program after the
other: for tests.
"""

from __future__ import annotations

import functools
import hashlib
import linecache
from importlib.util import find_spec
from typing import Any, NamedTuple

from smoe.gpu_kernels.source import ExpertKind, Tile, source_of


class Kernels(NamedTuple):
    """The kernels of a kind, for a number of tokens (`source.py`)."""

    experts_of: Any
    weighted_sum: Any
    """The sum alone."""


@functools.cache
def is_available() -> bool:
    """Whether Triton is installed."""
    return find_spec("triton") is not None


def kernels_of(kind: ExpertKind, tokens: int, tile: Tile | None = None) -> Kernels:
    """The kernels of a kind for entries of so many tokens."""
    text = source_of(kind, tokens, tile)
    name = f"<smoe slot experts {hashlib.sha256(text.encode()).hexdigest()[:16]}>"
    # Triton reads its functions' text as Python's tools do, from the file that they say they come from
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    found: dict[str, Any] = {"__name__": __name__}
    exec(compile(text, name, "exec"), found)
    return Kernels(found["experts_of"], found["weighted_sum"])
