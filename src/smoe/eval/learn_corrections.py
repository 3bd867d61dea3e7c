"""Learns corrections of a model's routers from one part of a text, and measures them on the rest of the text.

    | 80 % of the tokens: regression | 10 %: probabilities | 10 %: results |

A router's input depends on the text only, so the text is processed like a prompt, in pieces as long as the context. All
inputs of the routers are stored meanwhile: layers x tokens x hidden size, in the model's dtype. Equal texts give equal
corrections; nothing is random.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from smoe.bounds import MOST_CORRECTED_LAYERS
from smoe.errors import ConfigError
from smoe.generation.teacher_forcing import read_through
from smoe.kernels.threads import threads
from smoe.load.gate_corrections import LearnedCorrections
from smoe.models.router_matrix import RouterMatrix, matrices_of
from smoe.models.scoring import ScoringRule
from smoe.models.spec import ModelSpec
from smoe.policy.prediction import Sight
from smoe.policy.registry import PREDICTORS
from smoe.policy.trial import WORTH
from smoe.prediction.correction import Correction, fitted, with_confidence
from smoe.prediction.inputs import PredictorInputs
from smoe.prediction.ranking import margins
from smoe.routing import Phase, Routing
from smoe.runtime.engine import Engine
from smoe.runtime.observer import StepObserver
from smoe.runtime.step import Step

LEAST_TOKENS = 500
"""The smallest number of tokens. With fewer, the corrections predict worse than the routers alone."""
_FITTED, _CALIBRATED = 0.8, 0.9
"""The ends of the first and second part of the text, as fractions of its length."""
_TIMED = 40
"""The number of predictions of every layer by which the time of a prediction is measured."""


class Judged(NamedTuple):
    """How right the predictions `distance` layers ahead are on the last tenth of the text, averaged over the layers."""

    distance: int
    next_gate: float
    """The fraction of the chosen experts that the later router predicts from this layer's input, without a
    correction."""
    corrected: float
    """The fraction of the chosen experts that are predicted with the correction, if as many experts are predicted as
    the router chooses."""
    precision: float
    """The fraction of right predictions among those that are worth a load."""
    recall: float
    """The fraction of the chosen experts that are predicted and worth a load."""


@dataclass(frozen=True)
class FittedCorrections:
    """Corrections learned from a text, with their results."""

    corrections: Mapping[tuple[int, int], Correction]
    """Corrections by (layer of the input, predicted layer), in the model's dtype."""
    judged: tuple[Judged, ...]
    """How right the predictions are at each distance, the nearest first."""
    tokens: int
    """The number of tokens of the text."""
    seconds_per_layer: float
    """The median seconds in which the next layer is predicted for one token, including the ranking."""


class Inputs(NamedTuple):
    """The router inputs of one layer and the experts that its router chose, for all tokens."""

    hidden: torch.Tensor
    """[T, H] router inputs."""
    top_k_index: torch.Tensor
    """[T, K] chosen experts."""


def pairs_of(spec: ModelSpec) -> list[tuple[int, int]]:
    """Return all pairs (layer of the input, predicted layer) for which corrections are learned."""
    layers = [site.layer for site in spec.sites]
    return [(layer, after) for n, layer in enumerate(layers, 1) for after in layers[n : n + MOST_CORRECTED_LAYERS]]


def learn(
    model: PreTrainedModel,
    spec: ModelSpec,
    ids: Sequence[int],
    on_read: Callable[[int], None],
    on_fitted: Callable[[int], None],
) -> FittedCorrections:
    """Return the corrections learned from the text `ids`. `on_read` is called with the number of tokens of each pass,
    and `on_fitted` with 1 after each pair of layers.

    Raise `ConfigError` if the text is too short, and `UnsupportedModelError` if a router is not a plain matrix product.
    The model must have been loaded with scores (`EngineConfig.needs_scores`).
    """
    check_enough(len(ids))
    engine: Engine = model.offload  # type: ignore[assignment]
    matrices = matrices_of(model, spec)
    listener = _RouterInputCollector()
    with engine.observed_by(listener):
        read_through(model, ids, on_read)
    observed = {
        layer: Inputs(torch.cat(listener.hidden[layer]), torch.cat(listener.top_k_index[layer]))
        for layer in listener.hidden
    }
    has_before = torch.arange(len(ids)) % engine.context_tokens != 0  # the text was read in pieces
    corrections, found = {}, dict[int, list[Judged]]()
    places = {site.layer: place for place, site in enumerate(spec.sites)}
    with torch.no_grad():
        for layer, after in pairs_of(spec):
            pair = _Pair(observed[layer].hidden, observed[after], has_before, matrices[after], engine.rules[after])
            correction = pair.learned().to(torch.device("cpu"), spec.dtype.torch)
            corrections[layer, after] = correction
            distance = places[after] - places[layer]
            found.setdefault(distance, []).append(pair.judged(correction, distance))
            on_fitted(1)
        last = {layer: Inputs(each.hidden[-1:], each.top_k_index[-1:]) for layer, each in observed.items()}
        learned = LearnedCorrections(corrections, len(ids), "")
        seconds = _seconds_per_layer(PredictorInputs(model, spec, engine.rules, "top-score", 1, learned), last)
    return FittedCorrections(
        corrections, tuple(_mean(found[distance]) for distance in sorted(found)), len(ids), seconds
    )


