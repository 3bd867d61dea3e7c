"""Codes that make up for each other: would catch errors handed to the wrong columns or with the wrong sign, a section
whose columns are another's, and codes outside of the grid.

The oracle is the definition: the least of all codes by brute force where there are few, and the outputs' own error.
"""

from __future__ import annotations

from itertools import product

import pytest
import torch

from smoe.formats.registry import FORMATS
from smoe.packing import compensation
from smoe.packing.compensation import CodeGrid, Compensation, moments
from smoe.packing.quantiser import quantised


def inputs_that_go_together(tokens: int, columns: int, seed: int = 0) -> torch.Tensor:
    """Features that are mixtures of a quarter as many, and a little noise."""
    chance = torch.Generator().manual_seed(seed)
    few = torch.randn(tokens, columns // 4, generator=chance)
    return few @ torch.randn(columns // 4, columns, generator=chance) + 0.1 * torch.randn(
        tokens, columns, generator=chance
    )


def output_error(weights: torch.Tensor, numbers: torch.Tensor, inputs: torch.Tensor) -> float:
    """Of the product with the inputs, relative to it."""
    wanted = inputs @ weights.t()
    return float((inputs @ numbers.t() - wanted).norm() / wanted.norm())


def decoded(name: str, weights: torch.Tensor, how: Compensation | None) -> torch.Tensor:
    return torch.from_numpy(FORMATS[name].decode(quantised(weights, FORMATS[name], how)[0].numpy()))


@pytest.mark.parametrize(
    ("name", "gain"), [("Q8_0", 0.7), *((name, 0.6) for name in ("INT4", "Q4_1", "INT3", "Q3_K", "INT2", "Q2_K"))]
)
def test_outputs_are_nearer_where_inputs_go_together(name: str, gain: float) -> None:
    """On inputs of the same kind that were not seen, too; and the grids are as they were."""
    weights = 0.02 * torch.randn(48, 256, generator=torch.Generator().manual_seed(1))
    both = inputs_that_go_together(4000, 256)
    seen, unseen = both[:3000], both[3000:]
    plain, compensated = (decoded(name, weights, how) for how in (None, Compensation(seen, moments(seen))))
    assert torch.equal(plain[:, 0], compensated[:, 0]), "nothing was rounded before the first column"
    for inputs in (seen, unseen):
        assert output_error(weights, compensated, inputs) < gain * output_error(weights, plain, inputs)


def test_inputs_that_do_not_go_together_change_nothing() -> None:
    weights = torch.randn(8, 256, generator=torch.Generator().manual_seed(2))
    for none in (torch.empty(0, 256), torch.zeros(5, 256)):
        assert torch.equal(decoded("INT2", weights, None), decoded("INT2", weights, Compensation(none)))


def test_it_is_near_the_best_of_all_codes() -> None:
    """Eight columns of four codes: 65,536 ways."""
    inputs = inputs_that_go_together(500, 8)
    moment = inputs.t() @ inputs / 500
    weights = 0.5 * torch.randn(24, 8, generator=torch.Generator().manual_seed(3))
    grid = CodeGrid(torch.full((24, 8), -2.0), torch.full((24, 8), 4 / 3), 0, 3)

    def error(numbers: torch.Tensor) -> torch.Tensor:
        far = numbers - weights.unsqueeze(1)
        return ((far @ moment) * far).sum(-1)

    every = torch.tensor(list(product(range(4), repeat=8))).float() * 4 / 3 - 2
    least = float(error(every).amin(1).sum())
    rounded = ((weights + 2) * 3 / 4).round().clamp(0, 3) * 4 / 3 - 2
    found = Compensation(inputs, moments(inputs)).codes(weights, grid) * 4 / 3 - 2
    ours, nearest = (float(error(each.unsqueeze(1)).sum()) for each in (found, rounded))
    assert least <= ours < nearest / 4


def test_sections_are_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns of one section know nothing of another: the same codes as each alone."""
    weights, inputs = torch.randn(6, 512), inputs_that_go_together(600, 512)
    monkeypatch.setattr(compensation, "SECTION", 256)
    whole = decoded("INT2", weights, Compensation(inputs, moments(inputs)))
    for half in (slice(0, 256), slice(256, 512)):
        alone = inputs[:, half].contiguous()
        how = Compensation(alone, moments(alone))
        assert torch.equal(whole[:, half], decoded("INT2", weights[:, half].contiguous(), how))


@pytest.mark.parametrize("batch", [1, 7, 64])
def test_batches_of_columns_are_only_faster(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weights, inputs = torch.randn(6, 64), inputs_that_go_together(600, 64)
    how = Compensation(inputs, moments(inputs))
    at_once = decoded("INT4", weights, how)
    monkeypatch.setattr(compensation, "_BATCH", batch)
    differing = (decoded("INT4", weights, how) != at_once).float().mean()
    assert differing < 0.02, "but for codes that lie between two"
