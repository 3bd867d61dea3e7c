"""Shapes, fixed once for the whole program.

    T  tokens in this step (real rows; padding is marked with the sentinel expert E)
    K  experts chosen for a token (top-k)
    E  routed experts of a layer; the index E itself means "no expert" (the library's own skip sentinel)
    H  hidden size          I  inner size of one expert          L  layers

A *route* is one (token, choice) pair; route r of a step is token r // K, choice r % K.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from itertools import islice
from typing import NamedTuple

LAST_TOKENS = 32
"""How many last tokens of a prompt, or of the prompts of a batch together, decide which experts stay after prefill.

Shared out they hit a little more than as many of each prompt (docs/log/prefill.md), and cost as much for any batch."""


class Phase(Enum):
    """The two regimes of generation; they share slots and nothing else."""

    PREFILL = "prefill"
    DECODE = "decode"


class Routing(NamedTuple):
    """What the router of one layer decided in one step: the input of `plan_layer`."""

    layer: int
    phase: Phase
    experts: int
    """E: how many routed experts the layer has; an index equal to it is a padding route."""
    top_k_index: Sequence[Sequence[int]]
    """[T, K] expert indices, the model's own choice."""
    scores: Sequence[Sequence[float]] | None = None
    """[T, E] choice scores of all experts (after softmax or sigmoid and the choice bias; minus infinity where masked),
    in a prefill of the sequences' last tokens only (`last_rows`); None where no policy needs
    them."""
    sequences: int = 1
    """How many sequences of equal length, padding included, the rows are, one after the other."""
    weights: Sequence[Sequence[float]] | None = None
    """[T, K] routing weights of the chosen experts, every row's sum scaled to 1; None where no policy needs them."""
    low: frozenset[int] = frozenset()
    """Experts whose importance asks for no more than a low copy in this step, whatever is resident
    (`policy/importance.py`); the others ask for the model's own."""


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
