"""Measures on text the quality cost of each resolution of a miss. The result is a table from which plans choose
resolutions.

    row 0     a piece of the text (a window)            the exact distributions
    row 1     the same, experts dropped in layer 0      one route of every token, drawn at random, not its first
    row 2     the same, substitutes in layer 0
    row 3     the same, low copies in layer 0
    row 4     the same, experts dropped in layer 1 ...

Each row after the first is a *trial*. One pass of the model computes all rows, so a model on disk is read once for as
many trials as fit in a step. Every pass uses another window of the text. The quality cost of a row's changed routes is
the divergence of its distributions from those of row 0, summed over positions.

Within a layer, the cost is proportional to the square of the change of the experts' output, with one factor for all
resolutions (docs/log/substitution.md). The divergences of all trials give this factor for each layer. The changes,
which have little noise, give the cost of each resolution and weight (`policy/prices.py`).

Low-precision copies do not count for the factor. They change so little that rounding to 16 bits, which any change
causes in later layers, is larger than their own divergence. The cost of this rounding alone is measured too, and
subtracted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from smoe.errors import ConfigError, UnsupportedModelError
from smoe.policy.prices import LayerPrices, PriceTable, Resolution
from smoe.runtime.engine import Engine
from smoe.runtime.rerouting import Scored
from smoe.runtime.stand_in import LayerExperts, answered_by

WINDOW_TOKENS = 128
"""The number of tokens in a window, a piece of the text that one pass processes. A change affects mainly the next few
dozen tokens."""
TRIALS = 8
"""The number of trials for each layer and resolution. Each uses another window of the text."""
_SUBSTITUTES = 8
"""The number of experts, ranked next after the chosen ones, among which a substitute is drawn at random. Resident
experts have similar ranks."""
_LOGITS = 2**23
"""The largest number of logits that are computed at a time, which limits memory."""
_TINY = 1e-30
_TOLERANCE = 0.02
"""The allowed relative difference between the model's logits and those computed from the output head's input."""


class RouteTrial(NamedTuple):
    """One row of a pass in which routes are changed: in one layer, one route of every token except the first gets this
    resolution."""

    layer: int
    answer: Resolution | None
    """The resolution. None: only the last bits of the layer's output change, to measure the effect of rounding in later
    layers."""


@dataclass
class Shown:
    """The measurements of all trials of one layer and resolution. Each list has one element for each trial."""

    nats: list[float] = field(default_factory=list)
    """The divergence from the exact distributions in nats, summed over the window."""
    units: list[float] = field(default_factory=list)
    """The quality cost by `LayerPrices.price` with a coefficient of 1, summed over the window."""
    changes: list[float] = field(default_factory=list)
    """The square of the change of the experts' output, summed over the window."""


@dataclass(frozen=True)
class AnswerPrices:
    """The measured quality costs of a model's resolutions of misses, with their errors."""

    table: PriceTable
    errors: PriceTable
    """The standard errors of the numbers in `table`."""
    rounding: dict[int, float]
    """{layer: nats per token} that a change in the last bits of the layer's output causes. They have been subtracted
    from the costs."""
    tokens: int
    """The number of tokens of the text."""
    has_low: bool
    """Whether low-precision copies were measured. If not, the table has the cost of dropping in their place."""
    shown: Mapping[RouteTrial, Shown]
    """The results of all trials, by layer and resolution."""


