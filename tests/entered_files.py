"""Which source files calls enter: what tests count that hold a step, a request and a load to few files."""

from __future__ import annotations

from types import FrameType
from typing import Any

_CODE_OF_FUNCTION = 1
"""A flag of code objects: CO_OPTIMIZED, which module and class bodies do not have."""


class Watch:
    """A profile function. It notes the file below src/smoe of every call of ours, on all threads that begin while it is
    set."""

    def __init__(self) -> None:
        self.files: dict[str, None] = {}
        """In the order of their first entry."""

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_flags & _CODE_OF_FUNCTION and "/smoe/" in code.co_filename:
            self.files.setdefault(code.co_filename.rsplit("/smoe/", 1)[1])
