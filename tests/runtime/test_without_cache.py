"""Engines that keep no experts: what systems do that bring in every expert when, or before, its layer runs.

Would catch: slots beyond those of one token's choice, a whole layer for which there is no room, bits that differ.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from smoe import from_pretrained
from smoe.errors import BudgetError, ConfigError
from smoe.presets import configure
from smoe.runtime.arrivals import Arrivals
from smoe.runtime.observer import StepObserver
from smoe.runtime.step import Step
from tests import oracle, zoo

Open = Callable[..., PreTrainedModel]
FAMILIES = ["mixtral", "qwen2_moe", "gpt_oss"]


@pytest.mark.parametrize("device", ["cpu", "emulated"])
@pytest.mark.parametrize("preset", ["accelerate", "moesys"])
@pytest.mark.parametrize("family", FAMILIES)
def test_no_bit_differs(family: str, preset: str, device: str, toy: Callable[..., Path], open_model: Open) -> None:
    folder = toy(family)
    bench = {"device": "emulated", "dilation": 1.0} if device == "emulated" else {}
    model = open_model(folder, "full", preset=preset, **bench)
    oracle.assert_same_steps(oracle.greedy(model), oracle.reference_steps(folder))
    ledger, counted = model.offload.ledger, model.offload.stats()
    top_k = ledger.demand.top_k
    assert ledger.cache_slots == top_k, "however much memory there is"
    assert ledger.staging_slots == (2 if preset == "accelerate" else 1 + zoo.EXPERTS)
    assert (counted.decode_hits > counted.decode_uses / 2) == (preset == "moesys")
    model.offload.executor.table.check()


class Punctual(StepObserver):
    """Has every load arrive before a layer is planned."""

    def __init__(self, arrivals: Arrivals) -> None:
        self._arrivals = arrivals

    def routed(self, step: Step) -> None:
        for ticket in self._arrivals.tickets.values():
            ticket.join()


def test_a_whole_layer_leaves_nothing_to_wait_for_but_the_first(toy: Callable[..., Path], open_model: Open) -> None:
    """Every layer but a token's first finds all that it wants here.

    Nobody takes back the slot of a load under way: where one that is not wanted is late, there is no room for all of
    the next layer.
    """
    model = open_model(toy("qwen2_moe"), "full", preset="moesys")
    with model.offload.observed_by(Punctual(model.offload.executor.arrivals)):
        oracle.greedy(model)
    counted, layers = model.offload.stats(), len(model.offload.store.layers)
    misses = counted.decode_uses - counted.decode_hits
    assert misses <= counted.decode_uses / layers


def test_a_batch_passes_in_waves(toy: Callable[..., Path], open_model: Open) -> None:
    """Three rows want more experts than there are slots."""
    folder = toy("qwen2_moe")
    prompts = oracle.PROMPT.reshape(3, -1)
    model, roomy = (open_model(folder, "full", max_sequences=3, **of) for of in ({"preset": "accelerate"}, {}))
    oracle.assert_same_steps(oracle.greedy(model, prompts, 8), oracle.greedy(roomy, prompts, 8))


def test_what_cannot_be(toy: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match="`resident_share` needs such experts"):
        configure("accelerate", resident_share=0.5)
    with pytest.raises(ConfigError, match="`low_precision` needs such experts"):
        configure("hobbit", expert_cache="top-k")
    with pytest.raises(BudgetError, match=r"staging \(9 experts\)"):
        from_pretrained(toy("qwen2_moe"), preset="moesys", memory=1000)