def measure(
    model: PreTrainedModel, ids: Sequence[int], tick: Callable[[int], None], trials: int = TRIALS, seed: int = 0
) -> AnswerPrices:
    """Return the quality costs of a model's resolutions, measured on the text `ids`. `tick` is called after each pass.

    Raise `ConfigError` if a step has no room for two rows, or if the text is too short. Raise `UnsupportedModelError`
    if a router's rule is unknown, or if the model's logits are not its output head's result times a constant.
    """
    engine: Engine = model.offload  # type: ignore[assignment]
    if not engine.rules:
        raise ConfigError(
            "load the model with an alpha above 0, or with `eviction=score`: substitutes need the routers' scores",
            setting="eviction",
            given=engine.config.eviction,
            allowed="score, or any with an alpha above 0",
        )
    rows, width = shape_of(engine, ids)
    plan, shown = _schedule(engine, trials), dict[RouteTrial, Shown]()
    generator = torch.Generator().manual_seed(seed)
    passes = range(0, len(plan), rows - 1)
    for number, begin in enumerate(passes):
        answering = _Answering(plan[begin : begin + rows - 1], generator)
        with answered_by(engine, answering):
            nats = _divergences(model, _window(ids, number, width), 1 + len(answering.trials))
        for n, trial in enumerate(answering.trials):
            entry_shown = shown.setdefault(trial, Shown())
            entry_shown.nats.append(nats[n])
            entry_shown.units.append(answering.units[n])
            entry_shown.changes.append(answering.changes[n])
        tick(1)
    return _priced(engine, shown, width, min(len(ids), len(passes) * width))


