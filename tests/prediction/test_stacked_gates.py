"""Several routers as one product: what they say, how far is looked, what becomes of copies for layers further on.

Would catch: rows of one layer's router read as another's, a bias that is left out, padding that is guessed for, a copy
dropped before its layer has come, or one that a prompt finds in its way.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from smoe.errors import UnsupportedModelError
from smoe.expert import ExpertKey
from smoe.memory.movers import SlotMover
from smoe.models.scoring import answer_of
from smoe.policy.plan import Load
from smoe.policy.prediction import Grading, Sight
from smoe.policy.registry import PREDICTORS, PREFETCH
from smoe.prediction.next_gate import NextGate
from smoe.prediction.stacked_gates import StackedGates
from smoe.routing import Phase, Routing
from tests import oracle, zoo
from tests.prediction.test_prediction import late

Open = Callable[..., PreTrainedModel]
Toy = Callable[..., Path]

WITH_RULE = [family for family in zoo.FAMILIES if family != "phimoe"]
DISTINCT = ["mixtral", "gpt_oss", "deepseek_v3", "minimax_m2", "ernie4_5_moe"]
"""A router with and without bias, one that computes in float32, one that is handed its bias, one kept in float32."""
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def stacked_of(model: PreTrainedModel) -> StackedGates:
    predictor = model.offload.executor.prefetching.predictors[Phase.DECODE]
    assert isinstance(predictor, StackedGates)
    return predictor


def some_hidden(model: PreTrainedModel, rows: int) -> torch.Tensor:
    return torch.randn(rows, 64, generator=torch.Generator().manual_seed(5)).to(model.dtype)


def test_every_name_has_its_predictor() -> None:
    assert set(PREDICTORS.built_in) == set(PREFETCH) - {"auto", "none"}


@pytest.mark.parametrize(
    ("family", "dtype"),
    [*((family, torch.float32) for family in WITH_RULE), *((family, torch.bfloat16) for family in DISTINCT)],
    ids=str,
)
def test_stacked_logits_are_the_routers_own(family: str, dtype: torch.dtype, toy: Toy, open_model: Open) -> None:
    """Each layer's rows of the product against its own router, from every layer before it."""
    model = open_model(toy(family, dtype=dtype), "half", prefetch="stacked-gates", prefetch_depth=3)
    stacked, modules = stacked_of(model), dict(model.named_modules())
    layers, routers = zoo.sparse_layers(model), model.offload.anatomy.routers
    hidden = some_hidden(model, 3)
    for number, layer in enumerate(layers[:-1]):
        found = stacked.logits(layer, hidden)
        assert tuple(found) == layers[number + 1 : number + 4], "the nearest first"
        for after, logits in found.items():
            path = routers[after]
            block = modules[path.rpartition(".")[0]]
            own = answer_of(modules[path], block, hidden, zoo.EXPERTS)[0]
            assert oracle.relative_error(logits, own) < TOLERANCE[dtype]
    assert not list(stacked.predict(Sight(layers[-1], hidden))), "nothing comes after the last layer"


@pytest.mark.parametrize("switches", [{}, {"alpha": 0.3}, {"alpha": 0.3, "prefetch_what": "chosen"}], ids=str)
@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "deepseek_v2", "deepseek_v3", "gpt_oss", "granitemoe"])
def test_the_next_layer_is_guessed_as_by_the_next_gate(
    family: str, switches: dict[str, float], toy: Toy, open_model: Open
) -> None:
    """The rule gives the router's own choice, in its order; with an alpha the top-score ones of it alone."""
    model = open_model(toy(family), "half", prefetch="stacked-gates", max_sequences=3, **switches)
    stacked, gate = stacked_of(model), model.offload.executor.prefetching.predictors[Phase.PREFILL]
    assert isinstance(gate, NextGate) and gate.grading.alpha == stacked.grading.alpha == switches.get("alpha", 0.0)
    for rows, layer in itertools.product((1, 3), zoo.sparse_layers(model)[:-1]):
        sight = Sight(layer, some_hidden(model, rows))
        assert list(stacked.predict(sight))[:1] == list(gate.predict(sight)) != []


def test_alpha_counts_in_every_layer(toy: Toy, open_model: Open) -> None:
    """Of a large alpha the best expert of a row at most is left; without, all that are chosen."""
    model = open_model(toy("mixtral"), "half", prefetch="stacked-gates", prefetch_depth=3, alpha=0.9)
    stacked, hidden = stacked_of(model), some_hidden(model, 1)
    few = {named.layer: len(named.experts) for named in stacked.predict(Sight(0, hidden))}
    stacked.grade_by(Grading())
    assert {named.layer: len(named.experts) for named in stacked.predict(Sight(0, hidden))} == {1: 2, 2: 2, 3: 2}
    assert few.keys() == {1, 2, 3} and sum(few.values()) < 6


