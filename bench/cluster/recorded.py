"""What the routers say in a run without a cluster, and what a shadow beside it would have named: what forecasts replay.

Of another part of the text than the one that clusters are measured on. The shadow is the product's own, asked token by
token: aligned, and where its own token is another than the model's, for that one, too.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch

from bench.cluster.acting import Dials
from bench.cluster.decoding import Decoding, open_model, text_tokens
from smoe.routing import Phase
from smoe.runtime.observer import RoutingList
from smoe.runtime.shadow import Expected, Greedy, Shadow
from smoe.simulator.cluster import DecodedToken
from smoe.simulator.cluster_forecast import decoded_tokens

SHADOW: dict[str, Any] = {"prefetch": "shadow", "shadow_precision": "int4", "prefetch_trial": False}


def record(asked: Decoding) -> dict[str, Any]:
    """The tokens of a run on one machine, as fast as it goes; JSON. What the shadow takes for a layer, seconds."""
    ids = text_tokens(asked.shape.folder, asked.prompt, asked.begin)
    model = open_model(asked, Dials())
    with model.offload as engine, torch.no_grad(), _apart(engine) as shadow:
        text, heard = Greedy(model), RoutingList()
        with engine.observed_by(heard):
            text.read(ids)
            tokens = []
            for _ in range(asked.untimed + asked.tokens):
                tokens.append(text.next_token)
                text.take([text.next_token])
        said = [_followed(shadow, token, len(ids) + n, text.cache, n == 0) for n, token in enumerate(tokens)]
    taken = median(each.pop("seconds") for each in said)
    chosen = [token.chosen for token in decoded_tokens(heard.trace)]
    found = [each | {"chosen": of} for each, of in zip(said, chosen, strict=True)]
    return {"tokens": found, "shadow_layer_seconds": taken / asked.shape.layers}


def as_tokens(found: dict[str, Any], is_shadowed: bool) -> list[DecodedToken]:
    """For the simulator; without a shadow nothing is named."""
    return [
        DecodedToken(each["chosen"], each["named"], each["own_is_right"], each["astray"])
        if is_shadowed
        else DecodedToken(each["chosen"])
        for each in found["tokens"]
    ]


@contextmanager
def _apart(engine: Any) -> Iterator[Shadow]:
    """The shadow of this engine, which no thread runs and nobody asks meanwhile."""
    ahead = engine.executor._predictors[Phase.DECODE].helpers[0]
    engine.executor.guess_by(None)
    try:
        yield ahead._shadow
    finally:
        ahead.close()


def _followed(shadow: Shadow, token: int, position: int, cache: Any, is_first: bool) -> dict[str, Any]:
    """What it names for this token of the text, and what for its own where that is another."""
    own = token if is_first else shadow.text.next_token
    astray: list[Expected] = []
    if own != token:
        shadow.follow(own, position, cache, astray.append)
    named: list[Expected] = []
    began = time.perf_counter()
    shadow.follow(token, position, cache, named.append)
    return {
        "seconds": time.perf_counter() - began,
        "named": [each.experts for each in named],
        "own_is_right": own == token,
        "astray": [each.experts for each in astray] or None,
    }
