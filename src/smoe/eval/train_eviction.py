"""Trains the estimate of the next use for `--eviction learned` on recorded traces.

The estimate has two parts. Both are fitted to D^n, where n is the number of tokens until an expert's next use
(`policy/eviction/learned.py`). They are fitted at every token of the traces, not only at evictions, because the quality
of an estimate does not depend on the cache.

The first part is a logistic regression by Newton's method. The second is a ridge regression from the choices of all
layers to the first part's error, in units of its standard deviation. The `RANK` directions of its solution that explain
most are used (reduced-rank regression: A. J. Izenman, Journal of Multivariate Analysis 5, 1975). Nothing is random:
equal traces give equal estimates.

The second part needs memory for four matrices of (layers x experts)^2 numbers. The eigenvectors of one of them take
most of the time.

Letters: T tokens, L layers, E experts, F inputs of the first part, R = `RANK`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from smoe.errors import ConfigError
from smoe.policy.eviction.learned import DECAY, DISCOUNT, FADING, FEATURES, NextUse, chance, features, spread
from smoe.routing import Phase, Routing

RANK = 64
"""The largest R. On the embedded model, 32 has 0.5 % more misses, and 128 has no fewer."""
PENALTY = 1000.0
"""The penalty of the ridge regression, in tokens: choices that occurred in far fewer tokens have almost no effect."""
LEAST_TOKENS = 200
"""The smallest number of tokens of all traces together."""
_UNSEEN = 20
"""The number of last tokens of a trace that are not used, because the next use of many experts is unknown there."""
_MOMENTS = 4
"""The number of layers of each token, evenly distributed, after which the second part is evaluated in training."""
_ROWS = 500_000
"""The approximate number of (token, expert) pairs to which the first part is fitted."""
_NEWTON = 8
_RIDGE = 0.1
"""The penalty that limits the weights in Newton's method."""

Traces = Sequence[Sequence[Routing]]
Tick = Callable[[int, int], None]


class _History(NamedTuple):
    """Which experts each token of a trace used, and how soon each expert is used again."""

    uses: np.ndarray
    """[T, L, E] 1 if a token used an expert, else 0."""
    target: np.ndarray
    """[T, L, E] D^n after each token, where n is the number of tokens until the expert's next use; 0 if it is never
    used again."""


class LayersShape(NamedTuple):
    """The layers of a model that have experts."""

    layers: Sequence[int]
    """The layers' numbers, ascending."""
    experts: int
    """E of the widest layer."""
    top_k: int
    """K of the widest layer."""