def test_finished_rows_are_not_guessed_for(toy: Toy, open_model: Open) -> None:
    model = open_model(toy("mixtral"), "half", prefetch="stacked-gates", prefetch_depth=3, max_sequences=3)
    stacked, hidden = stacked_of(model), some_hidden(model, 3)
    told = list(stacked.predict(Sight(0, hidden, None, [0, 2])))
    assert told == list(stacked.predict(Sight(0, hidden[[0, 2]]))) != list(stacked.predict(Sight(0, hidden)))
    assert [named.experts for named in stacked.predict(Sight(0, hidden, None, []))] == [[], [], []]


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_no_more_layers_than_asked_for(depth: int, toy: Toy, open_model: Open) -> None:
    model = open_model(toy("deepseek"), "half", prefetch="stacked-gates", prefetch_depth=depth)
    predicted = {layer: [p.layer for p in stacked_of(model).predict(Sight(layer, some_hidden(model, 1)))]
                 for layer in (1, 2, 3)}  # fmt: skip
    assert predicted == {1: [2, 3][:depth], 2: [3], 3: []}, "layer 0 is dense"


def test_the_copy_is_in_the_ledger(toy: Toy, open_model: Open) -> None:
    folder = toy("gpt_oss", dtype=torch.bfloat16)
    plain, model = (open_model(folder, 8, prefetch=name) for name in ("none", "stacked-gates"))
    weight, bias = stacked_of(model)._stack
    assert bias is not None
    kept = weight.numel() * weight.element_size() + bias.numel() * bias.element_size()
    ledger = model.offload.ledger
    assert ledger.entries()["predictor"] == kept
    assert ledger.budget_bytes - plain.offload.ledger.budget_bytes == kept
    assert model.offload.peak_memory_bytes() - plain.offload.peak_memory_bytes() == kept
    assert "predictor" not in plain.offload.ledger.entries()
    shared = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    assert weight.untyped_storage().data_ptr() not in shared, "the routers stay where they are: so do their last bits"


def test_a_router_without_a_rule_is_refused_with_a_way_out(toy: Toy, open_model: Open) -> None:
    with pytest.raises(UnsupportedModelError, match="a prefetch other than stacked-gates"):
        open_model(toy("phimoe"), "half", prefetch="stacked-gates")


class Watched:
    """What is prefetched, and what is looked through, of a model's decode steps."""

    def __init__(self, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ahead: dict[ExpertKey, int] = {}
        """Of what this pass has prefetched, from how many layers before it was asked for."""
        self.asked: set[int] = set()
        self.used: list[int] = []
        self.dropped: list[int] = []
        executor = model.offload.executor
        progress, table = executor.arrivals._progress, executor.table
        prefetch, look_through = progress.prefetch, progress.look_through

        def noted(loads: Sequence[Load]) -> None:
            for key in (load.key for load in loads):
                assert key not in table.ready and key not in table.inflight
                self.ahead[key] = key[0] - progress._layer
                self.asked.add(self.ahead[key])
            prefetch(loads)

        def looked(routing: Routing) -> tuple[list[ExpertKey], list[ExpertKey]]:
            wanted, stale = look_through(routing)
            if routing.layer == 0:
                self.ahead.clear()  # what the pass before has left under way is no more expected
            self.used += [self.ahead[key] for key in wanted if key in self.ahead]
            if routing.phase is Phase.DECODE:
                self.dropped += [key[0] - routing.layer for key in stale if key in self.ahead]
            return wanted, stale

        monkeypatch.setattr(progress, "prefetch", noted)
        monkeypatch.setattr(progress, "look_through", looked)


def test_depth_adapts_and_what_comes_early_is_kept(toy: Toy, open_model: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """With three quarters resident the next layer often misses nothing: then the one after it is looked at, and what
    is brought in for that one is there when its turn comes."""
    folder = toy("mixtral")
    model = open_model(folder, 24, prefetch="stacked-gates", prefetch_depth=3)
    watched = Watched(model, monkeypatch)
    oracle.assert_same_steps(oracle.greedy(model), oracle.reference_steps(folder))
    assert {1, 2} <= watched.asked
    assert any(ahead > 1 for ahead in watched.used), "nothing that was brought in early was ever used"
    assert all(after <= 0 for after in watched.dropped), "dropped before its layer had come"
    model.offload.executor.table.check()


@pytest.mark.parametrize("budget", [9, 24])
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_prompts_between_find_their_slots(
    family: str, budget: int, toy: Toy, open_model: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slow reads, so that copies for later layers are still under way when a prompt wants the staging slots."""
    monkeypatch.setattr(SlotMover, "move", late(SlotMover.move))
    folder = toy(family)
    model = open_model(folder, budget, prefetch="stacked-gates", prefetch_depth=3)
    theirs = oracle.reference(folder)
    for start in range(3):
        prompt = oracle.PROMPT[:, start:]
        tokens = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
        assert torch.equal(model.generate(prompt, **tokens), theirs.generate(prompt, **tokens))
    assert model.offload.stats().prefetches_used > 0
    model.offload.executor.table.check()
