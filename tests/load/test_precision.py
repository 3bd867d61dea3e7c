"""Models whose experts are served in fewer bits: beside transformers on the numbers that the codes stand for."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from smoe.config import configure
from smoe.errors import CheckpointError, ConfigError, UnsupportedModelError
from smoe.models.packed import read_packed
from smoe.models.read_spec import read_spec
from smoe.models.reference import reference_parameters
from smoe.policy.budget import allocate
from tests import gguf_toy, oracle, zoo
from tests.models.test_gguf_quantised import assert_near, steps
from tests.packs import contents_of, pack_folder

Open = Callable[..., PreTrainedModel]


def packed_toy(toy: Callable[..., Path], family: str, precision: str, target: Path, dtype: torch.dtype) -> Path:
    folder = Path(shutil.copytree(toy(family, dtype=dtype), target))
    pack_folder(folder, precision=precision)
    return folder


@torch.no_grad()
def dequantised(folder: Path, family: str, precision: str, dtype: torch.dtype) -> PreTrainedModel:
    """The library's model with the packed experts' numbers in it."""
    model = oracle.reference(folder, dtype)
    packed = read_packed(folder, contents_of(folder, precision=precision))
    assert packed is not None
    for site in contents_of(folder, precision=precision).sites:
        experts = model.get_submodule(site.name)
        numbers = reference_parameters(packed.layers[site.layer], list(range(site.experts)), dtype)
        for name, value in numbers.items():
            weight = experts.get_parameter(name)
            far = (value - weight).float().norm() / weight.float().norm()
            assert 0 < far < {"int8": 0.01, "int4": 0.1, "int2": 0.3}[precision], "not those weights"
            weight.copy_(value)
    return model


@pytest.mark.parametrize("precision", ["int8", "int4", "int2"])
@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "deepseek_v3", "granitemoe"])
def test_logits_are_those_of_the_dequantised_model(
    family: str, precision: str, toy: Callable[..., Path], open_model: Open, tmp_path: Path
) -> None:
    folder = packed_toy(toy, family, precision, tmp_path / "model", torch.float32)
    theirs = dequantised(folder, family, precision, torch.float32)
    full, least = (
        steps(open_model(folder, budget, precision=precision), oracle.PROMPT) for budget in ("full", "minimum")
    )
    assert all(map(torch.equal, full, least)), "a result that hangs on the budget"
    assert_near(full, steps(theirs, oracle.PROMPT), 1e-4)


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_in_16_bits(kernels: str, toy: Callable[..., Path], open_model: Open, tmp_path: Path) -> None:
    folder = packed_toy(toy, "qwen3_moe", "int4", tmp_path / "model", torch.bfloat16)
    theirs = dequantised(folder, "qwen3_moe", "int4", torch.bfloat16)
    ours = steps(open_model(folder, "half", precision="int4", kernels=kernels), oracle.PROMPT)
    assert_near(ours, steps(theirs, oracle.PROMPT), 0.04, others=2)


def test_the_same_budget_holds_more_experts(toy: Callable[..., Path], tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "moe_intermediate_size": 256}
    folder = Path(shutil.copytree(toy("qwen3_moe", dtype=torch.bfloat16, **sizes), tmp_path / "model"))
    pack_folder(folder, precision="int4")
    memory = oracle.budget_bytes(folder, 4)
    plain, packed = (oracle.demand(folder, precision=precision) for precision in ("auto", "int4"))
    assert allocate(memory, packed).cache_slots > 3 * allocate(memory, plain).cache_slots == 12


def test_a_precision_must_have_been_packed(toy: Callable[..., Path], open_model: Open, tmp_path: Path) -> None:
    folder = packed_toy(toy, "mixtral", "int8", tmp_path / "model", torch.float32)
    with pytest.raises(ConfigError, match=r"smoe pack on .* with `precision` int4") as refusal:
        open_model(folder, 10**9, precision="int4")
    assert refusal.value.setting == "precision"


def test_a_pack_of_other_weights_is_refused(toy: Callable[..., Path], open_model: Open, tmp_path: Path) -> None:
    folder = packed_toy(toy, "mixtral", "int4", tmp_path / "model", torch.float32)
    model = oracle.reference(folder)
    for weight in model.parameters():
        weight.data += 1
    model.save_pretrained(folder)
    with pytest.raises(CheckpointError, match="other weights"):
        open_model(folder, "half", precision="int4")


def test_a_gguf_file_has_the_precision_that_it_has(open_model: Open, tmp_path: Path) -> None:
    path, _ = gguf_toy.quantised(tmp_path / "toy.gguf", "Q8_0")
    with pytest.raises(ConfigError, match="GGUF"):
        read_spec(path, configure(context_tokens=32, precision="int4"))


def test_experts_with_biases_are_refused_by_name(toy: Callable[..., Path]) -> None:
    with pytest.raises(UnsupportedModelError, match="bias"):
        contents_of(toy("gpt_oss"), precision="int4")


def test_what_no_format_fits_is_refused(tmp_path: Path) -> None:
    zoo.save("qwen3_moe", tmp_path / "model", moe_intermediate_size=24)
    with pytest.raises(UnsupportedModelError, match="down_proj of layer 0 has rows of 24"):
        contents_of(tmp_path / "model", precision="int8")
