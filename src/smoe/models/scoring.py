"""Finds the rule by which a router computes scores and weights from logits, and verifies it on the router itself.

transformers' routers return logits, weights and indices, but not the rule, and a substitute expert needs the weight
that the rule would give it. The rules differ in four points:

    score    softmax over all experts, or sigmoid of each
    choice   the highest scores, or scores plus a bias used only for the choice; of all experts, or of the best groups
    weights  the scores of the chosen experts, or these divided by their sum (a softmax over the chosen logits)
    scale    a constant factor

`find_rule` runs a layer's router on random input and returns the first combination that chooses the same experts with
the same weights. If there is none, substitution is refused for the family; exact computation is not affected.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import nn

from smoe.errors import UnsupportedModelError

PROOF_TOKENS = 64
"""The number of random rows for testing a router."""
TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 3e-2}

_WAY_OUT = (
    "so its scores cannot be read; without `alpha`, and with an eviction other than score and a prefetch other than "
    "stacked-gates, the model works"
)

Score = Literal["softmax", "sigmoid"]
Weight = Literal["score", "share"]


@dataclass(frozen=True)
class Groups:
    """A division of the experts into `count` groups of equal size. Only experts of the `retained` best groups can be
    chosen."""

    count: int
    retained: int
    best: int
    """A group is ranked by the sum of its best scores; this is the number of scores in the sum."""


@dataclass(frozen=True)
class ScoringRule:
    """The rule by which one layer's router computes chosen experts and their weights from logits [T, E]."""

    score: Score
    weight: Weight
    scale: float
    bias: torch.Tensor | None = None
    """A bias [E] that is added to the scores for the choice only."""
    groups: Groups | None = None

    def scores(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the scores [T, E] in float32, from which weights are computed."""
        logits = logits.float()
        return logits.softmax(dim=-1) if self.score == "softmax" else logits.sigmoid()

    def choice(self, scores: torch.Tensor) -> torch.Tensor:
        """Return the values [T, E] by which the router ranks experts: `scores` plus the bias; minus infinity for
        experts of excluded groups."""
        if self.bias is not None:
            scores = scores + self.bias
        if self.groups is None:
            return scores
        grouped = scores.unflatten(-1, (self.groups.count, -1))
        worth = grouped.topk(self.groups.best, dim=-1).values.sum(dim=-1)
        retained = torch.zeros_like(worth, dtype=torch.bool).scatter_(
            -1, worth.topk(self.groups.retained, dim=-1).indices, True
        )
        masked: torch.Tensor = grouped.masked_fill(~retained.unsqueeze(-1), float("-inf"))
        return masked.flatten(-2)

    def weights(self, scores: torch.Tensor, index: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the weights [T, K] of the experts `index` [T, K]; the index E (no expert) has weight 0."""
        experts = scores.shape[-1]
        chosen = scores.gather(-1, index.clamp(max=experts - 1)).masked_fill(index == experts, 0.0)
        if self.weight == "share":
            chosen = chosen / chosen.sum(dim=-1, keepdim=True).clamp(min=1e-20)
        return (chosen * self.scale).to(dtype)

    @property
    def ranks_by_scores(self) -> bool:
        """Whether the router ranks experts by the scores that also determine their weights."""
        return self.bias is None and self.groups is None

    def weights_of(self, chosen: Sequence[float]) -> list[float]:
        """Return the routing weights of one token's experts, computed from their scores without using tensors."""
        whole = max(sum(chosen), 1e-20) if self.weight == "share" else 1.0
        return [score / whole * self.scale for score in chosen]

    def as_json(self) -> dict[str, Any]:
        """Return the scoring rule as JSON values, without loss of precision."""
        return {
            "score": self.score,
            "weight": self.weight,
            "scale": self.scale,
            "bias": None if self.bias is None else self.bias.tolist(),
            "groups": None if self.groups is None else asdict(self.groups),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> ScoringRule:
        """Return the scoring rule that `as_json` has converted to JSON values."""
        bias, groups = value["bias"], value["groups"]
        return cls(
            score=value["score"],
            weight=value["weight"],
            scale=value["scale"],
            bias=None if bias is None else torch.tensor(bias),
            groups=None if groups is None else Groups(**groups),
        )


def find_rule(router: nn.Module, block: nn.Module, hidden: int, experts: int, top_k: int, layer: int) -> ScoringRule:
    """Return the scoring rule of one router. Raise `UnsupportedModelError` if no known rule matches.

    `block`: the module around the router, because some families store the bias there and pass it to the router.
    """
    parameter = next(router.parameters())
    generator = torch.Generator().manual_seed(layer)
    x = torch.randn(PROOF_TOKENS, hidden, generator=generator).to(parameter.dtype).to(parameter.device)
    biases = list(_biases(router, block, experts))
    with torch.no_grad():
        logits, weights, index = _ask(router, x, biases)
        for rule in _candidates(router, block, biases, experts):
            scale = _fits(rule, logits, weights, index, top_k)
            if scale is not None:
                return ScoringRule(rule.score, rule.weight, scale, rule.bias, rule.groups)
    raise UnsupportedModelError(
        f"the router of layer {layer} ({type(router).__name__}) follows no rule that smoe knows, so the "
        "weights of substitutes are unknown; without `alpha`, and with an eviction other than score "
        "and a prefetch other than stacked-gates, the model works"
    )


def check_weighs_outputs(experts: nn.Module) -> None:
    """Raise `UnsupportedModelError` if the router's weights scale the experts' inputs instead of their outputs."""
    if getattr(experts, "has_weighted_inputs", False):
        raise UnsupportedModelError(
            f"the router's weights of this model ({type(experts).__name__}) scale the inputs of experts, not their "
            "outputs, so a substitute cannot be weighted; without `alpha`, `max_perplexity_increase` and "
            "`tpot_seconds` the model works"
        )


def in_order(output: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a router's output as (logits, weights, chosen experts). granitemoe in transformers 5.17 returns the
    reverse order.

    Raise `UnsupportedModelError` if there are not three values.
    """
    if len(output) != 3:
        raise UnsupportedModelError(
            f"a router of this model gives {len(output)} values instead of logits, weights and index, {_WAY_OUT}"
        )
    first, weights, last = output
    return (first, weights, last) if first.is_floating_point() else (last, weights, first)


def answer_of(
    router: nn.Module, block: nn.Module, x: torch.Tensor, experts: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (logits, weights, indices of the chosen experts) of a router for x [T, H]. `block`: the module around the
    router, which may contain the router's bias."""
    return _ask(router, x, list(_biases(router, block, experts)))


def _ask(
    router: nn.Module, x: torch.Tensor, biases: list[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    bias = biases[0] if biases else None
    # minimax_m2 and lfm2_moe: the block passes its bias; afmoe also takes rows as [B, S, H]
    for given in ((x,), (x, bias), (x.unsqueeze(0),), (x.unsqueeze(0), bias)):
        try:
            output = router(*given)
        except Exception:  # of any type: the arguments are not the expected ones
            continue
        return in_order(output)
    raise UnsupportedModelError(
        f"a router of this model ({type(router).__name__}) asks for more than hidden states and a bias, {_WAY_OUT}"
    )


def _biases(router: nn.Module, block: nn.Module, experts: int) -> Iterator[torch.Tensor]:
    """Yield all tensors with one number for each expert in the router or the block, without biases of linear layers."""
    seen: set[int] = set()
    for module in (router, block):
        for name, tensor in itertools.chain(module.named_parameters(), module.named_buffers()):
            is_linear = name.endswith(".bias") or (name == "bias" and module is router and hasattr(router, "weight"))
            if tensor.numel() == experts and tensor.data_ptr() not in seen and not is_linear:
                seen.add(tensor.data_ptr())
                yield tensor.detach().float().reshape(experts)


def _candidates(router: nn.Module, block: nn.Module, biases: list[torch.Tensor], experts: int) -> Iterator[ScoringRule]:
    for score, weight, bias in itertools.product(("softmax", "sigmoid"), ("score", "share"), [None, *biases]):
        for groups in [None, *_groups(router, block, experts)]:
            yield ScoringRule(score, weight, 1.0, bias, groups)  # type: ignore[arg-type]


def _groups(router: nn.Module, block: nn.Module, experts: int) -> Iterator[Groups]:
    """Yield the divisions of experts into groups that attributes of the router or its block describe. DeepSeek-V2 ranks
    a group by its best expert, V3 by the sum of its best two; both divisions are yielded."""
    for module in (router, block):
        count, retained = getattr(module, "num_group", None), getattr(module, "topk_group", None)
        if isinstance(count, int) and isinstance(retained, int) and 1 < count <= experts and retained < count:
            yield from (Groups(count, retained, best) for best in (1, 2))


def _fits(
    rule: ScoringRule, logits: torch.Tensor, weights: torch.Tensor, index: torch.Tensor, top_k: int
) -> float | None:
    """Return the scale of the rule if it chooses the same experts as the router, with the same weights up to this
    scale; otherwise None."""
    scores = rule.scores(logits)
    choice = rule.choice(scores)
    ours = choice.topk(top_k, dim=-1)
    theirs = choice.gather(-1, index)
    # experts with equal scores may be swapped
    if not torch.equal(ours.values.sort(dim=-1).values, theirs.sort(dim=-1).values):
        return None
    mine = rule.weights(scores, index, torch.float32)
    scale = (weights.float().sum() / mine.sum()).item()
    tolerance = TOLERANCE[weights.dtype]
    return scale if torch.allclose(mine * scale, weights.float(), rtol=tolerance, atol=tolerance * 1e-2) else None