def check_enough(tokens: int) -> None:
    """Raise `ConfigError` if a text has too few tokens."""
    if tokens < LEAST_TOKENS:
        purpose = "to learn what layers do to their routers' input, better some thousands"
        raise ConfigError.too_few_tokens("text", tokens, LEAST_TOKENS, purpose)


class _Pair:
    """The data from which a later layer is predicted: the router inputs of an earlier layer, and the router inputs and
    choices of the later layer."""

    def __init__(
        self, hidden: torch.Tensor, later: Inputs, has_before: torch.Tensor, matrix: RouterMatrix, rule: ScoringRule
    ) -> None:
        device = hidden.device
        self._hidden = hidden
        self._before = torch.cat([torch.zeros_like(later.hidden[:1]), later.hidden[:-1]])
        self._has_before = has_before.to(device)
        self._index = later.top_k_index
        self._logits = matrix.logits(later.hidden)
        self._matrix = matrix
        self._rule = rule
        tokens = len(hidden)
        self._fitted = slice(0, int(_FITTED * tokens))
        self._calibrated = slice(int(_FITTED * tokens), int(_CALIBRATED * tokens))
        self._judged = slice(int(_CALIBRATED * tokens), tokens)

    def learned(self) -> Correction:
        """Return the correction. Its weights are fitted on the first part of the text, its probabilities on the
        second."""
        of = self._fitted
        known = (self._hidden[of].cpu(), self._before[of].cpu(), self._has_before[of].cpu())
        correction = fitted(*known, self._logits[of].cpu(), self._matrix.weight.cpu())
        of = self._calibrated
        margin = self._margins(self._guessed(correction, of).cpu())
        return with_confidence(correction, margin, self._chosen(of).cpu())

    def judged(self, correction: Correction, distance: int) -> Judged:
        """Return how right the predictions with a correction are on the last part of the text."""
        of = self._judged
        wanted = self._chosen(of)
        guessed = self._guessed(correction, of)
        corrected, gate = self._margins(guessed) >= 0, self._margins(self._matrix.logits(self._hidden[of])) >= 0
        asked = corrected & (correction.probabilities(self._margins(guessed)) >= WORTH)
        right, all_wanted = float((asked & wanted).sum()), float(wanted.sum())
        return Judged(
            distance=distance,
            next_gate=float((gate & wanted).sum()) / all_wanted,
            corrected=float((corrected & wanted).sum()) / all_wanted,
            precision=right / max(1.0, float(asked.sum())),
            recall=right / all_wanted,
        )

    def _guessed(self, correction: Correction, of: slice) -> torch.Tensor:
        """Return [T, E], the predicted logits of the later layer's router. The token before is used if it is known, as
        in a running sequence."""
        hidden = self._hidden[of]
        correction = correction.to(hidden.device, correction.weight.dtype)
        hidden = hidden.to(correction.weight.dtype)
        followed = correction.logits(hidden, self._before[of].to(hidden.dtype))
        return torch.where(self._has_before[of].unsqueeze(1), followed, correction.logits(hidden, None))

    def _margins(self, logits: torch.Tensor) -> torch.Tensor:
        return margins(self._rule, self._index.shape[1], logits)

    def _chosen(self, of: slice) -> torch.Tensor:
        """Return [T, E], whether the later layer's router chose each expert."""
        wanted = torch.zeros(len(self._index[of]), self._logits.shape[1], dtype=torch.bool, device=self._index.device)
        return wanted.scatter_(1, self._index[of].long(), True)


class _RouterInputCollector(StepObserver):
    """An observer that stores the inputs and choices of every layer's router."""

    def __init__(self) -> None:
        self.hidden: dict[int, list[torch.Tensor]] = {}
        self.top_k_index: dict[int, list[torch.Tensor]] = {}

    def computed(self, step: Step, output: torch.Tensor) -> None:
        self.hidden.setdefault(step.layer, []).append(step.hidden.detach().clone())
        self.top_k_index.setdefault(step.layer, []).append(step.top_k_index.detach().clone())


def _mean(of: Sequence[Judged]) -> Judged:
    """Return the averages over the layers of the results for one distance."""
    return Judged(of[0].distance, *(sum(values) / len(of) for values in list(zip(*of, strict=True))[1:]))


def _seconds_per_layer(subject: PredictorInputs, last: Mapping[int, Inputs]) -> float:
    """Return the median seconds of predicting one layer ahead for one row, on one thread as in decode. Storing the
    token's inputs is included."""
    predictor = PREDICTORS.find("corrected-gates").make(subject)
    assert predictor is not None
    experts, seconds = {site.layer: site.experts for site in subject.spec.sites}, []
    with threads(1):
        for _ in range(_TIMED):
            for layer, (row, index) in last.items():
                routing = Routing(layer, Phase.DECODE, experts[layer], index.tolist())
                began = time.perf_counter()
                predictor.observe_input(routing, row)
                list(predictor.predict(Sight(layer, row)))
                seconds.append(time.perf_counter() - began)
    return median(seconds)
