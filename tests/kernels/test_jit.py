"""Sources of machine code. Would catch a search for garbage among the instructions, half of what generating takes."""

from __future__ import annotations

import gc

from smoe.kernels.jit import Source


def test_text_is_generated_without_collections() -> None:
    assert Source(lambda: str(gc.isenabled())).text() == "False"
    assert gc.isenabled()
