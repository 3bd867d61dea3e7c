"""How often OD-MoE's draft is right: as the paper prints it, and as ours was (`smoe eval --recall`).

The paper prints two figures of its int8 draft, aligned after each token and never. What lies between is
in pictures alone, so it is put where our own recordings have it: misses on the straight line, logarithms on both axes,
through these two figures and what was recorded at their periods.
"""

from __future__ import annotations

import random
from math import exp, log
from typing import NamedTuple

from bench.papers.geometry import MIXTRAL
from smoe.simulator.cluster import DecodedToken

PRINTED, EMBEDDED, WITNESS = "printed", "embedded", "witness"
TEXTS = {
    PRINTED: "recall as printed",
    EMBEDDED: "recall as our embedded model's",
    WITNESS: "recall as our witness's",
}
RECALL = {(1, 1): 0.9734, (0, 0): 0.45}
"""Of int8, section 3.2 and 4.2, by the periods of tokens and of keys and values; 0: never."""
_UNALIGNED = tuple(0.3 + 0.7 * exp(-token / 55) for token in range(8, 256, 16))
"""Figure 3b as its text has it: from 1 to about 0.3 over 256 tokens, 0.45 on the average."""
_EMBEDDED_INT8 = {
    (1, 1): 0.993663, (1, 4): 0.993734, (1, 16): 0.993418, (1, 0): 0.992971,
    (4, 1): 0.988251, (4, 4): 0.990936, (4, 16): 0.976176, (4, 0): 0.892232,
    (16, 1): 0.960032, (16, 4): 0.968536, (16, 16): 0.956431, (16, 0): 0.771128,
    (0, 1): 0.876373, (0, 4): 0.874949, (0, 16): 0.741333, (0, 0): 0.641958,
}  # fmt: skip
"""`recall-demo.json`: 64 experts, top-8."""
_WITNESS_INT8 = {
    (1, 1): (0.996938, 0.993876), (1, 16): (0.9964, 0.9928), (1, 0): (0.996193, 0.992387),
    (16, 1): (0.987587, 0.980387), (16, 16): (0.962471, 0.945879), (16, 0): (0.79506, 0.711933),
    (0, 1): (0.947782, 0.924694), (0, 16): (0.823899, 0.752152), (0, 0): (0.670804, 0.548246),
}  # fmt: skip
"""`recall-witness.json`: Mixtral's shape; with the share of the layers that were whole."""


class DraftRecall(NamedTuple):
    """Of one draft. Shares of one."""

    experts: tuple[float, ...]
    """Of those chosen, how many were named; over the tokens, in equal parts."""
    whole: float | None = None
    """Of the layers, those all of whose experts were named; None: as if experts were missed one by one."""
    with_spare: float | None = None
    """The same with one expert more named."""
    own_token: float = 1.0
    """How often its own token is main's."""


WITNESS_AHEAD = {
    "int8": DraftRecall((0.996193,), 0.992387, 1.0, 0.991063),
    "int4": DraftRecall((0.980387,), 0.960775, 0.998014, 0.963257),
    "int3": DraftRecall((0.956637,), 0.913357, 0.990152, 0.923535),
}
"""Of draft models that get tokens alone (T1 KV0): no better are those whose keys and values come a token late."""
WITNESS_ALIGNED = {
    "int8": DraftRecall((0.996938,), 0.993876, 0.999834, 0.994042),
    "int4": DraftRecall((0.982704,), 0.965409, 0.998924, 0.96425),
}
"""T1 KV1."""


def recall_of(source: str, token_period: int, kv_period: int) -> DraftRecall:
    """Of the int8 draft at these periods. Raises KeyError where nothing was recorded."""
    periods = token_period, kv_period
    if source == PRINTED and periods == (0, 0):
        return DraftRecall(_UNALIGNED)
    if source == PRINTED:
        return DraftRecall((1 - as_printed(1 - _EMBEDDED_INT8[periods], EMBEDDED),))
    if source == EMBEDDED:
        return DraftRecall((_EMBEDDED_INT8[periods],))
    experts, whole = _WITNESS_INT8[periods]
    return DraftRecall((experts,), whole)


def as_printed(miss: float, source: str) -> float:
    """A share of misses that we recorded, where the paper's model would have it."""
    aligned, alone = (
        1 - (_EMBEDDED_INT8[at] if source == EMBEDDED else _WITNESS_INT8[at][0]) for at in ((1, 1), (0, 0))
    )
    paper_aligned, paper_alone = 1 - RECALL[1, 1], 1 - RECALL[0, 0]
    slope = log(paper_alone / paper_aligned) / log(alone / aligned)
    return paper_aligned * exp(slope * log(miss / aligned))


def named_tokens(
    recall: DraftRecall | None, count: int, spares: int = 0, is_random: bool = False
) -> list[DecodedToken]:
    """So many tokens of Mixtral's shape, each expert as likely as any other, and what is named of them.

    `recall` None: nothing. `is_random`: any experts whatever. The same draws in every call: what is right at some
    recall is right at a higher one, too.
    """
    return [
        _token(random.Random(f"token {number}"), number / count, recall, spares, is_random) for number in range(count)
    ]


def _token(chance: random.Random, at: float, recall: DraftRecall | None, spares: int, is_random: bool) -> DecodedToken:
    everybody, top_k = range(MIXTRAL.experts), MIXTRAL.top_k
    chosen = [tuple(sorted(chance.sample(everybody, top_k))) for _ in range(MIXTRAL.layers)]
    any_of = [tuple(chance.sample(everybody, top_k + spares)) for _ in range(MIXTRAL.layers)]
    luck = [chance.random() for _ in range(MIXTRAL.layers)]
    order = [chance.sample(everybody, MIXTRAL.experts) for _ in range(MIXTRAL.layers)]
    is_own = recall is None or chance.random() < recall.own_token
    if is_random:
        return DecodedToken(chosen, any_of)
    if recall is None:
        return DecodedToken(chosen)
    whole, one = _chances(recall, at, spares)
    named = []
    for experts, shuffled, draw in zip(chosen, order, luck, strict=True):
        right = top_k if draw < whole else 1 if draw < whole + one else 0
        others = [expert for expert in shuffled if expert not in experts]
        right_ones = [expert for expert in shuffled if expert in experts][:right]
        named.append((*right_ones, *others[: top_k + spares - right]))
    return DecodedToken(chosen, named, is_own, any_of)


def _chances(recall: DraftRecall, at: float, spares: int) -> tuple[float, float]:
    """(both experts of a layer are named, one of them is) for a token at this part of the text."""
    experts = recall.experts[min(len(recall.experts) - 1, int(at * len(recall.experts)))]
    if spares:
        assert recall.with_spare is not None
        return recall.with_spare, 1.0 - recall.with_spare
    whole = experts * experts if recall.whole is None else recall.whole
    return whole, 2 * (experts - whole)
