"""Finds the dilation at which this machine keeps up with an emulated device, by measuring the loaded model."""

from __future__ import annotations

import time

import torch
from transformers import PreTrainedModel

from smoe.compute.unit import ExpertTask
from smoe.expert import EXACT
from smoe.memory.emulation import Emulation
from smoe.memory.link import Link
from smoe.memory.streams import Fetched
from smoe.policy.plan import HOST
from smoe.runtime.engine import Engine

_STEPS = 4
_PARALLEL_SLOWDOWN = 1.3
"""How many times longer the CPU takes for an expert while link and device are emulated on the same cores."""


def calibrate(model: PreTrainedModel, emulation: Emulation, link: Link) -> None:
    """Run a few tokens in real time, and set the dilation of the emulated device from the measured times."""
    engine: Engine = model.offload  # type: ignore[assignment]
    with emulation.in_real_time():
        _run(model, engine, 2)  # in the second run experts come from the host tier, as in use
        before = engine.stats()
        _run(model, engine, _STEPS)
        counts = engine.stats() - before
        layers = counts.forward_passes * len(engine.store.layers)
        expert = counts.compute_seconds / max(1, counts.decode_uses)
        emulation.choose_dilation(
            copy=_copy_seconds(engine.slot_memory, engine.ledger.demand.slot_bytes),
            expert=expert,
            host=_host_seconds(model, engine, expert),
            layer=counts.dense_seconds / max(1, layers),
        )
    for _ in link.measured():
        pass  # discard measurements at another speed


def _host_seconds(model: PreTrainedModel, engine: Engine, guess: float) -> float:
    """Return the seconds that one expert takes for one row on the CPU of the emulated machine: on one thread, without
    our kernel, while other work is running. `guess` replaces the measurement if the CPU computes no experts."""
    host = engine.executor.compute.units.get(HOST)
    if host is None:
        return 2 * guess
    layer = min(engine.store.layers)
    row = torch.zeros(1, engine.executor.compute.experts.hidden_size(layer), dtype=next(model.parameters()).dtype)
    for expert in range(min(_STEPS, engine.store.layers[layer].experts)):
        host.submit([ExpertTask((layer, expert, EXACT), [0])], Fetched(row))[0].result()
    return _PARALLEL_SLOWDOWN * max(seconds for seconds, _ in host.measured())


def _run(model: PreTrainedModel, engine: Engine, steps: int) -> None:
    """Run `steps` forward passes of one token each, with the maximum number of sequences."""
    rows = engine.config.max_sequences
    tokens = torch.arange(1, rows + 1).unsqueeze(1)  # different tokens, so that they use different experts
    for _ in range(steps):
        model(input_ids=tokens, past_key_values=engine.new_cache(rows), use_cache=True)


def _copy_seconds(slots: torch.Tensor, slot_bytes: int) -> float:
    """Return the median time of copying one expert within RAM, in seconds."""
    source = torch.ones(slot_bytes, dtype=torch.uint8)
    target = slots[:slot_bytes]
    seconds = []
    for _ in range(7):
        began = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - began)
    return sorted(seconds)[3]
