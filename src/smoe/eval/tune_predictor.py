"""Fits predictors that use only the history of routing to recorded traces, and measures them on other traces token by
token.

The rates are those of DuoServe's table 3. *exact*: how often all experts of the next layer were predicted, if as many
are predicted as the layer chooses. *at least one*: how often any of them was predicted. The rates are averaged over all
tokens and over every layer except the first.
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
from smoe.eval.train_expert_mlp import Training
from smoe.plug_ins import attribute_at
from smoe.policy.prediction import Sight
from smoe.policy.registry import FITTED
from smoe.prediction.activation_path import Paths, RoutedLayer, joined
from smoe.prediction.fitted import Fitted, counted, fitted_kind
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
"""The paper's table 3: the rates (exact, at least one) of ExpertMLP, for two of eight experts."""
LEAST_TOKENS = 40
"""The smallest number of tokens. With fewer, the held-out part is too small to decide when training should end."""
_JUDGED_TOKENS = 1000
"""The number of tokens of every trace on which predictors are measured. A network takes about a millisecond for each
layer."""
_TIMED = 200
"""The number of predictions whose time is measured."""


@dataclass(frozen=True)
class PredictionRates:
    """The rates at which one predictor is right, and the time that a prediction takes."""

    exact: float
    at_least_one: float
    recall: float
    """The fraction of the chosen experts that were predicted."""
    seconds: float
    """The median seconds of one prediction."""
    predictions: int


@dataclass(frozen=True)
class PredictorTuning:
    """A fitted predictor, and the rates of all predictors."""

    fitted: Fitted
    training: Training | None
    """The losses of the training; None for a predictor that is fitted by counting."""
    rates: dict[str, dict[str, PredictionRates]]
    """{trace: {predictor: its rates on this trace}}."""

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
    """Fit the predictor `name` to the first `tokens` tokens (None: all) of each trace of a model with these `layers`.
    Measure it on the held-out traces, together with all predictors that need no training.

    `checkpoint`, `tick` and `most_epochs`: as for `train_expert_mlp`. `tick_judged` is called with the number of
    predictors measured. Raise `ConfigError` for traces of another model or with too few tokens, and `TraceError` for
    files that are not traces.
    """
    paths = joined([paths_of(path, layers, tokens, "trace") for path in traces])
    if len(paths.chosen) < LEAST_TOKENS:
        raise ConfigError.too_few_tokens("trace", len(paths.chosen), LEAST_TOKENS, "to fit a predictor on")
    judged_on = {path.stem: paths_of(path, layers, _JUDGED_TOKENS, "held_out") for path in held_out}
    training: Training | None = None
    trained_by = fitted_kind(name).trained_by
    if trained_by:
        training = attribute_at(trained_by)(paths, checkpoint=checkpoint, tick=tick, most_epochs=most_epochs)
    fitted = counted(name, paths) if training is None else training.fitted
    makers: dict[str, Callable[[], FromHistory]] = {"previous-token": lambda: PreviousToken(layers)}
    others = [each for each in FITTED if each != name and not fitted_kind(each).trained_by]
    makers |= {each: counted(each, paths).predictor for each in others}
    makers[name] = fitted.predictor
    rates: dict[str, dict[str, PredictionRates]] = {trace: {} for trace in judged_on}
    for done, (each, make) in enumerate(makers.items(), start=1):
        for trace, unseen in judged_on.items():
            rates[trace][each] = judge(make, unseen)
        tick_judged(done)
    return PredictorTuning(fitted, training, rates)


def paths_of(path: Path, layers: tuple[RoutedLayer, ...], tokens: int | None, setting: str) -> Paths:
    """Return the paths (the chosen experts, layer by layer) of a trace's tokens, including those of prompts, without
    padding. `tokens`: only this many tokens from the start; None: all.

    Raise `ConfigError` if the trace, given as `setting`, has other layers, and `TraceError` if it is not a trace.
    """
    trace = Trace(path)
    if routed_layers(trace.header) != layers:
        raise another_model_s(path, trace, setting)
    return paths_in(trace, tokens)


def judge(make: Callable[[], FromHistory], paths: Paths) -> PredictionRates:
    """Return the rates of a predictor on these paths. It observes each sequence from its beginning, one token at a
    time."""
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
