"""What is said of the size of a model that cannot be computed.

Would catch a refusal that leaves a newcomer without a figure, and an estimate from fields that are no sizes.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from smoe.errors import UnsupportedModelError
from smoe.models.model_sizes import model_sizes
from smoe.models.rough_size import rough_size
from smoe.presets import configure
from tests.published_configs import KIMI_K25, QWEN3_30B, Published


def test_by_hand() -> None:
    """48 layers of 128 experts, each with three matrices of 2048 x 768 in two bytes: 9 MiB, 54 GiB together."""
    assert "at most 54.0 GiB in bfloat16 (up to 48 layers of 128 experts of 9.00 MiB" in str(rough_size(QWEN3_30B))
    assert "8 in each layer, 3.38 GiB" in str(rough_size(QWEN3_30B))
    assert "384 experts" in str(rough_size(KIMI_K25)), "of the language model"


@pytest.mark.parametrize("odd", [{"num_experts": None}, {"hidden_size": "wide"}, {"num_hidden_layers": True}])
def test_no_estimate_without_the_usual_fields(odd: dict[str, object]) -> None:
    assert rough_size(QWEN3_30B | odd) is None


def test_a_refused_plan_contains_it(tmp_path: Path) -> None:
    place = Published({**QWEN3_30B, "model_type": "newmoe", "architectures": ["NewMoe"]}).write(tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"neither the family 'newmoe'.* For an estimate: .* at most 54"):
        model_sizes(place, configure())
