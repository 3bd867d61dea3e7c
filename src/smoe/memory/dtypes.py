"""Element types of weights, by the names that files and torch have for them: known without torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch


class Dtype(NamedTuple):
    """One of the types that experts are served in."""

    name: str
    """torch's."""
    stored: str
    """That of safetensors files."""
    itemsize: int
    """Bytes of an element."""

    def __str__(self) -> str:
        return self.name

    @property
    def torch(self) -> torch.dtype:
        """torch's own, which loads torch."""
        import torch

        found: torch.dtype = getattr(torch, self.name)
        return found


BF16, F16, F32 = DTYPES = (Dtype("bfloat16", "BF16", 2), Dtype("float16", "F16", 2), Dtype("float32", "F32", 4))
BY_NAME = {each.name: each for each in DTYPES}
STORED = frozenset(each.stored for each in DTYPES)
"""Their names in safetensors files."""
