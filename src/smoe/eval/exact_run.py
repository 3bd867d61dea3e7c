"""Records one exact greedy run after a prompt, with which draft models are compared later. Predictors without a draft
model run meanwhile, and their predictions are recorded too:

    previous token, popularity    from the earlier choices of the same router
    gates                         the routers of layers l+1, l+2, l+4 applied to the router input of layer l
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from smoe.errors import ConfigError, UnsupportedModelError
from smoe.load.learned import learned_by
from smoe.models.kv_cache import RowCache
from smoe.models.scoring import ScoringRule
from smoe.models.spec import LibrarySpec
from smoe.policy.registry import CORRECTED_GATES, PREDICTORS, PREFETCH_WHAT
from smoe.prediction.activation_path import NO_EXPERT
from smoe.prediction.corrected_gates import CorrectedGates
from smoe.prediction.inputs import PredictorInputs, routed_layers
from smoe.prediction.stacked_gates import StackedGates
from smoe.routing import Routing
from smoe.runtime.draft_model import Greedy
from smoe.runtime.observer import StepObserver
from smoe.runtime.step import Step

AHEAD = (1, 2, 4)
"""The distances, in layers, between the input of a router and the layer that it predicts."""
SPARES = 4
"""The number of experts that are predicted in addition to a layer's top-k, if the layer has so many."""
PREVIOUS, POPULAR, GATE, CORRECTED = "previous token", "popularity", "gate", "corrected gate"

Tick = Callable[[int], None]


def ahead(name: str, depth: int) -> str:
    """Return the name in reports of the predictor `name` that predicts `depth` layers ahead."""
    return f"{name} {depth} ahead"


