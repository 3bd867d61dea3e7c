"""All statistics that `smoe trace plot` draws, for one trace or for several traces of one model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from smoe.errors import ConfigError
from smoe.prediction.activation_path import joined
from smoe.trace.curves import Curves, curves
from smoe.trace.file import Trace
from smoe.trace.paths import paths_in
from smoe.trace.ranks import AHEAD, Stretch, reuse_by_rank, shares_by_rank, stretches, width
from smoe.trace.record import TraceHeader
from smoe.trace.usage import (
    Affinities,
    BySequence,
    Entropy,
    NextToken,
    affinities,
    by_sequence,
    entropy,
    next_token,
    times_even,
)

if TYPE_CHECKING:
    from smoe.policy.eviction.learned import NextUse

Found = TypeVar("Found")
_ROUTINGS = 24_000
"""The default number of routings of a trace that are analysed. Miss-ratio curves then take a minute on a few cores."""
_TOKENS = 1000
"""The largest default number of tokens that are analysed."""


@dataclass(frozen=True)
class Ranks:
    """Statistics by rank. Each array has the shape [E], with rank 1 first."""

    share: np.ndarray
    """The mean fraction of a token's router scores that the rank has, over tokens and layers (SMoE, figure 4)."""
    low: np.ndarray
    """The 10th percentile, over tokens and layers, of the fraction of a token's router scores that the rank has."""
    high: np.ndarray
    """The 90th percentile, over tokens and layers, of the fraction of a token's router scores that the rank has."""
    reuse: np.ndarray
    """The probability that the expert of this rank is chosen within the next `ahead` tokens (SMoE, figure 6)."""
    ahead: int
    reuse_by_chance: float
    """The probability that an expert is chosen within the next `ahead` tokens if experts are chosen at random."""