def shape_of(engine: Engine, ids: Sequence[int]) -> tuple[int, int]:
    """Return (the number of rows of a pass, including the exact row; the number of tokens of a row). Raise
    `ConfigError` if there is no room for two rows, or if the text is too short."""
    config = engine.config
    room = min(config.prefill_tokens, engine.context_tokens * config.max_sequences)
    width = min(WINDOW_TOKENS, engine.context_tokens, room // 2)
    if len(ids) < width or width < 2:
        raise ConfigError.too_few_tokens("text", len(ids), max(2, width), "for one pass")
    return room // width, width


def passes_of(engine: Engine, ids: Sequence[int], trials: int = TRIALS) -> int:
    """Return the number of passes that `measure` runs."""
    return -(-len(_schedule(engine, trials)) // (shape_of(engine, ids)[0] - 1))


def _schedule(engine: Engine, trials: int) -> list[RouteTrial]:
    """Return the trials of all layers and resolutions, in the order in which they are run."""
    answers = [Resolution.SKIP, Resolution.SUBSTITUTE, None, *([Resolution.LOW] if engine.config.has_low else [])]
    return [RouteTrial(layer, answer) for layer in sorted(engine.store.layers) for answer in answers] * trials


def _window(ids: Sequence[int], number: int, width: int) -> Sequence[int]:
    """Return the window of the text for pass `number`. After the end of the text, windows start again at its
    beginning."""
    begin = number % (len(ids) // width) * width
    return ids[begin : begin + width]


class _Answering:
    """Computes the experts of one pass in place of the engine. In each trial's row it changes routes, and records how
    much they change the layer's output."""

    def __init__(self, trials: Sequence[RouteTrial], generator: torch.Generator) -> None:
        self.trials = trials
        self._generator = generator
        self.units = [0.0] * len(trials)
        self.changes = [0.0] * len(trials)

    def __call__(self, experts: LayerExperts) -> torch.Tensor:
        step = experts.step
        mine = [n for n, trial in enumerate(self.trials, start=1) if trial.layer == step.layer]
        if not mine:
            return experts.routed()
        width = len(step.top_k_index) // step.sequences
        index, weights = step.top_k_index.clone(), step.top_k_weights.clone()
        is_low = torch.zeros_like(index, dtype=torch.bool)
        for n in mine:
            answer, row = self.trials[n - 1].answer, slice(n * width, (n + 1) * width)
            if answer is not None:
                assert step.scored is not None
                routes = _Routes(index[row], weights[row], is_low[row])
                scored = step.scored._replace(scores=step.scored.scores[row])
                self.units[n - 1] = routes.change(answer, scored, self._generator)
        output = _output(experts, index, weights, is_low)
        exact = output[:width].float()
        for n in mine:
            outcome = output[n * width : (n + 1) * width]
            if self.trials[n - 1].answer is None:
                outcome.copy_(_in_last_bits(outcome, self._generator))
            self.changes[n - 1] = float((outcome.float() - exact).square().sum())
        return output


def _output(experts: LayerExperts, index: torch.Tensor, weights: torch.Tensor, is_low: torch.Tensor) -> torch.Tensor:
    """Return the experts' output. `is_low`: [T, K] whether a route is computed with the low-precision copy of its
    expert."""
    if not bool(is_low.any()):
        return experts.own(index, weights)
    own, low = (index.masked_fill(others, experts.no_expert) for others in (is_low, ~is_low))
    return experts.own(own, weights) + experts.low(low, weights)


def _in_last_bits(output: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return `output` with each number replaced, with a probability of one half, by the next number of larger
    magnitude."""
    chosen = torch.rand(output.shape, generator=generator).to(output.device) < 0.5
    return torch.where(chosen, output * (1 + torch.finfo(output.dtype).eps), output)


class _Routes(NamedTuple):
    """The routes [T, K] of one row of a pass. The arrays are views of the pass's tensors, so changing them changes the
    pass."""

    top_k_index: torch.Tensor
    top_k_weights: torch.Tensor
    is_low: torch.Tensor

    def change(self, answer: Resolution, scored: Scored, generator: torch.Generator) -> float:
        """Change one route of every token except the first to this resolution. Return the quality cost of these routes
        by `LayerPrices.price` with a coefficient of 1.

        A token's route of highest weight stays unchanged unless it is the only one. Almost no plan drops it, and in the
        first layers it costs more than the square of its weight would give. The first token stays unchanged because
        many models rely on it.
        """
        index, weights, is_low = self
        tokens, top_k = index.shape
        token = torch.arange(1, tokens, device=index.device)
        place = torch.randint(min(1, top_k - 1), top_k, (tokens - 1,), generator=generator).to(index.device)
        choice = weights.float().argsort(dim=-1, descending=True, stable=True)[token, place]
        share = weights[token, choice].float() / weights[token].float().sum(-1)
        gap = torch.ones_like(share)
        if answer is Resolution.LOW:
            is_low[token, choice] = True
        elif answer is Resolution.SKIP:
            index[token, choice] = scored.scores.shape[-1]
        else:
            gap = self._substitute(token, choice, scored, generator)
        unit = LayerPrices(1.0, 1.0, 1.0)
        pairs = zip(share.tolist(), gap.tolist(), strict=True)
        return sum(unit.price(answer, weight, short) for weight, short in pairs)

    def _substitute(
        self, token: torch.Tensor, choice: torch.Tensor, scored: Scored, generator: torch.Generator
    ) -> torch.Tensor:
        """Replace the given choice of each token by a substitute. Return how much lower the substitutes' scores are, as
        fractions (`misses.Route.gap`)."""
        index, weights, _ = self
        scores = scored.rule.choice(scored.scores)[token]
        most = min(_SUBSTITUTES, scores.shape[-1] - index.shape[-1])
        of_chosen = scores.gather(-1, index[token, choice].unsqueeze(-1))[:, 0]
        behind = scores.scatter(-1, index[token], float("-inf")).topk(max(1, most), -1)
        drawn = torch.randint(0, max(1, most), (len(token), 1), generator=generator).to(index.device)
        score, expert = (found.gather(-1, drawn)[:, 0] for found in behind)
        is_there = score > float("-inf")  # otherwise all have been chosen, or the other groups are masked
        index[token[is_there], choice[is_there]] = expert[is_there]
        changed = token[is_there]
        weights[changed] = scored.rule.weights(scored.scores[changed], index[changed], weights.dtype)
        gap = torch.where(of_chosen > 0, (of_chosen - score) / of_chosen, torch.ones_like(score)).clamp(0, 1)
        return torch.where(is_there, gap, torch.ones_like(gap))


def _divergences(model: PreTrainedModel, window: Sequence[int], rows: int) -> list[float]:
    """Return, for every row but the first, the divergence in nats from the first row's distributions, summed over the
    window.

    The logits of all positions would take much more memory than the rest of a pass. They are therefore computed from
    the output head's input, a few positions at a time.
    """
    engine: Engine = model.offload  # type: ignore[assignment]
    head = model.get_output_embeddings()
    given: list[torch.Tensor] = []

    def keep_all(module: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        given.append(args[0])
        return (args[0][:, -1:],)

    ids = torch.tensor([list(window)] * rows, device=model.device)
    with engine.passes.turn(), torch.no_grad():
        hook = head.register_forward_pre_hook(keep_all)
        try:
            last = model(input_ids=ids, use_cache=False).logits[:, -1].float()
        finally:
            hook.remove()
        (hidden,) = given
        scale = _scale_of(last, head(hidden[:, -1]).float())
        positions = max(1, _LOGITS // (rows * last.shape[-1]))
        total = torch.zeros(rows - 1, dtype=torch.float64)
        for piece in hidden.split(positions, 1):
            log_p = (head(piece).float() * scale).log_softmax(-1)
            exact = log_p[:1]
            short = exact - log_p[1:]
            # the sum of p expm1(-short) is 0; adding it makes rounding of log_softmax count by its square only
            total += (short.neg().expm1_().add_(short).mul_(exact.exp())).sum((1, 2), dtype=torch.float64).cpu()
    return total.tolist()


def _scale_of(logits: torch.Tensor, of_head: torch.Tensor) -> float:
    """Return the factor by which a model multiplies its output head's result. Raise `UnsupportedModelError` if the
    logits are not a multiple of that result."""
    scale = float((logits * of_head).sum() / of_head.square().sum().clamp_min(1e-30))
    error = float((logits - scale * of_head).norm() / logits.norm().clamp_min(1e-30))
    if error > _TOLERANCE:
        raise UnsupportedModelError(
            "this model's logits are not the result of its output head times a constant, so the quality costs of "
            "misses cannot be measured; alpha can be tuned instead: smoe tune --max-perplexity-increase"
        )
    return scale


def _priced(engine: Engine, shown: dict[RouteTrial, Shown], width: int, tokens: int) -> AnswerPrices:
    """Return the quality costs. For every layer, the cost for each unit of squared change of its output is multiplied
    by the change that each resolution causes."""
    layers, errors, rounding = dict[int, LayerPrices](), dict[int, LayerPrices](), dict[int, float]()
    has_low = engine.config.has_low
    for layer in sorted(engine.store.layers):
        bits = shown[RouteTrial(layer, None)].nats
        floor = sum(bits) / len(bits)
        rounding[layer] = floor / width
        skip, substitute = shown[RouteTrial(layer, Resolution.SKIP)], shown[RouteTrial(layer, Resolution.SUBSTITUTE)]
        low = shown[RouteTrial(layer, Resolution.LOW)] if has_low else skip
        factor, error = _factor([skip, substitute], floor)
        by_answer = [_change_per_unit(each) for each in (low, substitute, skip)]
        layers[layer] = LayerPrices(*(factor * change for change in by_answer))
        errors[layer] = LayerPrices(*(error * change for change in by_answer))
    return AnswerPrices(PriceTable(layers), PriceTable(errors), rounding, tokens, has_low, shown)


def _change_per_unit(shown: Shown) -> float:
    return sum(shown.changes) / max(sum(shown.units), _TINY)


def _factor(shown: Sequence[Shown], floor: float) -> tuple[float, float]:
    """Return (nats above `floor` for each unit of squared change of a layer's output, at least 0; the standard error of
    this quotient)."""
    trials = [pair for each in shown for pair in zip(each.nats, each.changes, strict=True)]
    changes = max(sum(change for _, change in trials), _TINY)
    factor = sum(nats - floor for nats, _ in trials) / changes
    rest = sum((nats - floor - factor * change) ** 2 for nats, change in trials)
    return max(0.0, factor), (rest * len(trials) / max(1, len(trials) - 1)) ** 0.5 / changes
