"""Element types of weights, by the names that files and torch have for them."""

from __future__ import annotations

import torch

TORCH = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
"""torch's type by the safetensors name: those that experts are served in."""
SAFETENSORS = {dtype: name for name, dtype in TORCH.items()}
"""The safetensors name by torch's type."""
