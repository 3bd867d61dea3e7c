"""What an expert is to the rest of the program: a key.

Weights never change, so an expert in a faster tier is a copy, and evicting it is forgetting it.
"""

from __future__ import annotations

from typing import TypeAlias

ExpertKey: TypeAlias = tuple[int, int, int]
"""(layer, expert, format): one expert's weights in one form; what tables, plans and loads are keyed by.

A plain tuple, as a step of a layer makes and compares dozens of them."""

EXACT = 0
"""The format of the checkpoint itself, the only one that lossless serving uses."""

LOW = 1
"""The format of the lower copy that a missing expert of little importance may come in."""
