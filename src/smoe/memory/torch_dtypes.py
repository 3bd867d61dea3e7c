"""torch's element types of weights, by the names that files have for them."""

from __future__ import annotations

from smoe.memory.dtypes import DTYPES

TORCH = {each.stored: each.torch for each in DTYPES}
"""torch's type by the safetensors name: those that experts are served in."""
SAFETENSORS = {dtype: name for name, dtype in TORCH.items()}
"""The safetensors name by torch's type."""
