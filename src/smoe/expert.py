"""The key that identifies an expert throughout the program.

Weights never change. An expert in a faster tier (host or device memory) is therefore a copy, and evicting it means
dropping the copy.
"""

from __future__ import annotations

from typing import TypeAlias

ExpertKey: TypeAlias = tuple[int, int, int]
"""(layer, expert, format): the key of one expert's weights in one format, in tables, plans and loads.

It is a plain tuple because dozens are created and compared in every layer of every step.
"""

EXACT = 0
"""The checkpoint's own format, the only one that lossless serving uses."""

LOW = 1
"""The format of the low-precision copies, which can replace missing experts of little importance."""
