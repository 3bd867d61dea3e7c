"""torch dtypes of weights by their names in files."""

from __future__ import annotations

from smoe.memory.dtypes import DTYPES

TORCH = {each.stored: each.torch for each in DTYPES}
"""torch dtypes by safetensors name, for the dtypes of experts."""
SAFETENSORS = {dtype: name for name, dtype in TORCH.items()}
"""Safetensors names by torch dtype."""
