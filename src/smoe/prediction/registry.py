"""Predictors by name. Adding one is one file, one line here, and its name in `policy/registry.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

from transformers import PreTrainedModel

from smoe.models.scoring import ScoringRule
from smoe.models.spec import ModelSpec
from smoe.policy.prediction import Predictor
from smoe.prediction.look_ahead import LookAhead
from smoe.prediction.next_gate import NextGate


@dataclass(frozen=True)
class Subject:
    """What predictors are made from: the model whose experts they guess."""

    model: PreTrainedModel
    spec: ModelSpec
    rules: Mapping[int, ScoringRule]
    """How routers score, by layer; empty where nobody needs scores."""
    what: str
    """Which of the predicted experts are worth a load (`policy.registry.PREFETCH_WHAT`)."""

    @cached_property
    def next_gate(self) -> NextGate:
        """One for all that ask it: it hears every router once."""
        return NextGate(self.model, self.spec.sites, self.spec.anatomy.gates, self.rules, self.what)


def _look_ahead(subject: Subject) -> Predictor:
    return LookAhead(subject.model, subject.spec.sites, subject.spec.anatomy.routers, subject.next_gate)


PREDICTORS: dict[str, Callable[[Subject], Predictor | None]] = {
    "none": lambda subject: None,
    "next-gate": lambda subject: subject.next_gate,
    "look-ahead": _look_ahead,
}
