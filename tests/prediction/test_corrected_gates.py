"""Corrected routers as a predictor: who is guessed, how far, when not; nothing of it is seen in the outputs.

Would catch: another layer's correction, another row's token before, experts asked for that are not worth a load, a
guess that changes what is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from smoe.config import EngineConfig
from smoe.load.gate_corrections import LearnedCorrections
from smoe.models.read_spec import read_spec
from smoe.models.router_matrix import matrices_of
from smoe.policy.prediction import Sight
from smoe.policy.trial import WORTH
from smoe.prediction.corrected_gates import CorrectedGates
from smoe.prediction.correction import Correction, uncorrected
from smoe.prediction.stacked_gates import StackedGates
from smoe.routing import Phase, Routing
from tests import oracle, zoo

Open = Callable[..., PreTrainedModel]
Toy = Callable[..., Path]
Corrections = dict[tuple[int, int], Correction]

pytestmark = pytest.mark.usefixtures("own_cache")


def nothing_learned(folder: Path, model: PreTrainedModel) -> Corrections:
    """The routers themselves, for up to three layers ahead."""
    spec = read_spec(str(folder), EngineConfig())
    matrices, layers = matrices_of(model, spec), [site.layer for site in spec.sites]
    pairs = [(layer, after) for n, layer in enumerate(layers, 1) for after in layers[n : n + 3]]
    return {(layer, after): uncorrected(matrices[after]) for layer, after in pairs}


def open_with(
    open_model: Open, folder: Path, change: Callable[[Corrections], Corrections], **switches: object
) -> PreTrainedModel:
    plain = open_model(folder, "half", prefetch="none")
    corrections = change(nothing_learned(folder, plain))
    plain.offload.close()
    LearnedCorrections(corrections, 900, "a text").store(folder)
    return open_model(folder, "half", prefetch="corrected-gates", **switches)


def predictor_of(model: PreTrainedModel) -> CorrectedGates:
    predictor = model.offload.executor.prefetching.predictors[Phase.DECODE]
    assert isinstance(predictor, CorrectedGates)
    return predictor


def some_hidden(model: PreTrainedModel, rows: int, seed: int = 5) -> torch.Tensor:
    return torch.randn(rows, 64, generator=torch.Generator().manual_seed(seed)).to(model.dtype)


def observe_input(predictor: CorrectedGates, layer: int, hidden: torch.Tensor, sequences: int) -> None:
    index = [[0, 1]] * len(hidden)
    phase = Phase.DECODE if sequences == len(hidden) else Phase.PREFILL
    predictor.observe_input(Routing(layer, phase, zoo.EXPERTS, index, sequences=sequences), hidden)


@pytest.mark.parametrize("switches", [{}, {"alpha": 0.3}], ids=str)
@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "deepseek_v2", "deepseek_v3", "gpt_oss", "granitemoe"])
def test_the_identity_guesses_as_stacked_gates(
    family: str, switches: dict[str, float], toy: Toy, open_model: Open
) -> None:
    """Alone and in a batch, at every distance, best first; with an alpha the top-score ones."""
    folder = toy(family)
    model = open_with(open_model, folder, lambda c: c, prefetch_depth=3, max_sequences=3, **switches)
    theirs = open_model(folder, "half", prefetch="stacked-gates", prefetch_depth=3, max_sequences=3, **switches)
    stacked = theirs.offload.executor.prefetching.predictors[Phase.DECODE]
    assert isinstance(stacked, StackedGates)
    for rows in (1, 3):
        hidden = some_hidden(model, rows)
        for layer in zoo.sparse_layers(model):
            ours = list(predictor_of(model).predict(Sight(layer, hidden)))
            assert ours == list(stacked.predict(Sight(layer, hidden)))
            some = Sight(layer, hidden, None, [rows - 1])
            assert list(predictor_of(model).predict(some)) == list(stacked.predict(some))


@pytest.mark.parametrize("depth", [1, 2, 3, 16])
def test_no_more_layers_than_asked_for_or_learned(depth: int, toy: Toy, open_model: Open) -> None:
    model = open_with(open_model, toy("mixtral"), lambda c: c, prefetch_depth=depth)
    guessed = [named.layer for named in predictor_of(model).predict(Sight(0, some_hidden(model, 1)))]
    assert guessed == [1, 2, 3][:depth]
    assert not list(predictor_of(model).predict(Sight(3, some_hidden(model, 1)))), "nothing comes after the last"


def test_each_pair_of_layers_has_its_own(toy: Toy, open_model: Open) -> None:
    """A bias that names two experts, other ones for each pair."""

    def named(corrections: Corrections) -> Corrections:
        return {
            pair: each._replace(first_bias=1e3 * torch.eye(zoo.EXPERTS)[[number % 8, (number + 3) % 8]].sum(0))
            for number, (pair, each) in enumerate(sorted(corrections.items()))
        }

    model = open_with(open_model, toy("mixtral"), named, prefetch_depth=3)
    pairs = [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]
    for number, (layer, after) in enumerate(pairs):
        found = {p.layer: set(p.experts) for p in predictor_of(model).predict(Sight(layer, some_hidden(model, 1)))}
        assert found[after] == {number % 8, (number + 3) % 8}


def test_the_token_before_is_that_of_the_later_layer_and_of_the_same_row(toy: Toy, open_model: Open) -> None:
    """The correction looks at nothing else, so it says what the later router said of the token before."""

    def only_before(corrections: Corrections) -> Corrections:
        return {
            pair: each._replace(weight=torch.cat([torch.zeros_like(each.weight[:, :64]), each.weight[:, :64]], 1))
            for pair, each in corrections.items()
        }

    folder = toy("mixtral")
    model = open_with(open_model, folder, only_before, prefetch_depth=2, max_sequences=3)
    ours, matrices = predictor_of(model), matrices_of(model, read_spec(str(folder), EngineConfig()))
    hidden = some_hidden(model, 3)
    prompts = {layer: some_hidden(model, 6, seed=layer) for layer in (1, 2)}
    assert not ours.logits(0, 1, hidden).any(), "nothing has been heard yet"
    for layer, prompt in prompts.items():
        observe_input(ours, layer, prompt, 3)  # three prompts of two tokens
        assert torch.allclose(ours.logits(0, layer, hidden), matrices[layer].logits(prompt[1::2]), atol=1e-5)
    wanted = matrices[2].logits(prompts[2][[1, 5]])
    assert torch.allclose(ours.logits(0, 2, hidden, [0, 2]), wanted, atol=1e-5)
    given = some_hidden(model, 3, seed=9)
    observe_input(ours, 1, given, 3)
    kept = matrices[1].logits(given)
    given.zero_()  # whoever computed it may use its memory again
    assert torch.allclose(ours.logits(0, 1, hidden), kept, atol=1e-5)
    assert not ours.logits(0, 1, hidden[:1]).any(), "another batch: these were other sequences"


def test_what_is_not_worth_a_load_is_not_asked_for(toy: Toy, open_model: Open) -> None:
    """All probabilities a little above the bound, then a little below; then only the best expert above it."""
    model = open_with(open_model, toy("mixtral"), lambda c: c, max_sequences=3)
    ours, hidden = predictor_of(model), some_hidden(model, 1)
    learned = dict(ours._corrections)
    stacked = next(iter(ours.predict(Sight(0, hidden)))).experts

    def asked(slope: float, probability: float, rows: torch.Tensor = hidden) -> list[int]:
        offset = torch.logit(torch.tensor(probability)).item()
        ours._corrections = {pair: each._replace(slope=slope, offset=offset) for pair, each in learned.items()}
        return list(next(iter(ours.predict(Sight(0, rows)))).experts)

    assert asked(0.0, WORTH + 0.01) == stacked and len(stacked) == 2
    assert asked(0.0, WORTH - 0.01) == []
    margin = ours._ranking.margins(1, learned[0, 1].logits(hidden, None))[0]
    between = margin[list(stacked)].mean().item()
    slope = 50.0
    assert asked(slope, torch.sigmoid(torch.tensor(-slope * between)).item()) == stacked[:1]
    twice = torch.cat([hidden, hidden])
    assert asked(0.0, WORTH - 0.1, twice) == stacked, "wanted by one row or the other: 1 - 0.7 squared"


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_outputs_do_not_change_by_a_bit(family: str, toy: Toy, open_model: Open) -> None:
    """Whatever was learned: here noise. Prefetches were made and some used."""

    def noisy(corrections: Corrections) -> Corrections:
        generator = torch.Generator().manual_seed(0)
        return {
            pair: each._replace(weight=each.weight + 0.02 * torch.randn(each.weight.shape, generator=generator))
            for pair, each in corrections.items()
        }

    folder = toy(family)
    model = open_with(open_model, folder, noisy, prefetch_depth=3)
    oracle.assert_same_steps(oracle.greedy(model), oracle.reference_steps(folder))
    assert model.offload.stats().prefetches_used > 0
    model.offload.executor.table.check()


@pytest.mark.parametrize("depth", [1, 3])
def test_what_it_keeps_is_in_the_ledger(depth: int, toy: Toy, open_model: Open) -> None:
    folder = toy("gpt_oss", dtype=torch.bfloat16)
    plain = open_model(folder, "half", prefetch="none")
    LearnedCorrections(nothing_learned(folder, plain), 900, "a text").store(folder)
    model = open_model(folder, "half", prefetch="corrected-gates", prefetch_depth=depth)
    ours = predictor_of(model)
    oracle.greedy(model)
    kept = [value for each in ours._corrections.values() for value in each[:3]]
    kept += ours._before.values()
    entries = model.offload.ledger.entries()
    assert entries["predictor"] == sum(value.numel() * value.element_size() for value in kept)
    assert "predictor" not in plain.offload.ledger.entries()
