"""The draft model: a second copy of the model, in fewer bits, that decodes concurrently. Its routers' choices predict
the model's experts.

x1, x2, x3 are the tokens of the model, s1, s2, s3 those of the draft model, which is smaller and therefore faster:

    model        x1 -> layer | layer | ... -> x2 -> layer | layer | ... -> x3
    draft model  s1 -> layer | layer | ... -> s2 -> layer | layer | ... -> s3
                 ^ aligned: s1 := x1, and the keys and values of earlier positions := the model's

This is OD-MoE's scaled emulative prediction. Both models read the same text, so they choose nearly the same experts.
Without correction the draft model would write another text sooner or later, so it is aligned at intervals (section 3.2
of the paper).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from smoe.errors import UnsupportedModelError
from smoe.models.kv_cache import RowCache
from smoe.models.scoring import ScoringRule
from smoe.policy.draft_predictions import Expected
from smoe.runtime.engine import Engine
from smoe.runtime.observer import StepObserver
from smoe.runtime.seam import observed_routers
from smoe.runtime.step import Step


class Alignment(NamedTuple):
    """The intervals, in tokens, at which a draft model is aligned with the model; 0: never. Both intervals begin with
    the first token after the prompt.

    The paper does not say where an interval begins, nor whether a draft model that is never aligned reads the prompt
    itself. In smoe the draft model reads the prompt, and its first token comes from its own output.
    """

    token: int
    """T of section 3.2: the interval at which the draft model's input token becomes the model's token."""
    kv: int
    """KV of section 3.2: the interval at which the draft model's new keys and values become the model's."""

    def __str__(self) -> str:
        return f"T{self.token} KV{self.kv}"


class Greedy:
    """A model that reads one text and continues it with its most likely tokens."""

    cache: RowCache

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.engine: Engine = model.offload  # type: ignore[assignment]
        self.next_token = -1
        """The most likely token after everything that was read."""

    def read(self, prompt: Sequence[int]) -> None:
        """Start a new text with `prompt`, in chunks of the size for which the workspace was planned."""
        self.cache = self.engine.new_cache()
        piece = self.engine.config.prefill_tokens
        for begin in range(0, len(prompt), piece):
            self.take(prompt[begin : begin + piece])

    def take(self, ids: Sequence[int]) -> None:
        """Continue the text with the tokens `ids`, so that `next_token` is the most likely token after them."""
        given = torch.tensor([list(ids)], device=self.model.device)
        output = self.model(input_ids=given, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        self.next_token = int(output.logits[0, -1].argmax())


class Draft(StepObserver):
    """A draft model: it decodes one token at a time and predicts the model's experts for every layer. `as_draft` makes
    one."""

    def __init__(self, model: PreTrainedModel, rules: Mapping[int, ScoringRule], spares: int = 1) -> None:
        """`rules`: the scoring rule of each layer's router. `spares`: the number of experts to predict in addition to
        those that the draft model's router chooses."""
        self.text = Greedy(model)
        self._rules = rules
        self._spares = spares
        self._aligned = 0
        """The number of leading positions whose keys and values are the model's, or were due to be aligned."""
        self._decoded = 0
        self._source: RowCache | None = None
        """The model's cache that `follow` aligns with."""
        self._add: Callable[[Expected], None] | None = None
        """Receives the predictions for the current token; None in a prompt."""

    def read(self, prompt: Sequence[int]) -> None:
        """Start a new text with the tokens `prompt`, which the model reads too."""
        self._add, self._aligned, self._decoded = None, 0, 0
        self.text.read(prompt)

    def step(self, alignment: Alignment, token: int, cache: RowCache) -> list[Expected]:
        """Decode one token with the draft model, and return the predictions for every layer. Before that, align the
        draft model with the model if an alignment is due.

        `token`: the token that the model decodes at this position. `cache`: the model's KV cache, which contains at
        least all earlier positions. Raises `EngineStateError` if the alignment would have to change the state of
        recurrent layers.
        """
        if _is_due(alignment.kv, self._decoded):
            length = self.text.cache.length
            self.text.cache.take_over(cache, self._aligned, length)
            self._aligned = length
        given = token if _is_due(alignment.token, self._decoded) else self.text.next_token
        predicted: list[Expected] = []
        self._add = predicted.append
        self.text.take([given])
        self._decoded += 1
        return predicted

    def follow(self, token: int, position: int, cache: RowCache, say: Callable[[Expected], None]) -> None:
        """Decode the token at `position` of the text in `cache`, the model's KV cache, with the draft model. `say`
        receives the prediction for each layer.

        The keys and values of earlier positions are copied from the model's cache: those that are new since the last
        call, or all of them for a new text. Raises `EngineStateError` if they cannot be replaced.
        """
        if self._source is not cache:
            self._source, self._aligned = cache, 0
            self.text.cache = self.text.engine.new_cache()
        mine, known = self.text.cache, min(position, cache.length)
        mine.rewind(min(mine.length, position))
        self._aligned = min(self._aligned, mine.length)
        mine.take_over(cache, self._aligned, known)
        self._aligned = known
        self._add = say
        self.text.take([token])

    def unlearn(self, unchanged: float) -> None:
        """Record that the model's KV cache has been written again from position `unchanged` on, so that these positions
        must be aligned again."""
        self._aligned = int(min(self._aligned, unchanged))

    def routed(self, step: Step) -> None:
        if self._add is not None:
            self._add(self._expected(step))

    def _expected(self, step: Step) -> Expected:
        if step.logits is None:
            raise UnsupportedModelError(
                f"the router of layer {step.layer} cannot be read, so this family cannot have a draft model"
            )
        rule, own = self._rules[step.layer], step.top_k_index[-1]  # [K]
        ranked = rule.choice(rule.scores(step.logits[-1:]))[0]  # [E]
        own = own[ranked[own].argsort(descending=True, stable=True)]
        others = ranked.index_fill(0, own, float("-inf"))
        spares = others.topk(min(self._spares, len(ranked) - len(own))).indices
        named = torch.cat([own, spares])
        return Expected(step.layer, tuple(named.tolist()), tuple(ranked[named].tolist()))


@contextmanager
def as_draft(model: PreTrainedModel, rules: Mapping[int, ScoringRule], spares: int = 1) -> Iterator[Draft]:
    """Make `model`, a result of `smoe.from_pretrained`, a draft model during the `with` block. Yield the draft
    model."""
    draft = Draft(model, rules, spares)
    engine = draft.text.engine
    with observed_routers(model, engine), engine.observed_by(draft):
        yield draft


def _is_due(period: int, decoded: int) -> bool:
    return period > 0 and decoded % period == 0