@dataclass(frozen=True)
class ExactRun:
    """The recorded run of the model after one prompt. Letters: n tokens, L layers, K experts chosen in each."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    """[n] the decoded tokens, which are the inputs of the steps after the prompt."""
    chosen: np.ndarray
    """[n, L, K] the experts that the routers chose. A layer with a smaller K than the widest layer is filled with
    `NO_EXPERT`."""
    named: dict[str, np.ndarray]
    """For each predictor, [n, L, K + spares] predicted experts, best first; `NO_EXPERT` if there is no prediction."""
    cache: RowCache
    """The keys and values of all positions. They are valid until the model begins another text."""


class RunListener(StepObserver):
    """An observer that records the routers' choices during one run, and runs predictors whose predictions it
    records."""

    def __init__(self, model: PreTrainedModel, spec: LibrarySpec, rules: dict[int, ScoringRule]) -> None:
        self.layers = routed_layers(spec)
        self.refused: dict[str, str] = {}
        """The predictors that could not be used, with the reasons."""
        self._rules = rules
        self._places = {layer.layer: place for place, layer in enumerate(self.layers)}
        self._wide = max(layer.top_k for layer in self.layers)
        self._counts = [np.zeros(layer.experts, dtype=np.int64) for layer in self.layers]
        """For each layer, how often each expert was used so far. Popularity is predicted from it."""
        self._last: dict[int, np.ndarray] = {}
        """[K] the choice of each layer for the token before, by the layer's place."""
        self._gates, self._corrected = self._asked(model, spec)
        asked = [name for name, gates in ((GATE, self._gates), (CORRECTED, self._corrected)) if gates is not None]
        depths = [depth for depth in AHEAD if depth < len(self.layers)]
        self.predictors = (PREVIOUS, POPULAR, *(ahead(name, depth) for name in asked for depth in depths))
        self._is_reading = True
        self.begin()

    def begin(self) -> None:
        """Delete the recorded choices and predictions, before another text."""
        self._is_reading = True
        self._chosen: list[np.ndarray] = []
        self._named: list[dict[str, np.ndarray]] = []

    def next_token(self) -> None:
        """Prepare for recording the next decoded token."""
        self._is_reading = False
        self._chosen.append(self._no_experts(self._wide))
        self._named.append({name: self._no_experts(self._wide + SPARES) for name in self.predictors})

    def routed(self, step: Step) -> None:
        place = self._places[step.layer]
        index = step.top_k_index.cpu().numpy()  # [T, K]
        if not self._is_reading:
            self._chosen[-1][place, : index.shape[1]] = index[0]
            self._say(PREVIOUS, place, self._last[place])
            popular = np.argsort(-self._counts[place], kind="stable")
            self._say(POPULAR, place, popular[: index.shape[1] + SPARES])
        self._last[place] = index[-1]
        self._counts[place] += np.bincount(index.ravel(), minlength=len(self._counts[place]))

    def computed(self, step: Step, output: torch.Tensor) -> None:
        place = self._places[step.layer]
        following = {depth: place + depth for depth in AHEAD if place + depth < len(self.layers)}
        if self._gates is not None and following and not self._is_reading:
            logits = list(self._gates.logits(step.layer, step.hidden).values())
            for depth, after in following.items():
                self._say(ahead(GATE, depth), after, self._best(after, logits[depth - 1]))
        if self._corrected is None:
            return
        self._corrected.observe_input(Routing(step.layer, step.phase, self.layers[place].experts, ()), step.hidden)
        for depth, after in following.items() if not self._is_reading else ():
            if (step.layer, self.layers[after].layer) in self._learned:
                better = self._corrected.logits(step.layer, self.layers[after].layer, step.hidden)
                self._say(ahead(CORRECTED, depth), after, self._best(after, better))

    def run(self, prompt: Sequence[int], tokens: Sequence[int], cache: RowCache) -> ExactRun:
        """Return the choices and predictions recorded since `begin`."""
        named = {name: np.stack([names[name] for names in self._named]) for name in self.predictors}
        return ExactRun(tuple(prompt), tuple(tokens), np.stack(self._chosen), named, cache)

    def _asked(self, model: PreTrainedModel, spec: LibrarySpec) -> tuple[StackedGates | None, CorrectedGates | None]:
        """Return the predictors that apply later layers' routers, without and with corrections. A predictor that this
        model does not support is None."""
        subject = PredictorInputs(model, spec, self._rules, PREFETCH_WHAT[0], max(AHEAD))
        self._learned: Container[tuple[int, int]] = ()
        gates = corrected = None
        try:
            gates = PREDICTORS.find("stacked-gates").make(subject)
        except UnsupportedModelError as error:
            self.refused["gates"] = str(error)
        try:
            kind = PREDICTORS.find(CORRECTED_GATES)
            learned = learned_by(kind, CORRECTED_GATES, Path(spec.config.name_or_path), spec, max(AHEAD))
            corrected = kind.make(replace(subject, learned=learned))
            self._learned = learned.corrections
        except (ConfigError, UnsupportedModelError) as error:
            self.refused["corrected gates"] = str(error)
        assert gates is None or isinstance(gates, StackedGates)
        assert corrected is None or isinstance(corrected, CorrectedGates)
        return gates, corrected

    def _best(self, place: int, logits: torch.Tensor) -> np.ndarray:
        """Return the best experts of the layer at index `place` among the MoE layers, given its router's logits [1,
        E]."""
        layer = self.layers[place]
        rule = self._rules[layer.layer]
        most = min(layer.top_k + SPARES, layer.experts)
        best: np.ndarray = rule.choice(rule.scores(logits)).topk(most, dim=-1).indices[0].cpu().numpy()
        return best

    def _say(self, name: str, place: int, experts: np.ndarray) -> None:
        self._named[-1][name][place, : len(experts)] = experts

    def _no_experts(self, width: int) -> np.ndarray:
        return np.full((len(self.layers), width), NO_EXPERT, dtype=np.int64)


def record(text: Greedy, listener: RunListener, prompt: Sequence[int], tokens: int, tick: Tick) -> ExactRun | None:
    """Continue a prompt with the model of `text`, by at most `tokens` tokens or up to an end token. Return the run that
    `listener`, which observes the model, has recorded.

    `tick` is called for every token. Return None if the first new token is an end token.
    """
    ends, decoded = _end_tokens(text.model), list[int]()
    listener.begin()
    text.read(prompt)
    while len(decoded) < tokens and text.next_token not in ends:
        decoded.append(text.next_token)
        listener.next_token()
        text.take(decoded[-1:])
        tick(1)
    return listener.run(prompt, decoded, text.cache) if decoded else None


def _end_tokens(model: PreTrainedModel) -> tuple[int, ...]:
    named = model.generation_config.eos_token_id if model.generation_config is not None else None
    return () if named is None else (named,) if isinstance(named, int) else tuple(named)
