"""What the routers say in a run without a cluster, and what a draft beside it would have named: what forecasts replay.

Of other parts of the text than the one that clusters are measured on. The draft is the product's own, asked token by
token: aligned, and where its own token is another than the model's, for that one, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from typing import Any

import torch

from bench.cluster.acting import Dials
from bench.cluster.decoding import Decoding, open_model, text_tokens
from smoe.expert import EXACT, ExpertKey
from smoe.policy.draft_predictions import Expected
from smoe.routing import Phase
from smoe.runtime.draft_model import Draft, Greedy
from smoe.runtime.observer import RoutingList
from smoe.simulator.cluster import DecodedToken
from smoe.simulator.cluster_forecast import decoded_tokens

DRAFT: dict[str, Any] = {"prefetch": "draft-model", "draft_precision": "int4", "prefetch_trial": False}


def record(asked: Decoding, begins: Sequence[int]) -> dict[str, Any]:
    """Runs on one machine, as fast as it goes, from these places of the text; JSON. Of each what its prompt used and
    its tokens."""
    model = open_model(asked, Dials())
    with model.offload as engine, torch.no_grad(), _apart(engine) as draft:
        texts = [_text(replace(asked, begin=begin), model, engine, draft) for begin in begins]
    return {"texts": texts}


def _text(asked: Decoding, model: Any, engine: Any, draft: Draft) -> dict[str, Any]:
    ids = text_tokens(asked.shape.folder, asked.prompt, asked.begin)
    text, heard = Greedy(model), RoutingList()
    with engine.observed_by(heard):
        text.read(ids)
        tokens = []
        for _ in range(asked.untimed + asked.tokens):
            tokens.append(text.next_token)
            text.take([text.next_token])
    said = [_followed(draft, token, len(ids) + n, text.cache, n == 0) for n, token in enumerate(tokens)]
    chosen = [token.chosen for token in decoded_tokens(heard.trace)]
    prompt = [sorted(set(chain(*each.top_k_index))) for each in heard.trace if each.phase is Phase.PREFILL]
    return {
        "begin": asked.begin,
        "prompt": prompt,
        "tokens": [each | {"chosen": of} for each, of in zip(said, chosen, strict=True)],
    }


def before(text: dict[str, Any]) -> list[ExpertKey]:
    """What the prompt used, layer by layer."""
    return [(layer, expert, EXACT) for layer, used in enumerate(text["prompt"]) for expert in used]


def as_tokens(text: dict[str, Any], count: int, has_draft: bool) -> list[DecodedToken]:
    """The first of them, for the simulator; without a draft nothing is named."""
    return [
        DecodedToken(each["chosen"], each["named"], each["own_is_right"], each["astray"])
        if has_draft
        else DecodedToken(each["chosen"])
        for each in text["tokens"][:count]
    ]


@contextmanager
def _apart(engine: Any) -> Iterator[Draft]:
    """The draft of this engine, which no thread runs and nobody asks meanwhile."""
    ahead = engine.executor.prefetching.predictors[Phase.DECODE].helpers[0]
    engine.executor.guess_by(None)
    try:
        yield ahead._draft
    finally:
        ahead.close()


def _followed(draft: Draft, token: int, position: int, cache: Any, is_first: bool) -> dict[str, Any]:
    """What it names for this token of the text, and what for its own where that is another."""
    own = token if is_first else draft.text.next_token
    astray: list[Expected] = []
    if own != token:
        draft.follow(own, position, cache, astray.append)
    named: list[Expected] = []
    draft.follow(token, position, cache, named.append)
    return {
        "named": [each.experts for each in named],
        "own_is_right": own == token,
        "astray": [each.experts for each in astray] or None,
    }
