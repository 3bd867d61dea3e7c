"""The element types of expert weights, with their names in files and in torch. This module does not import torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch


class Dtype(NamedTuple):
    """An element type of expert weights in slots."""

    name: str
    """The type's name in torch."""
    stored: str
    """The type's name in safetensors files."""
    itemsize: int
    """The number of bytes per element."""

    def __str__(self) -> str:
        return self.name

    @property
    def torch(self) -> torch.dtype:
        """The type as a torch dtype. Reading this imports torch."""
        import torch

        found: torch.dtype = getattr(torch, self.name)
        return found


BF16, F16, F32 = DTYPES = (Dtype("bfloat16", "BF16", 2), Dtype("float16", "F16", 2), Dtype("float32", "F32", 4))
BY_NAME = {each.name: each for each in DTYPES}
STORED = frozenset(each.stored for each in DTYPES)
"""The safetensors names of these types."""
