"""What experts were given: would catch rows of another expert, pieces in another order, an activation that is not the
family's, and a bias that is left out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from smoe.models.experts import find_sites
from smoe.packing.calibration import Calibration, LayerInputs, activated
from smoe.packing.compensation import SECTION
from tests import zoo

EXPERT = 3


@torch.no_grad()
@pytest.mark.parametrize("family", ["mixtral", "granitemoe", "gpt_oss", "minimax_m2"])
def test_the_second_product_is_given_what_the_library_gives_it(family: str) -> None:
    model = zoo.make(family)
    experts = model.get_submodule(find_sites(model)[0].name)
    inputs = torch.randn(6, 64)
    up_bias, down_bias = (getattr(experts, f"{name}_proj_bias", None) for name in ("gate_up", "down"))
    inner = activated(experts, inputs, experts.gate_up_proj[EXPERT], None if up_bias is None else up_bias[EXPERT, None])
    down = experts.down_proj[EXPERT] if experts.is_transposed else experts.down_proj[EXPERT].t()
    ours = inner @ down + (0 if down_bias is None else down_bias[EXPERT])
    theirs = experts(inputs, torch.full((6, 1), EXPERT), torch.ones(6, 1))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_come_back_to_their_experts(dtype: torch.dtype, tmp_path: Path) -> None:
    hidden = torch.randn(20, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    index = torch.randint(4, (20, 2), generator=torch.Generator().manual_seed(1))
    calibration = Calibration(tmp_path, {5: nn.Identity()})
    for rows in (slice(0, 7), slice(7, 20)):
        calibration.add(5, hidden[rows], index[rows])
    found = calibration.read(5)
    for expert in range(5):  # nobody went to the last
        wanted = [row for row, chosen in zip(hidden.float(), index.tolist(), strict=True) if expert in chosen]
        assert torch.equal(found.of(expert), torch.stack(wanted) if wanted else torch.empty(0, 16))


def test_moments_are_of_all_rows_by_section() -> None:
    hidden = torch.randn(9, SECTION + 64)
    first, second = LayerInputs(hidden, torch.zeros(9, 1)).moments
    torch.testing.assert_close(first, hidden[:, :SECTION].t() @ hidden[:, :SECTION] / 9)
    torch.testing.assert_close(second, hidden[:, SECTION:].t() @ hidden[:, SECTION:] / 9)
