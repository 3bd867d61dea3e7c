"""torch's dtypes of expert weights, and their names in safetensors files."""

from __future__ import annotations

from smoe.memory.dtypes import DTYPES

TORCH = {each.stored: each.torch for each in DTYPES}
"""The torch dtypes that experts may have, by the names in safetensors files."""
SAFETENSORS = {dtype: name for name, dtype in TORCH.items()}
"""The names in safetensors files, by torch dtype."""
