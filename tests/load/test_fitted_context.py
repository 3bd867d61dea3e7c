"""How many positions a budget gets where nobody has said a number: the usual ones where they fit, else what does.

Would catch a refusal of a budget that can hold the model, a context asked for that is changed, a plan that says another
context than a run has, a smaller context than the least that is any use.
"""

from __future__ import annotations

import pytest
import torch

from smoe.config import EngineConfig
from smoe.errors import BudgetError
from smoe.load import ledger
from smoe.load.ledger import LEAST_CONTEXT_TOKENS, demand_of, fit_context, make_ledger, open_if_here
from smoe.load.pretrained import from_pretrained
from smoe.models.checkpoint import checkpoint_at
from smoe.models.files import DEMO_FOLDER
from smoe.models.read_spec import read_spec
from smoe.models.spec import ModelSpec
from smoe.policy.budget import Demand, minimum_bytes
from smoe.report.forecast import survey_of

CPU = torch.device("cpu")
USUAL = 1024
"""The embedded model's limit."""


def fitted(config: EngineConfig) -> tuple[ModelSpec, EngineConfig, dict[str, str]]:
    return fit_context(read_spec("demo", config), config, lambda each: demand(each, config), {})


def demand(spec: ModelSpec, config: EngineConfig) -> Demand:
    store = open_if_here(checkpoint_at(DEMO_FOLDER), spec, CPU)
    assert store is not None
    return demand_of(spec, config, CPU, store)


def least(context: int) -> int:
    """The smallest budget with so many positions."""
    config = EngineConfig(context_tokens=context)
    return minimum_bytes(demand(read_spec("demo", config), config))


@pytest.mark.parametrize("context", [USUAL, LEAST_CONTEXT_TOKENS, 256, 200])
def test_it_is_halved_until_the_budget_holds_the_model(context: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "LEAST_CONTEXT_TOKENS", min(context, LEAST_CONTEXT_TOKENS))
    config = EngineConfig(memory_bytes=least(context))
    spec, chosen, why = fitted(config)
    assert spec.context_tokens == context
    if context == USUAL:
        assert (chosen, why) == (config, {})
    else:
        assert chosen.context_tokens == context and str(USUAL) in why["context_tokens"]
    make_ledger(spec, chosen, CPU, open_if_here(checkpoint_at(DEMO_FOLDER), spec, CPU))


def test_the_least_is_refused_with_what_it_needs() -> None:
    config = EngineConfig(memory_bytes=least(LEAST_CONTEXT_TOKENS) - 1)
    spec, chosen, _ = fitted(config)
    assert spec.context_tokens == LEAST_CONTEXT_TOKENS
    with pytest.raises(BudgetError) as refused:
        make_ledger(spec, chosen, CPU, open_if_here(checkpoint_at(DEMO_FOLDER), spec, CPU))
    assert refused.value.allowed == f"at least {least(LEAST_CONTEXT_TOKENS)} bytes"


@pytest.mark.parametrize("config", [EngineConfig(memory_bytes=1, context_tokens=USUAL), EngineConfig()])
def test_what_was_asked_for_is_kept(config: EngineConfig) -> None:
    spec, chosen, why = fitted(config)
    assert (spec.context_tokens, chosen, why) == (USUAL, config, {})


def test_a_run_and_its_plan_have_the_same() -> None:
    budget = least(LEAST_CONTEXT_TOKENS)
    with from_pretrained("demo", memory=budget).offload as engine:
        assert engine.context_tokens == LEAST_CONTEXT_TOKENS and "context_tokens" in engine.reasons
    survey = survey_of("demo", EngineConfig(memory_bytes=budget), None)
    assert survey.spec.context_tokens == LEAST_CONTEXT_TOKENS
    assert any("context_tokens" in remark for remark in survey.remarks)
