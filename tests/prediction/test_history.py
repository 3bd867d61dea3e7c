"""Predictors that see routing alone: against counts made by hand, and against themselves in engine and simulator.

Would catch: a matrix normalised along the wrong axis, a layer's own choice used to guess it, a last token that is
padding, a sequence that goes on in the next one, a network folded wrongly, an engine that hears what a trace does not.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from smoe.errors import BudgetError, ConfigError
from smoe.eval.tune_predictor import paths_of
from smoe.load.fitted_predictor import StoredPredictor
from smoe.policy.eviction.lru import LRU
from smoe.policy.prediction import ASKED, Moment, Prediction, Predictor, Sight
from smoe.policy.registry import EXPERT_MLP, FITTED, PREDICTORS
from smoe.prediction.activation_matrix import ActivationMatrix, matrices_of
from smoe.prediction.activation_path import NO_EXPERT, Paths, RoutedLayer, joined
from smoe.prediction.affinity import Affinity, affinity_of
from smoe.prediction.expert_mlp import ExpertMLP, folded, nbytes_of, network, state_width, states
from smoe.prediction.fitted import Fitted, counted
from smoe.prediction.popularity import Popularity, popularity_of
from smoe.prediction.previous_token import PreviousToken
from smoe.routing import Phase, Routing
from smoe.simulator.virtual_clock import StepTimes, replay_on_clock
from smoe.trace.file import Trace
from smoe.trace.recorder import recording
from tests import oracle

pytestmark = pytest.mark.usefixtures("own_cache")
LAYERS = (RoutedLayer(1, 4, 2), RoutedLayer(2, 4, 2), RoutedLayer(5, 3, 1))
CHOSEN = np.array(
    [
        [[0, 1], [2, 3], [0, NO_EXPERT]],
        [[0, 2], [2, 1], [0, NO_EXPERT]],
        [[3, 1], [0, 2], [2, NO_EXPERT]],
    ]
)
PATHS = Paths(LAYERS, CHOSEN, np.array([0, 0, 1]))


def decode(layer: int, *rows: list[int]) -> Routing:
    experts = next(each.experts for each in LAYERS if each.layer == layer)
    return Routing(layer, Phase.DECODE, experts, rows, None, len(rows))


def said(predictor: Predictor, layer: int, rows: list[int] | None = None) -> list[Prediction]:
    return list(predictor.predict(Sight(layer, None, None, rows)))


def test_matrices_are_the_counts_made_by_hand() -> None:
    assert np.allclose(
        popularity_of(PATHS), [[2 / 6, 2 / 6, 1 / 6, 1 / 6], [1 / 6, 1 / 6, 3 / 6, 1 / 6], [2 / 3, 0, 1 / 3, 0]]
    )
    affinity = affinity_of(PATHS)
    assert affinity.shape == (2, 4, 4)
    assert np.allclose(affinity[0, 0], [0, 1 / 4, 2 / 4, 1 / 4]), "0 was chosen twice, with 2, 3 and 2, 1 after it"
    assert np.allclose(affinity[0, 1], [1 / 4, 0, 2 / 4, 1 / 4])
    assert np.allclose(affinity[1], [[0, 0, 1, 0], [1, 0, 0, 0], [2 / 3, 0, 1 / 3, 0], [1, 0, 0, 0]])
    matrices = matrices_of(PATHS)
    assert matrices.tolist() == [
        [[2, 1, 1, 0], [0, 1, 2, 1], [2, 0, 0, 0]],
        [[0, 1, 0, 1], [1, 0, 1, 0], [0, 0, 1, 0]],
    ]


def test_what_was_never_chosen_has_no_share() -> None:
    affinity = affinity_of(PATHS._replace(chosen=CHOSEN[:2], sequence=np.array([0, 0])))
    assert not affinity[0, 3].any() and np.isfinite(affinity).all()


def test_popularity_and_affinity_name_the_most_frequent_first() -> None:
    popular, affine = Popularity(LAYERS, popularity_of(PATHS)), Affinity(LAYERS, affinity_of(PATHS))
    for predictor in (popular, affine):
        predictor.observe(decode(1, [3, 1]))
    assert said(popular, 1) == [Prediction(2, [2, 0])], "ties go by number"
    assert said(affine, 1) == [Prediction(2, [2, 0])], "after 3: 0, 2; after 1: 2 twice, 0, 3"
    for predictor in (popular, affine):
        predictor.observe(decode(2, [0, 3]))
    assert said(popular, 2) == [Prediction(5, [0])]
    assert said(affine, 2) == [Prediction(5, [0])], "as many of either; 0 has the lower number"
    affine.observe(decode(5, [0]))
    assert said(affine, 5) == [], "nothing comes after the last layer"


def test_rows_of_a_batch_are_guessed_for_together_and_ended_ones_not() -> None:
    affine = Affinity(LAYERS, affinity_of(PATHS))
    affine.observe(decode(1, [0, 2], [4, 4], [3, 1]))
    assert said(affine, 1, [0]) == [Prediction(2, [2, 1])]
    assert said(affine, 1, [0, 2]) == [Prediction(2, [2, 0, 1])], "2 at 1 for both, 0 and 1 at 3/4 for one"
    assert said(affine, 1, []) == []


def test_the_token_before_is_the_last_real_one() -> None:
    previous = PreviousToken(LAYERS)
    previous.observe(decode(1, [0, 1]))
    assert said(previous, 1) == [], "nothing has been heard of layer 2"
    prompt = [[0, 1], [2, 1], [4, 4], [3, 0], [1, 3], [2, 0]]  # two of three tokens, the first one ends with padding
    previous.observe(Routing(2, Phase.PREFILL, 4, prompt, None, 2))
    previous.observe(decode(1, [0, 1], [1, 2]))
    assert said(previous, 1, [0]) == [Prediction(2, [2, 1])] and said(previous, 1, [1]) == [Prediction(2, [2, 0])]
    previous.observe(decode(2, [3, 1], [1, 0]))
    previous.observe(decode(1, [0, 1], [1, 2]))
    assert said(previous, 1, [0]) == [Prediction(2, [3, 1])], "in the router's order"


def test_the_most_similar_sequence_is_asked_and_a_prompt_begins_anew() -> None:
    matrix = ActivationMatrix(LAYERS, matrices_of(PATHS))
    matrix.observe(decode(1, [3, 1]))
    assert said(matrix, 1) == [Prediction(2, [0, 2])], "the second sequence's"
    matrix.observe(decode(2, [0, 2]))
    assert said(matrix, 2) == [Prediction(5, [2])]
    for _ in range(3):
        matrix.observe(decode(1, [0, 2]))
    assert said(matrix, 1) == [Prediction(2, [2, 1])], "by now it is more like the first"
    matrix.observe(Routing(1, Phase.PREFILL, 4, [[3, 1], [4, 4]], None, 1))
    matrix.observe(decode(1, [3, 1]))
    assert said(matrix, 1) == [Prediction(2, [0, 2])]


def test_states_are_laid_out_as_the_paper_says() -> None:
    popularity, affinity = popularity_of(PATHS), affinity_of(PATHS)
    found = states(1, CHOSEN, LAYERS, popularity, affinity)
    assert found.shape == (3, state_width(LAYERS)) == (3, 2 * 2 + 4 + 2 * 4)
    assert np.allclose(found[0, :4], [1 / 4, 2 / 4, 0, 0]), "layer 0's choice, then padding"
    assert np.allclose(found[0, 4:8], 4 * popularity[1])
    assert np.allclose(found[0, 8:], 4 * np.concatenate([affinity[0, 0], affinity[0, 1]]))
    assert np.allclose(states(2, CHOSEN, LAYERS, popularity, affinity)[2, :4], [1, 2 / 4, 1 / 4, 3 / 4])


def test_the_network_has_seven_layers_and_says_the_same_when_folded() -> None:
    torch.manual_seed(1)
    trained = network(state_width(LAYERS), 4)
    widths = [part.out_features for part in trained if isinstance(part, torch.nn.Linear)]
    assert widths == [2048, 1024, 512, 256, 128, 64, 4]
    trained(torch.randn(64, state_width(LAYERS)))  # statistics that are not 0 and 1
    trained.eval()
    popularity, affinity = popularity_of(PATHS), affinity_of(PATHS)
    predictor = ExpertMLP(LAYERS, popularity, affinity, folded(trained))
    given = torch.from_numpy(states(2, CHOSEN, LAYERS, popularity, affinity))
    with torch.no_grad():
        expected = trained(given).numpy()
    assert np.allclose(predictor._scores(2, CHOSEN[:, :2], [0, 1, 2]), expected, atol=1e-5)
    counts = {"popularity": torch.from_numpy(popularity), "affinity": torch.from_numpy(affinity)}
    assert nbytes_of(LAYERS) == Fitted(EXPERT_MLP, LAYERS, folded(trained) | counts, 1).nbytes


def test_traces_of_several_runs_have_sequences_of_their_own() -> None:
    both = joined([PATHS, PATHS])
    assert both.sequence.tolist() == [0, 0, 1, 2, 2, 3] and len(list(both.of_sequences())) == 4
    assert len(both.chosen) == 6


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory, toy: Callable[..., Path]) -> Path:
    path = tmp_path_factory.mktemp("recorded") / "run.trace"
    model = oracle.open_model(toy("mixtral"), "half", prefetch="none")
    with model.offload, recording(model, path):
        for start in range(2):
            oracle.greedy(model, oracle.PROMPT[:, start:])
    return path


def fitted_on(path: Path, name: str) -> Fitted:
    header = Trace(path).header
    layers = tuple(RoutedLayer(each.layer, each.experts, each.top_k) for each in header.layers)
    paths = paths_of(path, layers, None, "trace")
    if name != EXPERT_MLP:
        return counted(name, paths)
    torch.manual_seed(0)
    counts = {"popularity": popularity_of(paths), "affinity": affinity_of(paths)}
    weights = folded(network(state_width(layers), layers[0].experts, (32, 16)).eval())
    return Fitted(name, layers, weights | {key: torch.from_numpy(of) for key, of in counts.items()}, 1)


OF_HISTORY = [name for name in PREDICTORS.built_in if "prefetch_asked" in PREDICTORS.find(name).settings]


class Listening:
    """Notes what a predictor hears and says."""

    def __init__(self, predictor: Predictor, monkeypatch: pytest.MonkeyPatch) -> None:
        self.heard: list[Routing] = []
        self.said: dict[int, list[Prediction]] = {}
        """By the number of routings that were heard before."""
        observe, predict = predictor.observe, predictor.predict

        def noted(routing: Routing) -> None:
            self.heard.append(routing._replace(scores=None, weights=None))
            observe(routing)
            if routing.phase is Phase.DECODE:  # in engine and simulator only where there is room
                self.said[len(self.heard)] = list(predict(Sight(routing.layer, None)))

        monkeypatch.setattr(predictor, "observe", noted)


def test_predictors_that_must_be_fitted_are_listed() -> None:
    assert set(FITTED) == {name for name in PREDICTORS.built_in if PREDICTORS.find(name).is_fitted}


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("name", OF_HISTORY)
def test_engine_and_simulator_hear_and_say_the_same(
    name: str,
    asked: str,
    recorded: Path,
    toy: Callable[..., Path],
    open_model: Callable[..., PreTrainedModel],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = toy("mixtral")
    if name in FITTED:
        fitted = fitted_on(recorded, name)
        StoredPredictor(fitted).store(folder)
    model = open_model(folder, "half", prefetch=name, prefetch_asked=asked)
    predictor = model.offload.executor.prefetching.predictors[Phase.DECODE]
    engine = Listening(predictor, monkeypatch)
    for start in range(2):
        steps = oracle.greedy(model, oracle.PROMPT[:, start:])
        if start == 0:
            oracle.assert_same_steps(steps, oracle.reference_steps(folder))
    assert model.offload.stats().prefetches > 0
    trace = Trace(recorded).routings()
    layers = tuple(RoutedLayer(each.layer, each.experts, each.top_k) for each in Trace(recorded).header.layers)
    again = fitted.predictor() if name in FITTED else PreviousToken(layers)
    again.ask_at(ASKED[asked])
    simulator = Listening(again, monkeypatch)
    slots = model.offload.ledger.cache_slots
    timed = replay_on_clock(trace, slots, 2, LRU(), StepTimes(1.0, float, float), predictor=again)
    assert engine.heard == simulator.heard and engine.said == simulator.said
    assert any(engine.said.values()) and timed.prefetches > 0
    if name == EXPERT_MLP:
        assert model.offload.ledger.entries()["learned"] == fitted.nbytes


@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_duoserve_keeps_a_tokens_experts_and_its_bits(
    device: str,
    recorded: Path,
    toy: Callable[..., Path],
    open_model: Callable[..., PreTrainedModel],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However much memory there is; refused until its network is trained, and before where there is no room for it."""
    folder = Path(shutil.copytree(toy("mixtral"), tmp_path / "model"))
    bench: dict[str, Any] = {"device": "emulated", "dilation": 1.0} if device == "emulated" else {}
    with pytest.raises(BudgetError, match="learned"):
        open_model(folder, 30, preset="duoserve", **bench)
    monkeypatch.setattr("smoe.prediction.expert_mlp.network.__defaults__", ((32, 16),))
    with pytest.raises(ConfigError, match="expert-mlp"):
        open_model(folder, 30, preset="duoserve", **bench)
    StoredPredictor(fitted_on(recorded, EXPERT_MLP)).store(folder)
    model = open_model(folder, 30, preset="duoserve", **bench)
    oracle.assert_same_steps(oracle.greedy(model), oracle.reference_steps(folder))
    ledger, counted = model.offload.ledger, model.offload.stats()
    assert (ledger.cache_slots, ledger.staging_slots) == (2, 3)
    assert counted.prefetches > counted.forward_passes, "it asks in every layer but the last"
    assert model.offload.executor.prefetching.predictors[Phase.DECODE].asked is Moment.FIRST_DONE
    model.offload.executor.table.check()
