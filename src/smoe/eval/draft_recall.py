"""Compares the predictions of draft models with recorded exact runs, by precision and alignment (OD-MoE, section
3.2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from smoe.errors import ConfigError
from smoe.eval.exact_run import CORRECTED, GATE, SPARES, ExactRun, RunListener, Tick, record
from smoe.eval.recall import Recall, Tally
from smoe.load.engine_parts import scoring_rules
from smoe.models.spec import LibrarySpec
from smoe.prediction.activation_path import NO_EXPERT
from smoe.runtime.draft_model import Alignment, Draft, Greedy, as_draft


@dataclass(frozen=True)
class DraftRecall:
    """How well one draft model with one alignment predicts experts."""

    precision: str
    alignment: Alignment
    recall: Recall
    own_token: float
    """The fraction of tokens that the draft model had predicted before it received them."""

    def as_json(self) -> dict[str, Any]:
        entry = {"precision": self.precision, "token_period": self.alignment.token, "kv_period": self.alignment.kv}
        return entry | {"own_token": round(self.own_token, 6)} | self.recall.as_json()


@dataclass(frozen=True)
class RecallComparison:
    """How well all draft models, and predictors without a draft model, predict the experts of the same runs."""

    drafts: tuple[DraftRecall, ...]
    predictors: Mapping[str, Recall]
    refused: Mapping[str, str]
    """The predictors that could not be used, with the reasons."""
    prompt_tokens: tuple[int, ...]
    """The number of tokens of each prompt."""
    tokens: tuple[int, ...]
    """The number of tokens decoded after each prompt."""

    @property
    def best_gate(self) -> tuple[str, Recall] | None:
        """The name and recall of the best predictor among those that apply the router of a later layer; None if there
        is no such predictor."""
        gates = {name: recall for name, recall in self.predictors.items() if name.startswith((GATE, CORRECTED))}
        return max(gates.items(), key=lambda named: named[1].overall) if gates else None

    def as_json(self) -> dict[str, Any]:
        return {
            "prompt_tokens": [*self.prompt_tokens],
            "tokens": [*self.tokens],
            "shadows": [draft.as_json() for draft in self.drafts],
            "predictors": [{"name": name} | recall.as_json() for name, recall in self.predictors.items()],
            "refused": dict(self.refused),
        }


def compare(
    model: PreTrainedModel,
    spec: LibrarySpec,
    drafts: Mapping[str, PreTrainedModel],
    prompts: Sequence[Sequence[int]],
    tokens: int,
    alignments: Sequence[Alignment],
    tick: Tick,
) -> RecallComparison:
    """Continue each of `prompts` with `model` by at most `tokens` tokens, and compare the predictions of the draft
    models `drafts`, given by precision, with this run.

    The keys and values of only one prompt are in memory at a time. `tick` is called for every token that any model
    decodes, and once with the number of tokens that an end token saves. Raise `ConfigError` if a KV period is
    impossible for the model or if nothing was decoded, and `UnsupportedModelError` if a router's rule is unknown.
    """
    rules = scoring_rules(model, spec)
    listener, text = RunListener(model, spec, rules), Greedy(model)
    top_k = [layer.top_k for layer in listener.layers]
    tallies = {(name, each): Tally(top_k, tokens, SPARES) for name in drafts for each in alignments}
    agreed = dict.fromkeys(tallies, 0)
    of_predictors = {name: Tally(top_k, tokens, SPARES) for name in listener.predictors}
    runs: list[tuple[int, int]] = []
    with ExitStack() as stack:
        ready = {name: stack.enter_context(as_draft(draft, rules, SPARES)) for name, draft in drafts.items()}
        for prompt in prompts:
            with text.engine.observed_by(listener):
                run = record(text, listener, prompt, tokens, tick)
            steps = len(run.tokens) if run is not None else 0
            tick((tokens - steps) * (1 + len(tallies)))
            if run is None:
                continue
            _check_positions(run, alignments)
            runs.append((len(prompt), steps))
            for name, tally in of_predictors.items():
                tally.add(run.chosen, run.named[name])
            for name, alignment in tallies:
                named, right = replay(ready[name], run, alignment, tick)
                tallies[name, alignment].add(run.chosen, named)
                agreed[name, alignment] += right
    if not runs:
        raise ConfigError(
            "the model ends every text right after its prompt, so there is nothing to predict; give another `text`, or "
            "other `prompt_tokens`",
            setting="text",
            allowed="texts that the model continues",
        )
    decoded = sum(steps for _, steps in runs)
    found = [
        DraftRecall(name, alignment, tally.finished(), agreed[name, alignment] / decoded)
        for (name, alignment), tally in tallies.items()
    ]
    predictors = {name: tally.finished() for name, tally in of_predictors.items()}
    lengths, counts = zip(*runs, strict=True)
    return RecallComparison(tuple(found), predictors, listener.refused, lengths, counts)


def replay(draft: Draft, run: ExactRun, alignment: Alignment, tick: Tick) -> tuple[np.ndarray, int]:
    """Let a draft model follow the recorded run `run`. Return (its predictions for every token [n, L, K + spares], the
    number of tokens that it predicted itself)."""
    steps, layers, top_k = run.chosen.shape
    named, agreed = np.full((steps, layers, top_k + SPARES), NO_EXPERT, dtype=np.int64), 0
    draft.read(run.prompt)
    for n, token in enumerate(run.tokens):
        agreed += draft.text.next_token == token
        for place, expected in enumerate(draft.step(alignment, token, run.cache)):
            named[n, place, : len(expected.experts)] = expected.experts
        tick(1)
    return named, agreed


def _check_positions(run: ExactRun, alignments: Sequence[Alignment]) -> None:
    if run.cache.can_rewind or not any(alignment.kv for alignment in alignments):
        return
    raise ConfigError(
        "this family has layers with a recurrent state, and such a state cannot be copied position by position; "
        "give `periods` whose KV is 0, such as T1KV0",
        setting="periods",
        given=",".join(map(str, alignments)),
        allowed="KV 0 for this model",
    )
