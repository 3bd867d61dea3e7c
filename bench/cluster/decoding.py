"""What the main machine does in the benchmark: it reads a prompt and decodes greedily; what tokens took and waited for.

A token's logits go into a checksum, so that runs can be compared bit by bit. What a layer waits for is that answer of a
worker that came last, taken apart: bringing experts in (and waiting for others to be), computing, and all that lies
between the two machines: wires, encryption, threads that have to wake up.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from transformers import AutoTokenizer

from bench.cluster.acting import Dials, Times, act
from bench.cluster.workers import NAME, Shape
from smoe import from_pretrained
from smoe.cluster.members import Member
from smoe.expert import EXACT
from smoe.runtime.draft_model import Draft

TEXT = Path(__file__).parent.parent / "text.txt"
_CONTEXT = 512
_WAIT_SECONDS = 60.0
"""For workers."""
_READ_SECONDS = 30.0
"""For all of them to have read all experts."""


@dataclass(frozen=True)
class Decoding:
    """What main is to do."""

    shape: Shape
    times: Times
    load_there: float
    """Seconds that a worker takes to bring an expert in."""
    workers: int
    """0: no cluster at all."""
    switches: dict[str, Any] = field(default_factory=dict)
    """Of `from_pretrained`, the preset among them."""
    prompt: int = 16
    untimed: int = 8
    """Tokens before the timed ones."""
    tokens: int = 24
    reads_all: bool = False
    """Every worker first brings in every expert."""
    begin: int = 0
    """Where in the text the prompt begins, tokens."""


class Answer(NamedTuple):
    """One request's answer, seconds."""

    layer: int
    experts: int
    came: float
    """When, on the clock of `time.perf_counter`."""
    whole: float
    """From being sent to coming back."""
    there: float
    """Of it, at the worker."""
    computing: float
    """Of that, arithmetic."""


def open_model(asked: Decoding, dials: Dials) -> Any:
    """The model with the fewest slots that it can work with, its disk and arithmetic as slow as asked."""
    shape = asked.shape
    act(asked.times, dials)
    given: dict[str, Any] = {"threads": 1, "context_tokens": _CONTEXT, "preload": False} | asked.switches
    if asked.workers:
        given |= {"cluster": NAME, "cluster_workers": asked.workers, "cluster_timeout_seconds": _WAIT_SECONDS}
    return from_pretrained(shape.folder, resident=shape.chosen / shape.all_experts, **given)


def text_tokens(folder: Path, count: int, begin: int = 0) -> list[int]:
    """Of the benchmark's text."""
    ids: list[int] = AutoTokenizer.from_pretrained(folder)(TEXT.read_text())["input_ids"]
    assert len(ids) >= begin + count, f"{TEXT} has {len(ids)} tokens, {begin + count} are needed"
    return ids[begin : begin + count]


def decode(asked: Decoding, machines: Mapping[int, Dials]) -> dict[str, Any]:
    """Open the model and do it; `machines`: of main (0) and of each worker. Seconds; experts a token."""
    ids = text_tokens(asked.shape.folder, asked.prompt, asked.begin)
    model = open_model(asked, machines[0])
    engine, digest, seconds = model.offload, hashlib.sha256(), []
    if asked.reads_all:
        read_all(asked.shape, engine.executor.compute.others, [machines[n] for n in range(1, asked.workers + 1)])
    with engine, torch.no_grad(), answers() as heard, followed() as draft:
        cache = engine.new_cache()
        for logits, took in steps(model, ids, asked.untimed + asked.tokens, cache):
            digest.update(logits.float().numpy().tobytes())
            seconds.append(took)
            if len(seconds) == asked.untimed + 1:
                before, before_loads, began = engine.stats(), _loads(machines), time.perf_counter()
        counters, loaded = engine.stats() - before, _loads(machines)
        others = engine.executor.compute.others
        apart = None if others is None else others.draft
        return {
            "ttft_seconds": seconds[0],
            "seconds": seconds[asked.untimed + 1 :],
            "logits": digest.hexdigest(),
            "loads": {n: (loaded[n] - before_loads[n]) / asked.tokens for n in machines},
            "experts": counters.decode_uses / asked.tokens,
            "at_workers": counters.host_computed / asked.tokens,
            "waits": waits([each for each in heard if each.came >= began], asked.tokens, asked.load_there)
            | parts(counters, asked.tokens),
            "slots": engine.ledger.cache_slots,
            "draft_bytes": engine.ledger.demand.draft_bytes or (0 if apart is None else apart["memory_bytes"]),
            "draft": apart,
            "workers": [] if others is None else others.described(),
            "seconds_per_draft_layer": median(draft) / asked.shape.layers if draft else None,
            "seconds_per_own_load": counters.read_busy_seconds / max(1, counters.loads + counters.prefetches),
        }


