"""Fits predictors that use only the history of routing to recorded traces, and measures them on others token by token.

Rates are those of DuoServe's table 3. *exact*: all experts of the next layer were among the predicted ones, as many as
it chooses; *at least one*: some of them were. Every layer but the first counts, for every token.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from smoe.errors import ConfigError
from smoe.eval.model_traces import another_model_s
from smoe.eval.train_expert_mlp import Training, train_expert_mlp
from smoe.policy.prediction import Sight
from smoe.policy.registry import EXPERT_MLP, fitted_names
from smoe.prediction.activation_path import Paths, RoutedLayer, joined
from smoe.prediction.fitted import Fitted, counted
from smoe.prediction.history import FromHistory
from smoe.prediction.previous_token import PreviousToken
from smoe.routing import Phase, Routing
from smoe.trace.file import Trace
from smoe.trace.paths import paths_in, routed_layers

PAPER = {
    "DuoServe, Mixtral 8x7B, Orca": (0.6685, 0.9545),
    "DuoServe, Mixtral 8x7B, SQuAD": (0.6023, 0.9231),
    "DuoServe, Mixtral 8x22B, Orca": (0.5621, 0.9045),
    "DuoServe, Mixtral 8x22B, SQuAD": (0.5416, 0.9031),
}
"""The paper's table 3: exact and at-least-one rates of ExpertMLP, two of eight experts."""
LEAST_TOKENS = 40
"""The least number of tokens: fewer leave too few to decide when to stop."""
_JUDGED_TOKENS = 1000
"""The number of measured tokens of every trace: a network takes about a millisecond for each layer."""
_TIMED = 200
"""The number of predictions from which the time of one is measured."""


@dataclass(frozen=True)
class PredictionRates:
    """The rates of right predictions of one predictor."""

    exact: float
    at_least_one: float
    recall: float
    """The share of the chosen experts that was predicted."""
    seconds: float
    """The median seconds of one prediction."""
    predictions: int


@dataclass(frozen=True)
class PredictorTuning:
    """The fitted predictor, and the rates of all predictors."""

    fitted: Fitted
    training: Training | None
    """None for a predictor of counts."""
    rates: dict[str, dict[str, PredictionRates]]
    """Rates by trace, then by predictor."""

    def as_json(self) -> dict[str, Any]:
        losses = [] if self.training is None else self.training.losses
        return {
            "predictor": self.fitted.name,
            "tokens": self.fitted.tokens,
            "bytes": self.fitted.nbytes,
            "core_seconds": self.training.core_seconds if self.training else 0.0,
            "epochs": len(losses),
            "best_epoch": self.training.best_epoch if self.training else 0,
            "losses": losses,
            "rates": {trace: {name: asdict(rates) for name, rates in of.items()} for trace, of in self.rates.items()},
        }


def tune_predictor(
    name: str,
    traces: Sequence[Path],
    held_out: Sequence[Path],
    layers: tuple[RoutedLayer, ...],
    tokens: int | None,
    checkpoint: Path | None,
    tick: Callable[[int], None] = lambda epochs: None,
    tick_judged: Callable[[int], None] = lambda predictors: None,
    most_epochs: int | None = None,
) -> PredictorTuning:
    """Fit the predictor `name` to the first `tokens` (None: all) of each trace of a model with these `layers`, and
    measure it on the held-out traces, with all predictors that need no training.

    `checkpoint`, `tick` and `most_epochs` are as for `train_expert_mlp`; `tick_judged` receives the number of measured
    predictors. Raises `ConfigError` for traces of another model or with too few tokens, `TraceError` for files that are
    not traces.
    """
    paths = joined([paths_of(path, layers, tokens, "trace") for path in traces])
    if len(paths.chosen) < LEAST_TOKENS:
        raise ConfigError.too_few_tokens("trace", len(paths.chosen), LEAST_TOKENS, "to fit a predictor on")
    judged_on = {path.stem: paths_of(path, layers, _JUDGED_TOKENS, "held_out") for path in held_out}
    training = None
    if name == EXPERT_MLP:
        training = train_expert_mlp(paths, checkpoint=checkpoint, tick=tick, most_epochs=most_epochs)
        fitted = training.fitted
    else:
        fitted = counted(name, paths)
    makers: dict[str, Callable[[], FromHistory]] = {"previous-token": lambda: PreviousToken(layers)}
    makers |= {each: counted(each, paths).predictor for each in fitted_names() if each not in (name, EXPERT_MLP)}
    makers[name] = fitted.predictor
    rates: dict[str, dict[str, PredictionRates]] = {trace: {} for trace in judged_on}
    for done, (each, make) in enumerate(makers.items(), start=1):
        for trace, unseen in judged_on.items():
            rates[trace][each] = judge(make, unseen)
        tick_judged(done)
    return PredictorTuning(fitted, training, rates)


def paths_of(path: Path, layers: tuple[RoutedLayer, ...], tokens: int | None, setting: str) -> Paths:
    """Return the paths of a trace's first `tokens`, including prompts, without padding.

    Raises `ConfigError` for a trace with other layers, given for `setting`, and `TraceError`.
    """
    trace = Trace(path)
    if routed_layers(trace.header) != layers:
        raise another_model_s(path, trace, setting)
    return paths_in(trace, tokens)


def judge(make: Callable[[], FromHistory], paths: Paths) -> PredictionRates:
    """Return the rates of a predictor that observes each sequence from its beginning, every token alone."""
    exact = some = named_right = wanted_all = count = 0
    times: list[float] = []
    for chosen in paths.of_sequences():
        predictor = make()
        for token in chosen:
            for place, layer in enumerate(paths.layers):
                row = token[place, : layer.top_k].tolist()
                predictor.observe(Routing(layer.layer, Phase.DECODE, layer.experts, [row]))
                if place + 1 == len(paths.layers):
                    continue
                began = time.perf_counter()
                named = next(iter(predictor.predict(Sight(layer.layer, None))), None)
                if len(times) < _TIMED:
                    times.append(time.perf_counter() - began)
                wanted = set(token[place + 1, : paths.layers[place + 1].top_k].tolist())
                right = len(wanted & set(named.experts)) if named is not None else 0
                exact += right == len(wanted)
                some += right > 0
                named_right += right
                wanted_all += len(wanted)
                count += 1
    return PredictionRates(exact / count, some / count, named_right / wanted_all, float(np.median(times)), count)
