"""Published configurations as a package ships them: parameters and bytes of `smoe plan` are the published ones.

Would catch a family whose sizes are read under another name, a release whose experts are counted in another format,
and one that is refused in words that are not ours.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from smoe.errors import NotMoEError, UnsupportedModelError
from smoe.models.model_sizes import model_sizes
from smoe.models.spec import ModelSpec
from smoe.presets import configure
from tests.published_configs import PUBLISHED
from tests.real.artifacts import artifacts

_TOLERANCE = 0.01
PARAMETERS = {
    "Qwen/Qwen3-30B-A3B": 30.5,
    "Qwen/Qwen3-30B-A3B-FP8": 30.5,
    "Qwen/Qwen3-235B-A22B": 235,
    "Qwen/Qwen3-Coder-480B-A35B-Instruct": 480,
    "Qwen/Qwen3.5-122B-A10B": 122,
    "Qwen/Qwen3.5-35B-A3B": 35,
    "Qwen/Qwen3.5-397B-A17B": 397,
    "Qwen/Qwen3-VL-30B-A3B-Instruct": 31,
    "MiniMaxAI/MiniMax-M2.5": 229,
    "XiaomiMiMo/MiMo-V2-Flash": 309,
    "deepseek-ai/DeepSeek-R1": 671,
    "deepseek-ai/DeepSeek-V3": 671,
    "deepseek-ai/DeepSeek-V3.2": 671,
    "deepseek-ai/DeepSeek-V4-Flash": 284,
    "meta-llama/Llama-4-Maverick-17B-128E-Instruct": 400,
    "mistralai/Mixtral-8x22B-v0.1": 141,
    "mistralai/Mixtral-8x7B-v0.1": 46.7,
    "moonshotai/Kimi-K2-Instruct": 1026,
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": 31.6,
    "nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16": 550,
    "openai/gpt-oss-120b": 116.8,
    "openai/gpt-oss-20b": 20.9,
    "zai-org/GLM-5": 744,
}
"""Thousand millions of parameters by model cards and technical reports, without layers of multi-token prediction."""
_MATRICES = {"nvidia/Qwen3.6-35B-A3B-NVFP4": 4.5, "nvidia/NVIDIA-Nemotron-3.5-Lightning-30B-A3B-NVFP4": 4.5}
"""Bits of a number of the experts."""


def folder_of(model: str, tmp_path: Path) -> Path:
    """A folder with the configuration of a model, as its repository has it."""
    for each in artifacts("configurations").glob(f"{model.replace('/', '--')}_*config.json"):
        name = "hf_quant_config.json" if each.name.endswith("_hf_quant_config.json") else "config.json"
        (tmp_path / name).write_bytes(each.read_bytes())
    return tmp_path


def planned(model: str, tmp_path: Path) -> ModelSpec:
    return model_sizes(folder_of(model, tmp_path), configure())[1]


@pytest.mark.parametrize("model", PARAMETERS)
def test_parameters_are_the_published_ones(model: str, tmp_path: Path) -> None:
    found = sum(weight.numbers for weight in planned(model, tmp_path).outline.weights.values()) / 1e9
    assert found == pytest.approx(PARAMETERS[model], rel=_TOLERANCE)


SIZES = [
    "openai/gpt-oss-20b", "openai/gpt-oss-120b", "Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-30B-A3B-FP8",
    "mistralai/Mixtral-8x7B-v0.1", "moonshotai/Kimi-K2-Instruct", "moonshotai/Kimi-K2.5",
]  # fmt: skip


@pytest.mark.parametrize("model", SIZES)
def test_files_are_as_large_as_published(model: str, tmp_path: Path) -> None:
    files = planned(model, tmp_path).files
    assert files is not None
    assert files.together / 1e9 == pytest.approx(PUBLISHED[model].files_gb, rel=_TOLERANCE)


@pytest.mark.parametrize("model", _MATRICES)
def test_experts_in_four_bits_are_counted_so(model: str, tmp_path: Path) -> None:
    spec = planned(model, tmp_path)
    numbers = sum(weight.numbers for name, weight in spec.outline.weights.items() if name in spec.outline.of_experts)
    assert spec.files is not None and spec.files.experts is not None
    assert 8 * spec.files.experts / numbers == pytest.approx(_MATRICES[model], rel=_TOLERANCE)


REFUSED = {
    "MiniMaxAI/MiniMax-M3": "neither the family 'minimax_m3' nor a class",
    "moonshotai/Kimi-K3": "neither the family 'kimi_k3' nor a class",
    "nvidia/DeepSeek-V4-Flash-NVFP4": "once more by modelopt",
    "nvidia/MiniMax-M3-NVFP4": "quantised as 'MXFP8'",
    "stepfun-ai/Step-3.7-Flash": "does not expose",
}


@pytest.mark.parametrize("model", REFUSED)
def test_what_is_not_read_is_refused_by_name(model: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=REFUSED[model]):
        planned(model, tmp_path)


def test_a_dense_model_is_called_dense(tmp_path: Path) -> None:
    with pytest.raises(NotMoEError, match="dense model"):
        planned("Qwen/Qwen3-0.6B", tmp_path)


def test_a_release_of_an_own_family_is_read_by_its_class(tmp_path: Path) -> None:
    """SGLang's release of DeepSeek-V4-Flash calls itself 'deepseek_ref'."""
    spec = planned("sgl-project/DeepSeek-V4-Flash-FP8", tmp_path)
    assert any("read as 'deepseek_v4'" in doubt for doubt in spec.doubts)