def steps(model: Any, prompt: list[int], tokens: int, cache: Any) -> Iterator[tuple[torch.Tensor, float]]:
    """(logits of the last position, seconds) for the prompt and for so many tokens after it, greedily."""
    given = prompt
    for _ in range(1 + tokens):
        began = time.perf_counter()
        out = model(input_ids=torch.tensor([given]), past_key_values=cache, use_cache=True, logits_to_keep=1)
        logits = out.logits[0, -1]
        given = [int(logits.argmax())]
        yield logits, time.perf_counter() - began


def read_all(shape: Shape, cluster: Any, workers: Iterable[Dials]) -> None:
    """Every worker brings in all experts."""
    machines, until = list(workers), time.monotonic() + _READ_SECONDS
    store = cluster._alone.store
    for layer, held in sorted(store.layers.items()):
        keys = [(layer, expert, EXACT) for expert in range(held.experts)]
        for begin in range(0, len(keys), 16):
            for member in cluster.members:
                cluster.link.fetch(member.unit, keys[begin : begin + 16])
            _until_quiet(machines)
    least = min(dials.loads for dials in machines)
    assert least >= shape.all_experts and time.monotonic() < until, f"a worker has read {least} experts only"


def _until_quiet(machines: Iterable[Dials]) -> None:
    before = [-1]
    while before != (now := [dials.loads for dials in machines]):
        before = now
        time.sleep(0.03)


@contextmanager
def answers() -> Iterator[list[Answer]]:
    """Inside, every answer of a worker is written down."""
    heard: list[Answer] = []
    note: Any = Member.note

    def noted(member: Member, wanted: Iterable[Any], whole: float, times: Any, **more: Any) -> None:
        asked = list(wanted)
        answer = Answer(asked[0].key[0], len(asked), time.perf_counter(), whole, times.whole, times.computing)
        heard.append(answer)
        note(member, asked, whole, times, **more)

    Member.note = noted  # type: ignore[method-assign, assignment]
    try:
        yield heard
    finally:
        Member.note = note  # type: ignore[method-assign]


@contextmanager
def followed() -> Iterator[list[float]]:
    """Inside, what a draft takes for each token that it decodes to the end is written down, seconds."""
    taken: list[float] = []
    follow: Any = Draft.follow

    def timed(draft: Draft, *what: Any) -> None:
        began = time.perf_counter()
        follow(draft, *what)
        taken.append(time.perf_counter() - began)

    Draft.follow = timed  # type: ignore[method-assign, assignment]
    try:
        yield taken
    finally:
        Draft.follow = follow  # type: ignore[method-assign]


def waits(heard: Iterable[Answer], tokens: int, load: float) -> dict[str, float]:
    """Seconds a token, by what the last answer of each layer spent them on; and the share of requests that came to a
    worker where one was under way or to be made, and waited for a quarter of a load at least."""
    found = {"loads there": 0.0, "computing there": 0.0, "between": 0.0}
    late = count = 0
    for _, of_layer in groupby(sorted(heard, key=lambda each: each.came), key=lambda each: each.layer):
        together = list(of_layer)
        last = together[-1]
        found["loads there"] += (last.there - last.computing) / tokens
        found["computing there"] += last.computing / tokens
        found["between"] += (last.whole - last.there) / tokens
        late += sum(each.there - each.computing > load / 4 for each in together) if load else 0
        count += len(together)
    return found | {"requests that waited for loads": late / max(1, count)}


def parts(counters: Any, tokens: int) -> dict[str, float]:
    """Seconds a token on main, by what it was doing."""
    found = {
        "waiting for workers": counters.host_wait_seconds,
        "waiting for its own loads": counters.wait_seconds,
        "computing here": counters.compute_seconds,
        "planning": counters.plan_seconds,
        "the other layers": counters.dense_seconds,
    }
    return {name: seconds / tokens for name, seconds in found.items()}


def _loads(machines: Mapping[int, Dials]) -> dict[int, int]:
    return {n: dials.loads for n, dials in machines.items()}