def train(traces: Traces, shape: LayersShape, tick: Tick = lambda done, total: None) -> NextUse:
    """Return the estimate that is trained on `traces` of one model. `tick` is called with the number of steps done and
    their total. Raise `ConfigError` if the traces have too few tokens."""
    histories = [_history(trace, shape) for trace in traces]
    tokens = sum(len(history.uses) for history in histories)
    if tokens < LEAST_TOKENS:
        raise ConfigError(
            f"{tokens} tokens are too few to train an eviction policy; record at least {LEAST_TOKENS}, better some "
            "thousands",
            setting="cache",
            given=f"{tokens} tokens",
            allowed=f"traces of at least {LEAST_TOKENS} tokens together",
        )
    total = 2 * tokens + tokens // 2
    rate = shape.top_k / shape.experts
    stride = max(1, tokens * len(shape.layers) * shape.experts // _ROWS)
    weights = _first_part(histories, rate, stride, _TokenProgress(tick, 0, total))
    second = _second_part(histories, rate, weights, _TokenProgress(tick, tokens, total))
    tick(total, total)
    return _by_number(second, shape, rate, weights)


class _TokenProgress:
    """Counts tokens and reports them to a `tick`."""

    def __init__(self, tick: Tick, done: int, total: int) -> None:
        self._tick, self._done, self._total = tick, done, total

    def __call__(self) -> None:
        self._done += 1
        self._tick(self._done, self._total)


def _history(trace: Sequence[Routing], shape: LayersShape) -> _History:
    """Return the uses of a trace, token by token. As in the eviction policy, each token of a prompt is a step, and a
    decode step of a batch is one step."""
    row_of = {layer: row for row, layer in enumerate(shape.layers)}
    steps: list[list[list[int]]] = [[] for _ in shape.layers]
    for routing in trace:
        rows = [chosen for row in routing.top_k_index if (chosen := [e for e in row if e != routing.experts])]
        if routing.phase is Phase.DECODE:
            rows = [sorted(set().union(*rows))] if rows else []
        steps[row_of[routing.layer]] += rows
    tokens = min(len(of_layer) for of_layer in steps)
    uses = np.zeros((tokens, len(shape.layers), shape.experts), dtype=np.float32)
    for row, of_layer in enumerate(steps):
        for token, used in enumerate(of_layer[:tokens]):
            uses[token, row, used] = 1.0
    target = np.zeros_like(uses)
    coming = np.zeros(uses.shape[1:], dtype=np.float32)
    for token in range(tokens - 1, -1, -1):
        target[token] = coming
        coming = np.where(uses[token] > 0, np.float32(1.0), coming * np.float32(DISCOUNT))
    return _History(uses, target)


def _features(history: _History, rate: float, progress: _TokenProgress) -> Iterator[np.ndarray]:
    """Yield [L, E, F], the inputs of the first part of the estimate, after every token."""
    fading = np.zeros((len(FADING), *history.uses.shape[1:]))
    uses = np.zeros(history.uses.shape[1:])
    for token, used in enumerate(history.uses):
        fading *= FADING[:, None, None]
        fading += used
        uses += used
        yield features(fading, uses, used, token + 1, rate)
        progress()


def _first_part(histories: Sequence[_History], rate: float, stride: int, progress: _TokenProgress) -> np.ndarray:
    """Return [F], the weights of the first part of the estimate, fitted at every `stride`-th token."""
    rows, values = [], []
    for history in histories:
        last = len(history.uses) - _UNSEEN
        for token, found in enumerate(_features(history, rate, progress)):
            if token % stride == 0 and token < last:
                rows.append(found.reshape(-1, FEATURES))
                values.append(history.target[token].reshape(-1))
    known, wanted = np.concatenate(rows), np.concatenate(values)
    weights = np.zeros(FEATURES)
    for _ in range(_NEWTON):
        estimate = chance(known, weights)
        curvature = (known * (estimate * (1.0 - estimate))[:, None]).T @ known + _RIDGE * np.eye(FEATURES)
        weights += np.linalg.solve(curvature, known.T @ (wanted - estimate) - _RIDGE * weights)
    return weights


class _Second(NamedTuple):
    """The parameters of the second part of the estimate. Layers are numbered among the layers with experts."""

    source: np.ndarray
    """[L, E, R] the vector that each expert adds to the context when it is chosen."""
    usual: np.ndarray
    """[L, R] what a token adds to the context on average."""
    target: np.ndarray
    """[L, E, R] the vector of each expert whose scalar product with the context is its estimate."""
    offset: np.ndarray
    """[L, E] a constant that is added to the estimate."""


def _second_part(histories: Sequence[_History], rate: float, weights: np.ndarray, progress: _TokenProgress) -> _Second:
    layers, experts = histories[0].uses.shape[1:]
    size = layers * experts
    mean = np.mean(np.concatenate([history.uses for history in histories]), axis=0)
    moments = sorted({layers * moment // _MOMENTS for moment in range(_MOMENTS)})
    squares, products = np.zeros((size, size)), np.zeros((size, size))
    context_sum, missing_sum, count = np.zeros(size), np.zeros(size), 0
    for history in histories:
        context, missing = _context_and_missing(history, mean, rate, weights, progress)
        for layer in moments:  # layers up to this one have observed the token, later ones the token before
            observed = np.concatenate([context[1:, : layer + 1], context[:-1, layer + 1 :]], axis=1).reshape(-1, size)
            wanted = np.concatenate([missing[1:, : layer + 1], missing[:-1, layer + 1 :]], axis=1).reshape(-1, size)
            squares += observed.T @ observed
            products += observed.T @ wanted
            context_sum += observed.sum(axis=0)
            missing_sum += wanted.sum(axis=0)
            count += len(observed)
    squares -= np.outer(context_sum, context_sum) / count
    products -= np.outer(context_sum, missing_sum) / count
    squares += PENALTY * len(moments) * np.eye(size)
    solution = np.linalg.solve(squares, products)
    _, directions = np.linalg.eigh(solution.T @ squares @ solution)
    directions_kept = directions[:, -RANK:]
    source = solution @ directions_kept
    offset = missing_sum / count - (context_sum / count) @ source @ directions_kept.T
    usual = (mean[:, :, None] * source.reshape(layers, experts, -1)).sum(axis=1)
    shape = (layers, experts, -1)
    return _Second(source.reshape(shape), usual, directions_kept.reshape(shape), offset.reshape(layers, experts))


def _context_and_missing(
    history: _History, mean: np.ndarray, rate: float, weights: np.ndarray, progress: _TokenProgress
) -> tuple[np.ndarray, np.ndarray]:
    """Return two arrays [T, L, E], without the last tokens of the trace. The first is the context: fading counts of
    choices, as differences from their mean. The second is the error of the estimate's first part, in units of its
    standard deviation."""
    tokens = max(0, len(history.uses) - _UNSEEN)
    context, missing = np.zeros((2, tokens, *mean.shape), dtype=np.float32)
    now = np.zeros_like(mean)
    for token, found in enumerate(_features(history, rate, progress)):
        if token < tokens:
            now = DECAY * now + (1.0 - DECAY) * (history.uses[token] - mean)
            estimate = chance(found, weights)
            context[token] = now
            missing[token] = (history.target[token] - estimate) / spread(estimate)
    return context, missing


def _by_number(second: _Second, shape: LayersShape, rate: float, weights: np.ndarray) -> NextUse:
    """Return the parameters with arrays indexed by the layer's number in the model. Layers without experts have
    zeros."""
    spread_out = []
    for part in second:
        rows = np.zeros((shape.layers[-1] + 1, *part.shape[1:]), dtype=np.float32)
        rows[list(shape.layers)] = part
        spread_out.append(rows)
    return NextUse(rate, weights, *spread_out)
