"""What an expert is to the rest of the program: a key and a precision.

Weights never change, so an expert in a faster tier is a copy and evicting it is forgetting it.
"""

from __future__ import annotations

from typing import TypeAlias

Copy: TypeAlias = tuple[int, int, int]
"""(layer, expert, precision): one expert's weights at one precision; precision 0 is the checkpoint's own."""

EXACT = 0
"""The precision of the checkpoint itself, the only one that lossless serving uses."""