@dataclass(frozen=True)
class TraceSurvey:
    """The statistics of one or several traces. If a statistic is None, `left_out` has the reason under the field's
    name."""

    header: TraceHeader
    """The header of the first trace."""
    files: tuple[str, ...]
    names: tuple[str, ...]
    """The names of the model in the traces. There are several if the user has used several names."""
    alpha: float
    """The largest substitution threshold of the recorded runs."""
    tokens: int
    recorded: int
    """The number of tokens in the traces. It is above `tokens` if only the first tokens were analysed."""
    sequences: int
    experts_bytes: int | None
    """The memory of all experts in bytes; None if no trace contains it."""
    times_even: np.ndarray
    """[L, E]: the fraction of its layer's choices that an expert has, in multiples of 1 / E; NaN beyond a layer's own
    experts."""
    entropy: Entropy
    ranks: Ranks | None
    next_token: NextToken | None
    by_sequence: BySequence | None
    affinity: Affinities | None
    curves: Curves | None
    left_out: dict[str, str]

    @property
    def size(self) -> str:
        """A phrase with the numbers of layers, experts and tokens, for a caption."""
        layers = self.header.layers
        widths, choices = sorted({layer.experts for layer in layers}), sorted({layer.top_k for layer in layers})
        of = f"{' or '.join(map(str, widths))} experts, {' or '.join(map(str, choices))} chosen"
        tokens = _counted(self.tokens, "token")
        if self.recorded > self.tokens:
            tokens = f"the first {tokens} of {self.recorded:,}"
        return f"{_counted(len(layers), 'layer')} of {of}; {tokens}, {_counted(self.sequences, 'sequence')}"

    def as_json(self) -> dict[str, Any]:
        """Return all numbers that are drawn, in types that JSON has."""
        layers = [{"layer": each.layer, "experts": each.experts, "top_k": each.top_k} for each in self.header.layers]
        found: dict[str, Any] = {
            "traces": list(self.files),
            "model": self.header.model,
            "alpha": self.alpha,
            "layers": layers,
            "tokens": self.tokens,
            "recorded": self.recorded,
            "sequences": self.sequences,
            "experts": self.header.experts,
            "experts_bytes": self.experts_bytes,
        }
        for name in ("times_even", "entropy", "ranks", "next_token", "by_sequence", "affinity", "curves", "left_out"):
            found[name] = _plain(getattr(self, name))
        return found


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def _plain(value: Any) -> Any:
    """Return `value` in JSON's types. Numbers have six digits; NaN and infinity become None."""
    if is_dataclass(value) and not isinstance(value, type):
        return {name: _plain(part) for name, part in asdict(value).items()}
    if isinstance(value, np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, dict):
        return {name: _plain(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if np.isfinite(value) else None
    return value


def survey(
    traces: Sequence[Trace],
    tokens: int | None = None,
    experts_bytes: int | None = None,
    next_use: NextUse | None = None,
    tick: Callable[[int, int], None] = lambda done, points: None,
) -> TraceSurvey:
    """Return the statistics of one or several traces. `tokens`: how many tokens of every trace are analysed, from the
    start, and how many steps for misses; None: 1000, or fewer if there are many layers.

    `experts_bytes`: the size of all experts; None: as the traces contain it. The other arguments are those of `curves`.
    Raise `ConfigError` if the traces are of different models or contain no token.
    """
    _check_one_model(traces)
    header, left_out = traces[0].header, dict[str, str]()
    tokens = tokens or min(_TOKENS, max(1, _ROUTINGS // len(header.layers)))
    parts = [paths_in(trace, tokens) for trace in traces]
    if not sum(len(part.chosen) for part in parts):
        raise ConfigError(
            f"{traces[0].path} has no tokens; record a trace with tokens", setting="trace", given=str(traces[0].path),
            allowed="at least one trace with tokens",
        )  # fmt: skip
    paths = joined([part for part in parts if len(part.chosen)])

    def tried(name: str, find: Callable[[], Found]) -> Found | None:
        try:
            return find()
        except ConfigError as error:
            left_out[name] = str(error)
            return None

    stretched: list[Stretch] | None = tried(
        "ranks", lambda: [part for trace in traces for part in stretches(trace, tokens)]
    )
    return TraceSurvey(
        header,
        tuple(str(trace.path) for trace in traces),
        tuple(dict.fromkeys(trace.header.model for trace in traces)),
        max(trace.header.alpha for trace in traces),
        len(paths.chosen),
        sum(map(_recorded, traces)),
        len(np.unique(paths.sequence)),
        experts_bytes or _experts_bytes(traces),
        times_even(paths),
        entropy(paths, stretched),
        None if stretched is None else tried("ranks", lambda: _ranks(traces, stretched)),
        tried("next_token", lambda: next_token(traces, tokens)),
        tried("by_sequence", lambda: by_sequence(paths)),
        tried("affinity", lambda: affinities(paths)),
        tried("curves", lambda: curves(traces, tokens, next_use, tick)),
        left_out,
    )


def _ranks(traces: Sequence[Trace], parts: Sequence[Stretch]) -> Ranks:
    experts, top_k = width(traces[0])
    shares = shares_by_rank(parts)
    low, high = np.percentile(shares, [10, 90], axis=0)
    by_chance = 1 - (1 - top_k / experts) ** AHEAD
    return Ranks(shares.mean(axis=0, dtype=np.float64), low, high, reuse_by_rank(parts), AHEAD, by_chance)


def _recorded(trace: Trace) -> int:
    """Return the number of tokens in a trace, without padding."""
    first = trace.header.layers[0]
    real = (trace.rows["layer"] == first.layer) & (trace.rows["top_k_index"][:, 0] < first.experts)
    return int(np.count_nonzero(real))


def _experts_bytes(traces: Sequence[Trace]) -> int | None:
    """Return the size of all experts in bytes. Return None if no trace contains it, or if two traces differ because the
    model was run in two precisions."""
    known = {trace.header.expert_bytes for trace in traces} - {None}
    if len(known) != 1:
        return None
    return sum(layer.experts * size for layer, size in zip(traces[0].header.layers, known.pop() or (), strict=True))


def _check_one_model(traces: Sequence[Trace]) -> None:
    first = traces[0].header
    for trace in traces[1:]:
        header = trace.header
        if (header.model_type, header.layers) != (first.model_type, first.layers):
            raise ConfigError(
                f"{trace.path} is of another model ({header.model}) than {traces[0].path} ({first.model}); plot each "
                "in a run of its own, into a folder of its own",
                setting="trace",
                given=str(trace.path),
                allowed="traces of one model",
            )
