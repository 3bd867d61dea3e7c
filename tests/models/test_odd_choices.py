"""What routers and files may hold that no published model does: an expert chosen twice, numbers that are none.

Would catch: a token's second share of an expert lost, NaN that becomes text, true read as 1.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from smoe.errors import ModelError
from smoe.models.checkpoint import checkpoint_at
from smoe.models.config_file import check_config
from smoe.models.read_spec import read_spec
from smoe.presets import configure
from tests import gguf_toy, oracle, zoo

Open = Callable[..., PreTrainedModel]


def _choose_twice(_module: nn.Module, _given: Any, output: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Every other token's second expert is its first once more."""
    *others, chosen = output
    chosen = chosen.clone()
    chosen[::2, 1] = chosen[::2, 0]
    return (*others, chosen)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_an_expert_chosen_twice(family: str, dtype: torch.dtype, toy: Callable[..., Path], open_model: Open) -> None:
    """It counts twice, as in the library, in a prompt and token by token, whether it is resident or not."""
    folder = toy(family, dtype=dtype)
    theirs = oracle.reference(folder)
    twice(theirs)
    wanted = oracle.greedy(theirs)
    for budget in ("full", "minimum"):
        ours = open_model(folder, budget)
        twice(ours)
        oracle.assert_same_steps(oracle.greedy(ours), wanted)


def twice(model: PreTrainedModel) -> None:
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(_choose_twice)


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = zoo.save("deepseek_v3", tmp_path_factory.mktemp("said"))
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


NAN, INFINITY = float("nan"), float("inf")
ODD: dict[str, tuple[dict[str, Any], str]] = {
    "NaN": ({"rms_norm_eps": NAN}, "'rms_norm_eps' is nan; it must be a finite number"),
    "infinity": ({"routed_scaling_factor": INFINITY}, "'routed_scaling_factor' is inf; it must be a finite number"),
    "NaN in positions": ({"rope_parameters": {"rope_type": "default", "rope_theta": NAN}}, "'rope_theta' is nan"),
    "true in positions": ({"rope_scaling": {"rope_type": "linear", "factor": True}}, "'factor' is True"),
    "true experts a token": ({"num_experts_per_tok": True}, "'num_experts_per_tok' is True; it must be a number"),
    "true experts": ({"n_routed_experts": True}, "'n_routed_experts' is True; it must be a number"),
    "true layers": ({"num_hidden_layers": True}, "'num_hidden_layers' is True"),
    "true norm": ({"rms_norm_eps": True}, "'rms_norm_eps' expected float, got bool"),
    "more than there are": (
        {"num_experts_per_tok": 9},
        "'num_experts_per_tok' is 9; it must be from 1 to 8, the value of",
    ),
    "more, in a text model": ({"text_config": {"moe_k": 3, "moe_num_experts": 2}}, "'moe_k' is 3; .* 2, the value of"),
}


@pytest.mark.parametrize("what", ODD)
def test_odd_numbers_of_a_configuration_are_named(what: str, said: dict[str, Any], tmp_path: Path) -> None:
    change, message = ODD[what]
    (tmp_path / "config.json").write_text(json.dumps({**said, **change}))
    with pytest.raises(ModelError, match=message) as caught:
        read_spec(tmp_path, configure())
    assert "config.json" in str(caught.value)


def test_limits_may_be_infinite(tmp_path: Path) -> None:
    """As in configurations of state space models."""
    fields = {"model_type": "bamba", "time_step_limit": [0.0, INFINITY], "swiglu_limit": INFINITY}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert check_config(tmp_path) == "bamba"


METADATA: dict[str, tuple[dict[str, Any], str]] = {
    "NaN": ({"attention.layer_norm_rms_epsilon": NAN}, "'attention.layer_norm_rms_epsilon' is nan"),
    "infinity": ({"rope.freq_base": INFINITY}, "'rope.freq_base' is inf; it must be a finite number"),
    "NaN in positions": ({"rope.freq_base": NAN}, "'rope.freq_base' is nan"),
    "NaN in a scaling": (
        {"rope.scaling.type": "linear", "rope.scaling.factor": NAN},
        "scales rotary positions by the method 'linear', but the parameter factor is nan",
    ),
    "an infinite scaling": (
        {"rope.scaling.type": "linear", "rope.scaling.factor": INFINITY},
        "scales rotary positions by the method 'linear', but the parameter factor is inf",
    ),
    "true in a scaling": (
        {"rope.scaling.type": "linear", "rope.scaling.factor": True},
        "scales rotary positions by the method 'linear', but the parameter factor is True",
    ),
    "true": ({"expert_used_count": True}, "'expert_used_count' should be one number; it is True"),
    "true for 1": ({"expert_weights_scale": True}, "'qwen3moe.expert_weights_scale' is True"),
    "more experts than there are": ({"expert_used_count": 9}, "'num_experts_per_tok' is 9; it must be from 1 to 8"),
}


@pytest.mark.parametrize("what", METADATA)
def test_odd_metadata_of_a_gguf_file_is_named(what: str, tmp_path: Path) -> None:
    change, message = METADATA[what]
    path = gguf_toy.write(tmp_path / "toy.gguf", zoo.make("qwen3_moe", dtype=torch.bfloat16), metadata=change)
    with pytest.raises(ModelError, match=message):
        checkpoint_at(path).config()
