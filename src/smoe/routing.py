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
from typing import NamedTuple


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
    in a prefill of the sequences' last tokens only (`policy/planner.py`: `last_rows`); None where no policy needs
    them."""
    sequences: int = 1
    """How many sequences of equal length, padding included, the rows are, one after the other."""
    weights: Sequence[Sequence[float]] | None = None
    """[T, K] routing weights of the chosen experts, every row's sum scaled to 1; None where no policy needs them."""
    low: frozenset[int] = frozenset()
    """Experts whose importance asks for no more than a low copy in this step, whatever is resident
    (`policy/importance.py`); the others ask for the model's own."""
