"""The routing of one layer in one step, and the letters for array sizes in the whole program.

    T  tokens of the step (padding tokens are routed to the sentinel expert E)
    K  experts chosen per token (top-k)
    E  routed experts of a layer; the index E itself means "no expert" (the library's own sentinel for skipped tokens)
    H  hidden size          I  inner size of one expert          L  layers

A *route* is one (token, choice) pair; route r of a step is token r // K, choice r % K.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from itertools import islice
from typing import NamedTuple

LAST_TOKENS = 32
"""The number of last prompt tokens that decide which experts stay resident after a prefill; all prompts of a batch
share it.

Sharing this number gives slightly more hits than using as many tokens of each prompt (docs/log/prefill.md), and the
cost does not depend on the batch size.
"""


class Phase(Enum):
    """The two phases of generation, which are planned by different rules."""

    PREFILL = "prefill"
    DECODE = "decode"


class Routing(NamedTuple):
    """The routing of one layer in one step: the input of `plan_layer`."""

    layer: int
    phase: Phase
    experts: int
    """E: the number of the layer's routed experts. The index E marks a padding route."""
    top_k_index: Sequence[Sequence[int]]
    """[T, K] the experts that the model's router chose."""
    scores: Sequence[Sequence[float]] | None = None
    """[T, E] the scores by which experts are chosen: after softmax or sigmoid, with the selection bias, and minus
    infinity for masked experts. A prefill has only the rows of `last_rows`. None if no policy needs scores."""
    sequences: int = 1
    """The number of sequences. The rows of one sequence follow those of another; all have the same number of rows, with
    padding."""
    weights: Sequence[Sequence[float]] | None = None
    """[T, K] routing weights of the chosen experts, each row scaled to sum 1. None if no policy needs them."""
    low: frozenset[int] = frozenset()
    """The experts that are so unimportant in this step that a low-precision copy suffices (`policy/importance.py`),
    whether resident or not."""


def real_rows(routing: Routing) -> list[int] | None:
    """Return the rows that need experts: rows that are neither padding nor of a finished sequence. Return None if all
    rows need experts."""
    rows = [row for row, chosen in enumerate(routing.top_k_index) if min(chosen) != routing.experts]
    return None if len(rows) == len(routing.top_k_index) else rows


def last_rows(routing: Routing) -> list[int]:
    """Return the rows of the last tokens of each sequence, without padding: `LAST_TOKENS` in total, but at least one
    for each sequence.

    The rows are sorted from the oldest to the newest, alternating between sequences, as if the sequences had been
    decoded together. So a policy that prefers the newest rows treats all sequences alike.
    """
    rows, padding = routing.top_k_index, routing.experts
    length, share = len(rows) // routing.sequences, max(1, LAST_TOKENS // routing.sequences)
    ends = []
    for first in range(0, len(rows), length):
        backwards = (row for row in range(first + length - 1, first - 1, -1) if min(rows[row]) != padding)
        ends.append(list(islice(backwards, share)))
    return [end[back] for back in range(share - 1, -1, -1) for end in ends if back < len(end)]
