"""Which rows of a step count: no padding, nor of sequences that have ended; of a prompt its last ones."""

from __future__ import annotations

from itertools import islice

from smoe.routing import Phase, Routing

LAST_TOKENS = 32
"""How many last tokens of a prompt, or of the prompts of a batch together, decide which experts stay after prefill.

Shared out they hit a little more than as many of each prompt (docs/log/prefill.md), and cost as much for any batch."""


def observation(routing: Routing) -> Routing:
    """What an eviction policy learns from a step: all of a decode step, the last tokens of a prefill."""
    if routing.phase is Phase.DECODE:
        return routing
    last = last_rows(routing)
    weights = None if routing.weights is None else [routing.weights[row] for row in last]
    return routing._replace(top_k_index=[routing.top_k_index[row] for row in last], weights=weights, sequences=1)


def real_rows(routing: Routing) -> list[int] | None:
    """Rows that are no padding, nor of a sequence that has ended; None: all."""
    rows = [row for row, chosen in enumerate(routing.top_k_index) if min(chosen) != routing.experts]
    return None if len(rows) == len(routing.top_k_index) else rows


def last_rows(routing: Routing) -> list[int]:
    """Rows of the last tokens of every sequence, padding left out; together `LAST_TOKENS`, and one of each at least.

    Oldest first and the sequences in turn, as if they had been decoded together: a policy that weighs the newest rows
    most, or has room for a few, then treats all sequences alike.
    """
    rows, padding = routing.top_k_index, routing.experts
    length, share = len(rows) // routing.sequences, max(1, LAST_TOKENS // routing.sequences)
    ends = []
    for first in range(0, len(rows), length):
        backwards = (row for row in range(first + length - 1, first - 1, -1) if min(rows[row]) != padding)
        ends.append(list(islice(backwards, share)))
    return [end[back] for back in range(share - 1, -1, -1) for end in ends if back < len(end)]
