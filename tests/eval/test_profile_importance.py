"""The distribution of a text's importances, beside NumPy's own sums of what the routers said."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from smoe.errors import ConfigError
from smoe.eval.profile_importance import profile_reading, profile_recorded
from smoe.load.importance_profile import profile_of
from smoe.routing import Phase, Routing
from tests import oracle

Open = Callable[..., PreTrainedModel]
IDS = torch.randint(3, 128, (150,), generator=torch.Generator().manual_seed(0)).tolist()


def unimportances(weights: np.ndarray) -> np.ndarray:
    """[T, K] of any scale -> what is ranked above each, row by row: by sorting, not by our loop."""
    ranked = -np.sort(-weights / weights.sum(1, keepdims=True), axis=1)
    return np.cumsum(ranked, axis=1) - ranked


def test_of_a_text_that_is_read(toy: Callable[..., Path], open_model: Open) -> None:
    """Longer than the context, so in pieces. The library's routers say what the weights are."""
    folder, heard = toy("qwen3_moe"), []
    model, ticked = open_model(folder, "half"), []
    found = profile_reading(model, IDS, "a text", ticked.append)
    theirs = oracle.reference(folder)
    hooks = [
        module.register_forward_hook(lambda _, __, output: heard.append(output[1].detach()))
        for name, module in theirs.named_modules()
        if name.endswith("mlp.gate")
    ]
    step = model.offload.context_tokens
    for begin in range(0, len(IDS), step):
        theirs(torch.tensor([IDS[begin : begin + step]]))
    for hook in hooks:
        hook.remove()
    values = np.concatenate([unimportances(weights.double().numpy()).ravel() for weights in heard])
    assert sum(ticked) == found.tokens == len(IDS) and len(values) > 1000
    assert np.allclose(found.quantiles, profile_of(values.tolist(), 1, "").quantiles, atol=2e-5)


def test_of_a_recorded_run_padding_says_nothing() -> None:
    weights = np.random.default_rng(0).dirichlet([1, 1, 1], 240)
    rows = weights.tolist()
    trace = [
        Routing(layer, Phase.PREFILL, 8, [[8] * 3, *[[0, 1, 2]] * 120], weights=[[0.9, 0.1, 0.0], *part])
        for layer, part in ((0, rows[:120]), (1, rows[120:]))
    ]
    found = profile_recorded(trace, "run.trace")
    assert found.tokens == 120 and found.text == "run.trace"
    assert np.allclose(found.quantiles, profile_of(unimportances(weights).ravel().tolist(), 1, "").quantiles, atol=2e-5)


def test_too_short_a_text_is_refused(toy: Callable[..., Path], open_model: Open) -> None:
    with pytest.raises(ConfigError, match="`text` has 99 tokens, and at least 100 are needed"):
        profile_reading(open_model(toy("qwen3_moe"), "half"), IDS[:99], "a text", lambda _: None)
    with pytest.raises(ConfigError, match="`trace` has 0 tokens"):
        profile_recorded([], "run.trace")
