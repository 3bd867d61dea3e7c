"""Misses answered within a budget, on a real engine.

Would catch: a budget that changes bits where everything is too dear, a budget that is overdrawn, answers that are taken
though they are dear, weights of the other experts that move when one is left out.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from smoe.errors import ConfigError
from smoe.load.priced_answers import PricedAnswers
from smoe.policy.prices import LayerPrices, PriceTable
from smoe.policy.quality_budget import BURST_TOKENS, nats_of_perplexity
from tests import oracle
from tests.packs import pack_folder

Open = Callable[..., PreTrainedModel]
SWITCHES = {"preset": "balanced", "prefetch": "none"}


@pytest.fixture
def folder(toy: Callable[..., Path], tmp_path: Path) -> Path:
    """A toy of 4 layers in 32 bits, packed in int4."""
    place = Path(shutil.copytree(toy("qwen3_moe"), tmp_path / "toy"))
    pack_folder(place, precision="int4")
    return place


def price(folder: Path, low: float, substitute: float, skip: float, precision: str = "int4") -> None:
    table = PriceTable({layer: LayerPrices(low, substitute, skip) for layer in range(8)})
    PricedAnswers(table, table, precision, 1000, "made up").store(folder)


def test_where_every_answer_is_too_dear_no_bit_differs(folder: Path, open_model: Open) -> None:
    price(folder, 1e6, 1e6, 1e6)
    model = open_model(folder, "half", **SWITCHES)
    oracle.assert_same_steps(oracle.greedy(model), oracle.reference_steps(folder))
    counted = model.offload.stats()
    assert counted.low_served == counted.skipped == counted.substituted == 0 < counted.loads


def test_what_is_spent_stays_within_the_budget(folder: Path, open_model: Open) -> None:
    price(folder, 1e-2, 1.0, 1.0)
    model = open_model(folder, "half", **SWITCHES, max_perplexity_increase=0.01)
    oracle.greedy(model)
    counted, answering = model.offload.stats(), model.offload.executor.answerer.answering
    tokens = oracle.NEW_TOKENS - 1
    assert 0 < answering.nats <= (tokens + BURST_TOKENS) * nats_of_perplexity(0.01)
    assert counted.low_served + counted.skipped > 0
    model.offload.executor.table.check()


@pytest.mark.parametrize("prices", [(0.0, 1e6, 1e6), (1e6, 0.0, 1e6), (1e6, 1e6, 0.0)])
def test_what_is_free_answers_nearly_every_miss(
    prices: tuple[float, float, float], folder: Path, open_model: Open
) -> None:
    """A low copy, a substitute, nobody, each when it alone costs nothing."""
    price(folder, *prices)
    model = open_model(folder, "half", **SWITCHES)
    oracle.greedy(model)
    counted = model.offload.stats()
    low, substitute, skip = (each == 0.0 for each in prices)
    assert (counted.low_served > 0) == low
    assert (counted.substituted > 0) == substitute
    assert (counted.skipped > 0) == skip
    assert counted.low_loads <= counted.low_served


def test_a_route_that_is_left_out_leaves_the_others_their_weights(folder: Path, open_model: Open) -> None:
    price(folder, 9.0, 9.0, 0.0)
    model = open_model(folder, "half", **SWITCHES)
    seen: list[tuple[list[int], torch.Tensor]] = []
    compute = model.offload.executor.compute
    decode = compute.decode

    def heard(plan, hidden, weights, *asked):  # type: ignore[no-untyped-def]
        seen.append(([route for serve in plan.serves for route in serve.routes], weights.clone()))
        return decode(plan, hidden, weights, *asked)

    compute.decode = heard  # type: ignore[method-assign]
    oracle.greedy(model)
    gone = [(routes, weights) for routes, weights in seen if len(routes) < weights.numel()]
    assert gone, "something was left out"
    for routes, weights in gone:
        assert float(weights.flatten()[routes].sum()) < 1 - 1e-4, "what is left out keeps its share"


def test_without_prices_a_budget_is_refused(folder: Path, open_model: Open) -> None:
    with pytest.raises(ConfigError, match=r"the quality costs of this model .*have not been measured yet"):
        open_model(folder, "half", **SWITCHES)
    price(folder, 1.0, 1.0, 1.0, precision="int2")
    with pytest.raises(ConfigError, match="with `low_precision=int4`"):
        open_model(folder, "half", **SWITCHES)


def test_a_time_takes_the_place_of_the_preset_s_perplexity(folder: Path, open_model: Open) -> None:
    price(folder, 1e-3, 1.0, 1.0)
    model = open_model(folder, "half", **SWITCHES, tpot_seconds=1e6)
    oracle.greedy(model, new_tokens=8)
    assert model.offload.config.max_perplexity_increase is None
    assert model.offload.config.lossy == ["misses resolved within 1000000.0 s a token"]
