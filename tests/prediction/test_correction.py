"""Corrections of routers: what is learned, how sure it is. NumPy's least squares and hand-made chances are the oracle.

Would catch: means that are not folded into the bias, a token before that is read where there was none, weights that
shrink towards nothing, a confidence fitted upside down or without its offset.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from smoe.models.router_matrix import RouterMatrix
from smoe.models.scoring import Groups, ScoringRule
from smoe.prediction import correction
from smoe.prediction.correction import Correction, fitted, uncorrected, with_confidence
from smoe.prediction.ranking import margins

TOKENS, HIDDEN, EXPERTS = 4000, 12, 6


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def text() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """hidden, before [T, H], neither of mean 0, and where there was a token before."""
    hidden, before = noise(TOKENS, HIDDEN, seed=1) + 1.0, 3 * noise(TOKENS, HIDDEN, seed=2) - 2.0
    return hidden, before, torch.arange(TOKENS) % 50 != 0


def test_a_planted_map_is_recovered(
    text: tuple[torch.Tensor, torch.Tensor, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without shrinkage to the last digits, with it by NumPy's least squares with the prior as further rows."""
    hidden, before, _ = text
    everywhere = torch.ones(TOKENS, dtype=torch.bool)
    planted, shift, router = noise(EXPERTS, 2 * HIDDEN), noise(EXPERTS), noise(EXPERTS, HIDDEN, seed=3)
    logits = torch.cat([hidden, before], 1) @ planted.T + shift
    found = fitted(hidden, before, everywhere, logits, router)
    inputs = np.concatenate([part.double().numpy() - part.double().numpy().mean(0) for part in (hidden, before)], 1)
    wished = (logits - logits.mean(0)).double().numpy()
    scale = (inputs**2).sum(0).reshape(2, HIDDEN).mean(1)
    root = np.sqrt(correction.SHRINKAGE * scale).repeat(HIDDEN)
    prior = np.concatenate([router.double().numpy().T, np.zeros((HIDDEN, EXPERTS))])
    rows, right = np.concatenate([inputs, np.diag(root)]), np.concatenate([wished, root[:, None] * prior])
    theirs = np.linalg.lstsq(rows, right, rcond=None)[0]
    assert np.allclose(found.weight.numpy().T, theirs, atol=1e-4)
    monkeypatch.setattr(correction, "SHRINKAGE", 1e-9)
    exact = fitted(hidden, before, everywhere, logits, router)
    assert torch.allclose(exact.weight, planted, atol=1e-4) and torch.allclose(exact.bias, shift, atol=1e-3)
    assert torch.allclose(exact.logits(hidden, before), logits, atol=1e-3)


def test_a_token_without_one_before_has_the_mean_in_its_place(
    text: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    """What stands where there was no token before may be anything."""
    hidden, before, has_before = text
    router, logits = noise(EXPERTS, HIDDEN), noise(TOKENS, EXPERTS, seed=4) + before @ noise(HIDDEN, EXPERTS, seed=5)
    found = fitted(hidden, before, has_before, logits, router)
    other = torch.where(has_before.unsqueeze(1), before, torch.full_like(before, 1e3))
    assert torch.allclose(found.weight, fitted(hidden, other, has_before, logits, router).weight, atol=1e-4)
    mean = before[has_before].mean(0).expand(3, -1)
    assert torch.allclose(found.logits(hidden[:3], None), found.logits(hidden[:3], mean), atol=1e-3)
    assert not torch.allclose(found.logits(hidden[:3], None), found.logits(hidden[:3], before[1:4]), atol=0.1)


def test_what_the_text_says_nothing_about_stays_the_routers() -> None:
    hidden, router = noise(50, HIDDEN), noise(EXPERTS, HIDDEN, seed=1)
    hidden[:, 5:] = 0
    logits = hidden @ noise(HIDDEN, EXPERTS, seed=2)
    found = fitted(hidden, torch.zeros_like(hidden), torch.zeros(50, dtype=torch.bool), logits, router)
    assert torch.allclose(found.weight[:, 5:HIDDEN], router[:, 5:], atol=1e-5)
    assert not torch.allclose(found.weight[:, :5], router[:, :5], atol=0.1)
    assert not found.weight[:, HIDDEN:].any()


@pytest.mark.parametrize("bias", [None, noise(EXPERTS, seed=7)], ids=["no bias", "bias"])
def test_nothing_learned_is_the_router_itself(bias: torch.Tensor | None) -> None:
    matrix, hidden = RouterMatrix(noise(EXPERTS, HIDDEN), bias), noise(3, HIDDEN, seed=1)
    found = uncorrected(matrix)
    assert torch.equal(found.logits(hidden, None), matrix.logits(hidden))
    assert torch.allclose(found.logits(hidden, 100 * noise(3, HIDDEN, seed=2)), matrix.logits(hidden), atol=1e-5)
    assert bool((found.probabilities(noise(3, EXPERTS)) > 0.999).all())


def test_confidence_is_what_was_drawn() -> None:
    margin = 0.1 * noise(20000, 4)
    chance = (margin * 30 - 1.0).sigmoid()
    wanted = torch.rand(margin.shape, generator=torch.Generator().manual_seed(1)) < chance
    found = with_confidence(uncorrected(RouterMatrix(noise(4, HIDDEN), None)), margin, wanted)
    assert found.slope == pytest.approx(30, rel=0.05) and found.offset == pytest.approx(-1.0, abs=0.05)
    assert found.probabilities(torch.tensor(1 / 30)).item() == pytest.approx(0.5, abs=0.02)


def test_confidence_without_an_error_is_finite() -> None:
    margin = noise(500, 4)
    found = with_confidence(uncorrected(RouterMatrix(noise(4, HIDDEN), None)), margin, margin > 0)
    assert np.isfinite([found.slope, found.offset]).all() and found.slope > 5


def test_margins_by_hand() -> None:
    """From the middle between the second and the third; in scores plus bias where these are what is ranked."""
    logits = torch.tensor([[4.0, 1.0, 3.0, 0.0]])
    plain = ScoringRule("softmax", "share", 1.0)
    assert margins(plain, 2, logits).tolist() == [[2.0, -1.0, 1.0, -2.0]]
    assert margins(plain, 4, logits).tolist() == [[4.0, 1.0, 3.0, 0.0]], "nobody is left out: from the last one"
    biased = ScoringRule("sigmoid", "share", 1.0, bias=torch.tensor([0.0, 1.0, 0.0, 0.0]))
    ranked = 1 / (1 + np.exp(-logits.double().numpy())) + [[0, 1, 0, 0]]
    middle = np.sort(ranked)[0, 1:3].mean()
    assert np.allclose(margins(biased, 2, logits).numpy(), ranked - middle, atol=1e-6)
    grouped = margins(ScoringRule("softmax", "share", 1.0, groups=Groups(2, 1, 1)), 2, logits)
    assert bool(torch.isfinite(grouped).all()) and grouped[0, 2] < -1 < 0 < grouped[0, 0], "a group that is left out"


def test_elsewhere_it_is_the_same() -> None:
    found = Correction(noise(2, 4), noise(2), noise(2, seed=1), 3.0, -1.0).to(torch.device("cpu"), torch.bfloat16)
    assert {value.dtype for value in found[:3]} == {torch.bfloat16} and found[3:] == (3.0, -1.0)
